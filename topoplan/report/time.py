"""Where the time of a step goes, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from topoplan.planner.plan import Plan
from topoplan.planner.time_breakdown import CollectiveRow, LayerTimes, OperatorRow, TimeBreakdown, TimeRow
from topoplan.planner.view import LAYER_KINDS, rounded
from topoplan.report.paragraphs import paragraph
from topoplan.report.tables import heading, layer_kind, stage_name, stage_span, table_of
from topoplan.report.text import counted, significant

_MIB = 2**20
WITH_FORMULAS = 96
"""Columns from which the operators have room for the names of their formulas."""

# What a reader opens to check a figure: file and function of the formula, and what that is taken from.
SOURCES = {
    "step": "engines/megatron/step.py predict_time",
    "stages": "engines/megatron/microbatch.py stage_time",
    "gemm": "operators/te_compute.py gemm_s; NVIDIA Matrix Multiplication User's Guide, sections 3 and 4",
    "attention": "operators/te_compute.py core_attention; FlashAttention-2, arXiv 2307.08691, section 4",
    "gated delta rule": "operators/te_compute.py linear_attention; arXiv 2412.06464, section 3",
    "elementwise": "operators/te_compute.py elementwise_s; bytes over the card's memory bandwidth",
    "tp_comm": "operators/te_compute.py tensor_parallel; Megatron tensor_parallel/layers.py",
    "cp_comm": "operators/te_compute.py core_attention; ring attention, arXiv 2310.01889",
    "ep_comm": "operators/te_compute.py _moe; Megatron moe/token_dispatcher.py",
    "dispatch, combine (flex)": "operators/dispatch.py flex_s; arXiv 2412.19437, section 3.2.2; DeepEP",
    "expert tensor collectives": "operators/te_compute.py _moe; Megatron moe/token_dispatcher.py",
    "recompute": "operators/te_compute.py layer_time; arXiv 2205.05198, section 5",
    "layers": "operators/te_compute.py layer_operators",
    "ends": "engines/megatron/microbatch.py chunk_ends",
    "embedding": "engines/megatron/microbatch.py _embedding_s; Megatron tensor_parallel/layers.py",
    "vision tower": "operators/vision_time.py vision_s",
    "output layer, loss": "engines/megatron/microbatch.py _head_s; Megatron tensor_parallel/cross_entropy.py",
    "pp_bubble": "engines/megatron/pipeline.py schedule_s; arXiv 2104.04473, section 2.2",
    "pp_comm": "engines/megatron/step.py predict_time and pipeline_send; Megatron pipeline_parallel/schedules.py",
    "reference": "engines/megatron/step.py predict_time; mcore_adapter trainer/dpo_trainer.py",
    "dp_comm": "engines/megatron/step.py data_parallel; Megatron param_and_grad_buffer.py",
    "tied embedding": "engines/megatron/step.py _tied_embedding; Megatron distributed/finalize_model_grads.py",
    "optimizer": "engines/megatron/step.py optimizer_time; Megatron optimizer/distrib_optimizer.py",
    "collectives": "network/collectives.py ring_way and all_gather_s and all_reduce_s and all_to_all_s and"
    " point_to_point_s; Thakur et al. 2005, section 4; nccl-tests PERFORMANCE.md",
    "band": "engines/megatron/step.py predict_time; the bands of catalog/profiles.json",
}

_WHAT = {
    "gemm": "linear layers",
    "attention": "attention kernels",
    "elementwise": "norms, activations, routing: bound by memory",
    "tp_comm": "tensor parallel, what GEMMs do not hide",
    "cp_comm": "context parallel, what attention does not hide",
    "ep_comm": "expert parallel: dispatch and combine",
    "recompute": "forward work that backward repeats",
    "ends": "embedding, output layer, loss, vision tower",
    "pp_bubble": "waiting for other stages",
    "pp_comm": "what messages between stages add",
    "reference": "DPO's reference model, forward only",
    "dp_comm": "gradients and weights, what is not hidden",
    "optimizer": "gradient norm, Adam, host work",
}


def source_of(part: str, name: str) -> str:
    """Where the formula of a row is."""
    return SOURCES.get(name) or SOURCES[part]


def time_to_dict(plan: Plan, account: TimeBreakdown) -> dict[str, Any]:
    """Every term of a step's time, in seconds. `rows` add up to `step_s`."""
    time = plan.time
    return {
        "step_s": rounded(time.step_s),
        "band": [rounded(bound) for bound in time.band_s],
        "microbatches": account.microbatches,
        "stages": [
            {
                "stages": list(row.stages),
                "layers": row.layers,
                "forward_s": rounded(row.forward_s),
                "backward_s": rounded(row.backward_s),
            }
            for row in account.stages
        ],
        "slowest_stage": account.slowest,
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
            "gradients_s": rounded(account.gradients_s),
            "weights_s": rounded(account.weights_s),
            "exposed_s": rounded(sum(row.step_s for row in account.data_parallel)),
        },
        "collectives": [collective_to_dict(row) for row in account.collectives],
        "sources": dict(SOURCES),
    }


