"""Where the memory of a plan goes, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from topoplan.engines.megatron.moments import Moment
from topoplan.network.communicators import Communicator
from topoplan.planner.breakdown import Breakdown, LayerRows, WeightRow
from topoplan.planner.plan import Memory, Plan, StageMemory
from topoplan.planner.view import LAYER_KINDS, rounded
from topoplan.report.paragraphs import paragraph
from topoplan.report.tables import heading, layer_kind, stage_name, stage_span, table_of
from topoplan.report.text import counted, gib, significant
from topoplan.specs.spec import Spec
from topoplan.units import GIB

_MIB = 2**20

# What a reader opens to check a figure: file and function of the formula, and what that is taken from.
SOURCES = {
    "stages": "engines/megatron/memory.py stage_memory, the worst of its moments",
    "weights": "engines/megatron/states.py stage_parameters",
    "gradients": "engines/megatron/states.py stage_states; Megatron param_and_grad_buffer.py",
    "optimizer": "engines/megatron/states.py optimizer_parts; ZeRO-1, arXiv 1910.02054, section 5",
    "workspace": "engines/megatron/states.py stage_states; catalog/profiles.json",
    "copies for offload": "engines/megatron/states.py optimizer_parts; MLM distrib_optimizer.py, hybrid_optimizer.py",
    "reference model": "engines/megatron/states.py stage_states; mcore_adapter dpo_trainer.py",
    "activations": "engines/megatron/moments.py chunk_kept_bytes; arXiv 2205.05198, section 4",
    "vision activations": "operators/te_activations.py vision_activation_bytes",
    "peak": "engines/megatron/moments.py stage_moments",
    "moments": "engines/megatron/moments.py stage_moments and bytes_per_logit and mtp_bytes_per_logit",
    "saved": "operators/te_activations.py layer_activations; arXiv 2205.05198, section 4",
    "recomputation": "operators/te_activations.py kept_activations",
    "in flight": "engines/megatron/pipeline.py in_flight; Megatron schedules.py, arXiv 2104.04473, section 2.2",
    "parameters": "operators/params.py layer_tensors and cut; Megatron attention.py, mlp.py, experts.py",
    "ends": "engines/megatron/states.py end_tensors",
    "fragmentation": "engines/megatron/memory.py fragmentation",
    "context": "engines/megatron/memory.py predict_memory; context_bytes of catalog/profiles.json",
    "communicators": "engines/megatron/communicators.py _members; NCCL init.cc, channel.cc, p2p.cc, net.cc, nvls.cc",
    "margin": "engines/megatron/memory.py margin_bytes; the bands of catalog/profiles.json",
    "host": "engines/megatron/states.py host_optimizer_bytes; Megatron hybrid_optimizer.py",
}

_PEAKS = {
    "backward": "the largest backward of a layer, and buffers that all layers share",
    "loss": "logits, their gradient, and the inputs of the output layer",
    "loss backward": "logits of all depths that their losses keep, and gradients of the output layer",
    "embedding gradient": "the dense gradient of the embedding, when a micro batch's layers are freed",
    "optimizer step": "fp32 copies of the gradients, beyond the activations that are freed by then",
}


class OnCard(Protocol):
    """What stands between live tensors and the card."""

    @property
    def fragmentation(self) -> float: ...  # noqa: D102
    @property
    def context_bytes(self) -> int: ...  # noqa: D102
    @property
    def communicators(self) -> tuple[Communicator, ...]: ...  # noqa: D102
    @property
    def margin_stated(self) -> bool: ...  # noqa: D102


_QUANTISED = ("fp8", "mxfp8", "nvfp4")
_SPLITS = {
    "tp": "tp",
    "expert": "ep x etp",
    "expert_replicated": "ep",
    "replicated": "replicated",
}


def memory_to_dict(plan: Plan, account: Breakdown) -> dict[str, Any]:
    """Every term of a plan's memory; bytes are in GiB or MiB, as the names say."""
    memory = plan.memory
    return {
        "stages": [
            {
                "stages": list(row.stages),
                "layers": row.layers,
                "in_flight": list(row.in_flight),
                "allocated_gib": rounded(row.memory.allocated_bytes / GIB),
                "parts_gib": {name: rounded(size / GIB) for name, size in row.memory.parts_bytes.items()},
            }
            for row in account.stages
        ],
        "worst_stage": account.worst,
        "chunks": [
            {"layers": row.layers, "kept_mib": rounded(row.kept_bytes / _MIB), "in_flight": row.in_flight}
            for row in account.chunks
        ],
        "moments": [moment_to_dict(moment) for moment in _moments(account)],
        "vision_kept_mib": rounded(account.vision_kept_bytes / _MIB),
        "layers": [_layer_to_dict(rows) for rows in account.layers],
        "ends": [_weight_to_dict(row) for row in account.ends],
        "parameters": {
            "dense": account.parameters.dense,
            "expert": account.parameters.expert,
            "frozen": account.parameters.frozen,
            "dense_shards": account.dense_shards,
            "expert_shards": account.expert_shards,
        },
        "device": device_to_dict(memory, account),
        "sources": dict(SOURCES),
        "notes": list(account.notes),
    }


