"""Where the time of a step goes of a plan that splits data alone, as JSON and as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from topoplan.layout.layout import Layout
from topoplan.planner.plan import Plan
from topoplan.planner.sharded_time import ShardedTimeBreakdown
from topoplan.planner.time_breakdown import FlowRow
from topoplan.planner.view import rounded
from topoplan.report.paragraphs import paragraph
from topoplan.report.tables import heading, layer_kind, table_of
from topoplan.report.text import counted, significant
from topoplan.report.time import (
    WITH_FORMULAS,
    around_table,
    collective_to_dict,
    layer_to_dict,
    ms,
    operators_table,
    parts_table,
)

_MIB = 2**20

# What a reader opens to check a figure: file and function of the formula, and what that is taken from.
SOURCES = {
    "step": "engines/data_parallel/step.py sharded_time",
    "gemm": "operators/te_compute.py gemm_s; NVIDIA Matrix Multiplication User's Guide; at eager_gemm_share",
    "attention": "operators/te_compute.py core_attention; FlashAttention-2, arXiv 2307.08691, section 4",
    "elementwise": "operators/eager_compute.py EagerBuilder; bytes over the card's memory bandwidth",
    "cp_comm": "operators/eager_compute.py _ulysses; DeepSpeed Ulysses, arXiv 2309.14509, section 3",
    "vision tower": "operators/vision_time.py vision_s",
    "recompute": "engines/data_parallel/step.py _passes; torch/utils/checkpoint.py",
    "ends": "engines/data_parallel/step.py _ends_s; transformers loss/loss_utils.py",
    "layers": "operators/eager_compute.py eager_operators",
    "host launches": "engines/data_parallel/step.py sharded_terms; eager_launch_s and zero3_hook_s of the profile",
    "dp_comm": "engines/data_parallel/step.py sharded_terms; ZeRO, arXiv 1910.02054, section 7",
    "copies into and out of buffers": "engines/data_parallel/step.py GATHER_COPY_BYTES; PyTorch _fsdp_collectives.py",
    "flows": "engines/data_parallel/step.py _traffic; ZeRO, arXiv 1910.02054, section 7",
    "offload": "engines/data_parallel/step.py _copies_s; bytes over PCIe's rate",
    "optimizer": "engines/data_parallel/step.py _adam_s",
    "reference": "engines/data_parallel/step.py sharded_terms; trl trainer/dpo_trainer.py",
    "collectives": "network/collectives.py all_gather_s, all_reduce_s, all_to_all_s; Thakur et al. 2005, section 4",
    "band": "engines/data_parallel/step.py sharded_time; the bands of catalog/profiles.json",
}

_WHAT = {
    "gemm": "linear layers",
    "attention": "attention kernels",
    "elementwise": "norms, activations, casts: bound by memory",
    "cp_comm": "all-to-all of Ulysses",
    "recompute": "forward that checkpointing repeats",
    "ends": "embedding, output layer, loss",
    "host launches": "the GPU waits for the host's launches",
    "dp_comm": "weights and gradients, what is not hidden",
    "offload": "copies over PCIe, what is not hidden",
    "optimizer": "Adam, host work",
    "reference": "DPO's reference model, forward only",
}
MOMENTS = {
    "forward": "every forward",
    "backward": "every backward",
    "last": "the last backward",
    "after": "after Adam",
    "layers": "every layer",
    "stages": "every micro batch",
}
"""When something is sent."""


def source_of(part: str, name: str) -> str:
    """Where the formula of a row is."""
    return SOURCES.get(name) or SOURCES[part]


def sharded_time_to_dict(plan: Plan, account: ShardedTimeBreakdown) -> dict[str, Any]:
    """Every term of a step's time, in seconds. `rows` add up to `step_s`."""
    time = plan.time
    return {
        "step_s": rounded(time.step_s),
        "band": [rounded(bound) for bound in time.band_s],
        "microbatches": account.microbatches,
        "forward_s": rounded(account.forward_s),
        "backward_s": rounded(account.backward_s),
        "rows": [
            {
                "part": row.part,
                "name": row.name,
                "step_s": rounded(row.step_s),
                "share": rounded(row.step_s / time.step_s),
                "source": source_of(row.part, row.name),
            }
            for row in account.rows
            if row.step_s
        ],
        "layers": [layer_to_dict(times) for times in account.layers],
        "ends": [
            {"name": row.name, "forward_s": rounded(row.forward_s), "backward_s": rounded(row.backward_s)}
            for row in account.ends
        ],
        "data_parallel": {
            "flows": [_flow_to_dict(row) for row in account.flows],
            "sent_s": rounded(account.sent_s),
            "exposed_s": rounded(sum(row.step_s for row in account.communication)),
        },
        "offload": {
            "copied_s": rounded(account.copied_s),
            "exposed_s": rounded(sum(row.step_s for row in account.offload)),
        },
        "collectives": [_flow_to_dict(row) for row in account.collectives],
        "sources": dict(SOURCES),
    }