def collective_to_dict(row: CollectiveRow) -> dict[str, Any]:
    """One kind of call over one kind of group."""
    return {
        "name": row.name,
        "kind": row.kind,
        "ranks": row.ranks,
        "nodes": row.nodes,
        "mib": rounded(row.sent_bytes / _MIB),
        "call_s": rounded(row.call_s),
        "bytes_per_s": rounded(row.bytes_per_s),
    }


def layer_to_dict(times: LayerTimes) -> dict[str, Any]:
    """A kind of layer, operator by operator."""
    return {
        "attention": LAYER_KINDS[type(times.layer.attention)],
        "ffn": LAYER_KINDS[type(times.layer.ffn)],
        "count": times.count,
        "recomputed": rounded(times.recomputed),
        "operators": [
            {
                "name": row.name,
                "part": row.part,
                "forward_s": rounded(row.forward_s),
                "backward_s": rounded(row.backward_s),
                "recompute_s": rounded(row.recompute_s),
                "step_s": rounded(row.step_s + row.step_recompute_s),
            }
            for row in times.operators
        ],
    }


def print_time(console: Console, plan: Plan, account: TimeBreakdown) -> None:
    """The parts of a step; the slowest stage operator by operator; what stands around its layers; collectives."""
    heading(console, "The step, by part", SOURCES["step"])
    console.print(parts_table(plan, _WHAT, SOURCES))
    if len(account.stages) > 1:
        heading(console, "Stages, ms of one micro batch", SOURCES["stages"])
        console.print(_stages(account))
    slowest = next(row for row in account.stages if account.slowest in row.stages)
    for times in account.layers:
        layers = f"{layer_kind(times.layer)}, {counted(times.count, 'layer')}"
        batches = f"{account.microbatches} micro batch{'es' if account.microbatches > 1 else ''}"
        name = stage_name(slowest.stages if len(account.stages) > 1 else (account.slowest,))
        heading(
            console,
            f"{name}, operator by operator: {layers} x {batches}; ms of one, s and % of all",
            SOURCES["layers"],
        )
        console.print(operators_table(plan, times, source_of, formulas=console.width >= WITH_FORMULAS))
    heading(console, "Around the layers")
    names = {row.part: _WHAT[row.part] for row in account.other}
    rows = [row for row in account.rows if row.part in ("ends", "dp_comm", "optimizer") or row in account.other]
    console.print(around_table(plan, rows, account.layers, names, source_of))
    if account.gradients_s:
        exposed = sum(row.step_s for row in account.data_parallel)
        total = account.gradients_s + account.weights_s
        console.print()
        paragraph(
            console,
            f"Data parallel takes {ms(total)} ms a step, {ms(account.gradients_s)} for gradients and"
            f" {ms(account.weights_s)} for weights; computing hides all but {ms(exposed)} ms.",
        )
    if account.collectives:
        heading(console, "Collectives, one call with nothing to hide it", SOURCES["collectives"])
        console.print(_collectives(account.collectives))
        paragraph(
            console,
            "MiB: the whole tensor, or what a rank sends. GB/s: MiB over ms, latency included. A reduce-scatter is"
            " listed as the all-gather that it costs as much as.",
            style="dim",
        )


def share_of(seconds: float, plan: Plan) -> str:
    """Seconds in percent of the step."""
    return f"{100 * seconds / plan.time.step_s:.1f}"