def device_to_dict(memory: Memory, account: OnCard) -> dict[str, Any]:
    """From allocated memory to the card."""
    return {
        "allocated_gib": rounded(memory.allocated_bytes / GIB),
        "fragmentation": rounded(account.fragmentation),
        "reserved_gib": rounded(memory.reserved_bytes / GIB),
        "context_gib": rounded(account.context_bytes / GIB),
        "communicators": {
            one.name: {"ranks": one.size, "mib": rounded(one.device_bytes / _MIB)} for one in account.communicators
        },
        "device_gib": rounded(memory.device_bytes / GIB),
        "margin_gib": rounded(memory.margin_bytes / GIB),
        "margin_from": "spec" if account.margin_stated else "band",
        "capacity_gib": rounded(memory.capacity_bytes / GIB),
    }


def _moments(account: Breakdown) -> list[Moment]:
    """The moments of the worst stage; the first one is its peak."""
    worst = next(row for row in account.stages if account.worst in row.stages)
    return sorted(worst.memory.moments, key=lambda moment: -moment.total_bytes)


def moment_to_dict(moment: Moment) -> dict[str, Any]:
    """A moment with its terms."""
    return {
        "name": moment.name,
        "mib": rounded(moment.total_bytes / _MIB),
        "terms_mib": {name: rounded(size / _MIB) for name, size in moment.terms_bytes if size},
    }


def _layer_to_dict(rows: LayerRows) -> dict[str, Any]:
    return {
        "predicts_next": rows.layer.predicts_next,
        "attention": LAYER_KINDS[type(rows.layer.attention)],
        "ffn": LAYER_KINDS[type(rows.layer.ffn)],
        "count": rows.count,
        "saved": [
            {
                "name": row.name,
                "mib": rounded(row.saved_bytes / _MIB),
                "freed_by": list(row.freed_by),
                "kept": row.kept,
            }
            for row in rows.saved
        ],
        "saved_mib": rounded(rows.saved_bytes / _MIB),
        "kept_mib": rounded(rows.kept_bytes / _MIB),
        "backward_mib": rounded(rows.peak_bytes / _MIB),
        "weights": [_weight_to_dict(row) for row in rows.weights],
    }


def _weight_to_dict(row: WeightRow) -> dict[str, Any]:
    return {"name": row.name, "elements": row.elements, "split": row.split, "rank_elements": row.rank_elements}


def print_memory(console: Console, spec: Spec, plan: Plan, account: Breakdown) -> None:
    """Stages, the parts of the worst one, its activations and weights, and from allocated memory to the card."""
    memory = plan.memory
    worst = next(row for row in account.stages if account.worst in row.stages)
    if len(account.stages) > 1:
        heading(console, "Stages, GiB", SOURCES["stages"])
        console.print(_stages(account))
    heading(console, f"{stage_name(worst.stages)}, by part", "")
    console.print(_parts(spec, account, worst.memory))
    print_moments(console, _moments(account), "beyond all that is in flight", SOURCES["moments"])
    _print_activations(console, plan, account)
    _print_weights(console, plan, account)
    print_device(console, plan, account, SOURCES)
    if memory.host_bytes:
        host = memory.host_capacity_bytes
        heading(console, "Host memory of a node", SOURCES["host"])
        paragraph(
            console,
            f"{gib(memory.host_bytes)} GiB for the offloaded optimizer,"
            f" {f'of {gib(host)}' if host is not None else 'and the spec does not say how much there is'}.",
        )


def _stages(account: Breakdown) -> Table:
    names = list(dict.fromkeys(_part_kind(name) for row in account.stages for name in row.memory.parts_bytes))
    short = {
        "copies for offload": "offload\ncopies",
        "activations": "activ.",
        "vision activations": "vision\nactiv.",
        "reference model": "reference\nmodel",
    }
    headers = [short.get(name, name) for name in names]
    table = table_of("stage", right=("layers", *headers, "allocated"), last=("peak in",))
    for row in account.stages:
        parts = {_part_kind(name): size for name, size in row.memory.parts_bytes.items()}
        peak = next((name for name in row.memory.parts_bytes if name.startswith("peak")), "")
        table.add_row(
            stage_span(row.stages),
            str(row.layers),
            *(gib(parts[name]) if name in parts else "-" for name in names),
            gib(row.memory.allocated_bytes),
            Text(peak.removeprefix("peak (").removesuffix(")")),
            style="bold" if account.worst in row.stages else None,
        )
    return table