def _flow_to_dict(row: FlowRow) -> dict[str, Any]:
    return {
        "moment": row.moment,
        "times": row.times,
        "calls": row.calls,
        **collective_to_dict(row.call),
        "step_s": rounded(row.step_s),
    }


def print_sharded_time(console: Console, plan: Plan, account: ShardedTimeBreakdown) -> None:
    """The parts of a step; the layers operator by operator; what stands around them; what is sent and copied."""
    heading(console, "The step, by part", SOURCES["step"])
    console.print(parts_table(plan, _WHAT, SOURCES))
    for times in account.layers:
        batches = counted(account.microbatches, "micro batch", "micro batches")
        layers = f"{layer_kind(times.layer)}, {counted(times.count, 'layer')} x {batches}"
        frozen = "" if any(row.backward_s for row in times.operators) else ", no backward"
        heading(
            console, f"A layer, operator by operator: {layers}{frozen}; ms of one, s and % of all", SOURCES["layers"]
        )
        console.print(operators_table(plan, times, source_of, formulas=console.width >= WITH_FORMULAS))
    heading(console, "Around the layers")
    names = {row.part: _WHAT[row.part] for row in account.other}
    rows = [*account.communication, *account.offload, *account.optimizer, *account.other]
    ends = [row for row in account.rows if row.part == "ends"]
    console.print(around_table(plan, ends + rows, account.layers, names, source_of))
    if account.flows or account.collectives:
        heading(console, "What the GPUs send each other", SOURCES["flows"])
        console.print(_flows(account))
        words = _hidden_words(account)
        paragraph(
            console, f"{words} A reduce-scatter costs as much as the all-gather of the same tensors.", style="dim"
        )
    if account.copied_s:
        paragraph(console, _copied_words(plan.layout, account))


def _hidden_words(account: ShardedTimeBreakdown) -> str:
    call = "A call has nothing to hide it here. MiB: the whole tensor, or what a rank sends; GB/s: MiB over ms."
    if not account.flows:
        return call
    exposed = sum(row.step_s for row in account.communication)
    return (
        f"{call} Weights and gradients take {significant(account.sent_s)} s a step; computing hides them but for"
        f" {significant(exposed)} s, copies and what they slow down included."
    )


def _copied_words(layout: Layout, account: ShardedTimeBreakdown) -> str:
    exposed = sum(row.step_s for row in account.offload)
    what = "weights and gradients" if layout.offload or layout.offload_param else "gradients and updated weights"
    return (
        f"Copies over PCIe, of {what}, take {significant(account.copied_s)} s a step; computing hides all but"
        f" {significant(exposed)} s."
    )


def _flows(account: ShardedTimeBreakdown) -> Table:
    right = ("ranks", "nodes", "calls", "MiB\na call", "ms\na call", "GB/s", "s\na step")
    table = table_of("what", "kind", "in", right=right)
    for row in (*account.flows, *account.collectives):
        one, times = row.call, f" x {row.times}" if row.times > 1 else ""
        table.add_row(
            Text(row.name),
            one.kind,
            f"{MOMENTS[row.moment]}{times}",
            str(one.ranks),
            str(one.nodes),
            f"{row.calls:,}",
            significant(one.sent_bytes / _MIB),
            ms(one.call_s),
            significant(one.bytes_per_s / 1e9),
            significant(row.step_s),
        )
    return table