def ms(seconds: float) -> str:
    """Seconds in milliseconds; a dash for none."""
    return significant(1000 * seconds) if seconds else "-"


def parts_table(plan: Plan, what: Mapping[str, str], sources: Mapping[str, str]) -> Table:
    """The parts of the step, the largest first, each in words and with the place of its formula."""
    table = table_of("part", right=("s", "%"), last=("what", "formula"))
    for name, seconds in sorted(plan.time.parts_s.items(), key=lambda item: -item[1]):
        table.add_row(
            Text(name),
            significant(seconds),
            share_of(seconds, plan),
            what.get(name, ""),
            Text(sources[name], style="dim"),
        )
    low, high = plan.time.band_s
    table.add_row(
        "step",
        significant(plan.time.step_s),
        "100.0",
        f"expected within {significant(low)} to {significant(high)} s",
        Text(sources["band"], style="dim"),
        style="bold",
    )
    return table


def _stages(account: TimeBreakdown) -> Table:
    table = table_of("stage", right=("layers", "forward", "backward", "together"))
    for row in account.stages:
        table.add_row(
            stage_span(row.stages),
            str(row.layers),
            ms(row.forward_s),
            ms(row.backward_s),
            ms(row.forward_s + row.backward_s),
            style="bold" if account.slowest in row.stages else None,
        )
    return table


def operators_table(plan: Plan, times: LayerTimes, source_of: Callable[[str, str], str], *, formulas: bool) -> Table:
    """Milliseconds of one layer and micro batch, then seconds of the step; the part, too, leads to the formula."""
    again = any(row.step_recompute_s for row in times.operators)
    columns = ("forward\nms", "backward\nms", *(["recomp.\nms"] if again else []), "step\ns", "\n%")
    table = table_of("\noperator", "\npart", right=columns, last=("\nformula",) if formulas else ())
    for row in times.operators:
        home = source_of(row.part, row.name).split(";")[0]
        home = home.removeprefix("operators/te_compute.py ").removeprefix("operators/eager_compute.py ")
        formula = [Text(home, style="dim")] if formulas else []
        table.add_row(Text(row.name), Text(row.part), *_figures(row, plan, again=again), *formula)
    total = sum(row.step_s + row.step_recompute_s for row in times.operators)
    sums = [sum(row.forward_s for row in times.operators), sum(row.backward_s for row in times.operators)]
    if again:
        sums.append(sum(row.recompute_s for row in times.operators))
    table.add_row(
        "together", "", *(ms(seconds) for seconds in sums), significant(total), share_of(total, plan), style="bold"
    )
    return table


def _figures(row: OperatorRow, plan: Plan, *, again: bool) -> list[str]:
    total = row.step_s + row.step_recompute_s
    repeated = [ms(row.recompute_s)] if again else []
    return [ms(row.forward_s), ms(row.backward_s), *repeated, significant(total), share_of(total, plan)]


def around_table(
    plan: Plan,
    rows: Sequence[TimeRow],
    layers: Sequence[LayerTimes],
    names: Mapping[str, str],
    source_of: Callable[[str, str], str],
) -> Table:
    """Everything but the layers, and the sum of all. `names` has words for rows that are named as their part."""
    table = table_of("what", "part", right=("step\ns", "\n%"), last=("formula",))
    for row in rows:
        table.add_row(
            Text(names.get(row.name, row.name)),
            Text(row.part),
            significant(row.step_s),
            share_of(row.step_s, plan),
            Text(source_of(row.part, row.name), style="dim"),
        )
    within = sum(row.step_s + row.step_recompute_s for times in layers for row in times.operators)
    table.add_row("the layers, above", "", significant(within), share_of(within, plan), "")
    total = within + sum(row.step_s for row in rows)
    table.add_row("the step", "", significant(total), share_of(total, plan), "", style="bold")
    return table


def _collectives(rows: Sequence[CollectiveRow]) -> Table:
    table = table_of("call", "kind", right=("ranks", "nodes", "MiB", "ms", "GB/s"))
    for row in rows:
        table.add_row(
            Text(row.name),
            row.kind,
            str(row.ranks),
            str(row.nodes),
            significant(row.sent_bytes / _MIB),
            ms(row.call_s),
            significant(row.bytes_per_s / 1e9),
        )
    return table