def _part_kind(name: str) -> str:
    """`peak` for `peak (loss)` and the like, so that the stages share a column."""
    return "peak" if name.startswith("peak") else name


def _parts(spec: Spec, account: Breakdown, stage: StageMemory) -> Table:
    table = table_of("part", right=("GiB", "%"), last=("what", "formula"))
    total = stage.allocated_bytes
    for name, size in stage.parts_bytes.items():
        table.add_row(
            Text(name),
            gib(size),
            f"{100 * size / total:.0f}",
            Text(_what(spec, account, name, size)),
            Text(SOURCES[_part_kind(name)], style="dim"),
        )
    table.add_row("allocated", gib(total), "100", "", "", style="bold")
    return table


def _what(spec: Spec, account: Breakdown, name: str, size: float) -> str:
    """A part in one phrase, with the numbers that it is a product of."""
    parameters = account.parameters
    trainable = parameters.dense + parameters.expert
    if name in ("weights", "reference model"):
        each = f"{size / parameters.total:.4g} bytes x {count(parameters.total)} elements"
        return f"{each}, quantised copies included" if spec.job.precision in _QUANTISED else each
    if name == "gradients":
        return f"{size / trainable:.4g} bytes x {count(trainable)} elements" if trainable else "all frozen"
    if name == "optimizer":
        shards = f"dense / {account.dense_shards}"
        if parameters.expert:
            shards += f", experts / {account.expert_shards}"
        held = parameters.dense / account.dense_shards + parameters.expert / account.expert_shards
        return f"{size / held:.4g} bytes x {count(round(held))} elements ({shards})" if held else "all frozen"
    if name == "activations":
        held = sum(row.in_flight for row in account.chunks)
        batches = "1 micro batch" if held == 1 else f"{held} micro batches"
        chunks = f", of {len(account.chunks)} chunks," if len(account.chunks) > 1 else ""
        return f"{batches}{chunks} in flight, see below"
    if name == "vision activations":
        return f"{mib(account.vision_kept_bytes)} MiB a micro batch x {account.chunks[0].in_flight} in flight"
    if name == "copies for offload":
        return f"{size / trainable:.4g} bytes x {count(trainable)} elements, not split over data parallel"
    if name == "workspace":
        return "cuBLAS, of torch and of Transformer Engine"
    return _PEAKS.get(name.removeprefix("peak (").removesuffix(")"), "")


def print_moments(console: Console, moments: Sequence[Moment], beyond: str, source: str) -> None:
    """The moments, largest first, each with its terms."""
    heading(console, f"Moments that may be the peak, {beyond}", source)
    table = table_of("moment", right=("MiB",), last=("term",))
    for position, moment in enumerate(moments):
        verdict = "the peak" if position == 0 else "below it"
        table.add_row(Text(moment.name), mib(moment.total_bytes), verdict, style="bold" if position == 0 else None)
        for name, size in moment.terms_bytes:
            if size:
                table.add_row("", mib(size), Text(name), style=None if position == 0 else "dim")
    console.print(table)


def _print_activations(console: Console, plan: Plan, account: Breakdown) -> None:
    recompute = plan.layout.recompute
    for rows in account.layers:
        layers = f"{layer_kind(rows.layer)}, {counted(rows.count, 'layer')}"
        heading(console, f"Activations that a layer saves, one micro batch: {layers}", SOURCES["saved"])
        table = table_of("tensor", right=("MiB",), last=("freed by recomputing", "in this plan"))
        for row in rows.saved:
            table.add_row(
                Text(row.name),
                mib(row.saved_bytes),
                Text(", ".join((*row.freed_by, "full"))),
                "kept" if row.kept else "recomputed",
                style=None if row.kept else "dim",
            )
        table.add_row("saved", mib(rows.saved_bytes), "", "", style="bold")
        kept = "the layer's input alone" if recompute.granularity == "full" else ""
        table.add_row("kept to backward", mib(rows.kept_bytes), Text(kept), "", style="bold")
        table.add_row("added in its backward", mib(rows.peak_bytes), "", "")
        console.print(table)
    if recompute.granularity == "full":
        which = (
            f"one input for each {counted(recompute.num_layers or 1, 'layer')}"
            if recompute.method == "uniform"
            else f"the first {counted(recompute.num_layers or 0, 'layer')} of each chunk; the others keep all"
        )
        paragraph(console, f"Full recomputation, {recompute.method}: {which}.")
    heading(console, "Micro batches in flight", SOURCES["in flight"])
    for number, chunk in enumerate(account.chunks):
        name = f"chunk {number}: " if len(account.chunks) > 1 else ""
        size = chunk.kept_bytes * chunk.in_flight
        paragraph(
            console,
            f"{name}{counted(chunk.layers, 'layer')} keep {mib(chunk.kept_bytes)} MiB of a micro batch,"
            f" x {chunk.in_flight} in flight = {gib(size)} GiB",
        )


def _print_weights(console: Console, plan: Plan, account: Breakdown) -> None:
    layout = plan.layout
    cuts = f"tp {layout.tp}, ep {layout.ep}, etp {layout.etp}"
    for rows in account.layers:
        heading(
            console,
            f"Weights of a layer, elements: {layer_kind(rows.layer)}, {counted(rows.count, 'layer')} ({cuts})",
            SOURCES["parameters"],
        )
        console.print(_weights(rows.weights, rows.count))
    if account.ends:
        heading(console, "Weights before and behind the layers, elements", SOURCES["ends"])
        console.print(_weights(account.ends, 1))
    total = account.parameters.total
    frozen = f", {account.parameters.frozen:,} of them frozen" if account.parameters.frozen else ""
    paragraph(console, f"On a rank of the stage: {total:,} elements{frozen}.")


def _weights(rows: Iterable[WeightRow], count: int) -> Table:
    rows = list(rows)
    table = table_of("weight", right=("whole", "on a rank"), last=("cut by",))
    for row in rows:
        table.add_row(Text(row.name), f"{row.elements:,}", f"{row.rank_elements:,}", _SPLITS[row.split])
    whole, own = sum(row.elements for row in rows), sum(row.rank_elements for row in rows)
    table.add_row("together", f"{whole:,}", f"{own:,}", "", style="bold")
    if count > 1:
        table.add_row(f"x {count} layers", f"{count * whole:,}", f"{count * own:,}", "", style="bold")
    return table


def print_device(console: Console, plan: Plan, account: OnCard, sources: Mapping[str, str]) -> None:
    """From what torch's tensors take to what the card has."""
    memory = plan.memory
    heading(console, "From allocated to the card", "")
    table = table_of("", right=("GiB",), last=("what", "formula"))
    table.add_row("allocated", gib(memory.allocated_bytes), "torch's peak of live tensors", "", style="bold")
    table.add_row(
        "fragmentation",
        gib(memory.reserved_bytes - memory.allocated_bytes),
        f"{100 * account.fragmentation:.1f}% that the allocator holds back",
        Text(sources["fragmentation"], style="dim"),
    )
    table.add_row("reserved", gib(memory.reserved_bytes), "what torch's allocator holds", "", style="bold")
    table.add_row(
        "CUDA context",
        gib(account.context_bytes),
        "driver, and loaded kernels",
        Text(sources["context"], style="dim"),
    )
    table.add_row(
        "NCCL",
        gib(sum(one.device_bytes for one in account.communicators)),
        Text(counted(len(account.communicators), "communicator")),
        Text(sources["communicators"], style="dim"),
    )
    for one in account.communicators:
        size = f"{one.name}: {counted(one.size, 'rank')}, {mib(one.device_bytes)} MiB"
        table.add_row("", "", Text(size, style="dim"), "")
    table.add_row("device", gib(memory.device_bytes), "what nvidia-smi shows", "", style="bold")
    table.add_row(
        "margin",
        gib(memory.margin_bytes),
        "as the spec or --margin says" if account.margin_stated else "the error band of the prediction",
        Text(sources["margin"], style="dim"),
    )
    spare = -memory.excess_bytes
    table.add_row("card", gib(memory.capacity_bytes), "", "", style="bold")
    table.add_row("to spare" if spare >= 0 else "over", gib(abs(spare)), "", "", style="" if spare >= 0 else "red")
    console.print(table)


def mib(size_bytes: float) -> str:
    """Bytes in MiB with one decimal."""
    return f"{size_bytes / _MIB:,.1f}"


def count(elements: int) -> str:
    """A number of elements: 8.19B, 42.1M."""
    return f"{significant(elements / 1e9)}B" if elements >= 1e9 else f"{significant(elements / 1e6)}M"
