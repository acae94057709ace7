"""Where the memory of a plan goes that splits data alone, as JSON and as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from topoplan.layout.layout import Layout
from topoplan.planner.plan import Plan
from topoplan.planner.sharded_memory import ActivationRows, ShardedBreakdown, StateRow
from topoplan.planner.view import LAYER_KINDS, rounded
from topoplan.report.memory import count, device_to_dict, mib, moment_to_dict, print_device, print_moments
from topoplan.report.paragraphs import paragraph
from topoplan.report.tables import heading, layer_kind, table_of
from topoplan.report.text import counted, gib
from topoplan.units import GIB

_MIB = 2**20

# What a reader opens to check a figure: file and function of the formula, and what that is taken from.
SOURCES = {
    "weights": "engines/data_parallel/states.py sharded_states",
    "gradients": "engines/data_parallel/states.py sharded_states; ZeRO, arXiv 1910.02054, section 3.1",
    "optimizer": "engines/data_parallel/states.py sharded_states; ZeRO, arXiv 1910.02054, section 3.1",
    "shards": "engines/data_parallel/parameter_bytes.py shards_of; ZeRO, arXiv 1910.02054, section 3.1",
    "workspace": "engines/data_parallel/memory.py sharded_memory; catalog/profiles.json",
    "activations": "engines/data_parallel/memory.py layer_memories",
    "vision activations": "operators/te_activations.py vision_activation_bytes",
    "peak": "engines/data_parallel/memory.py _moments",
    "moments": "engines/data_parallel/memory.py _moments and _loss_bytes; engines/data_parallel/states.py _gathered",
    "saved": "operators/eager_activations.py eager_activations; PyTorch derivatives.yaml",
    "parameters": "operators/eager_linears.py elements_of",
    "fragmentation": "engines/data_parallel/memory.py sharded_memory; its shares in catalog/profiles.json",
    "context": "engines/data_parallel/memory.py sharded_memory; context_bytes of catalog/profiles.json",
    "communicators": "engines/data_parallel/communicators.py members_of; NCCL init.cc, channel.cc, net.cc, nvls.cc",
    "margin": "engines/data_parallel/memory.py sharded_memory; the bands of catalog/profiles.json",
    "host": "engines/data_parallel/states.py sharded_states; DeepSpeed stage3.py, FSDP2 CPUOffloadPolicy",
}

_PEAKS = {
    "loss": "logits and their gradients, beside all activations",
    "first layer's backward": "the first backward, beside all activations that are kept",
    "last layer's backward": "the last backward, when the other layers' activations are freed",
    "optimizer step": "fp32 gradients that Adam reads, when all activations are freed",
}


def sharded_memory_to_dict(plan: Plan, account: ShardedBreakdown) -> dict[str, Any]:
    """Every term of a plan's memory; bytes are in GiB or MiB, as the names say."""
    memory = plan.memory
    (stage,) = memory.by_stage
    return {
        "parts_gib": {name: rounded(size / GIB) for name, size in stage.parts_bytes.items()},
        "states": [
            {
                "part": row.part,
                "name": row.name,
                "elements": row.elements,
                "element_bytes": rounded(row.element_bytes),
                "shards": row.shards,
                "place": "host" if row.on_host else "gpu",
                "gib": rounded(row.held_bytes / GIB),
            }
            for row in account.states
        ],
        "moments": [moment_to_dict(moment) for moment in account.moments],
        "layers": [_layer_to_dict(rows) for rows in account.layers],
        "layers_without_backward": account.without_backward,
        "parameters": {
            "trained": account.elements.trained,
            "frozen": account.elements.frozen,
            "packed": account.elements.quantised,
            "adapters": account.elements.adapters,
            "by_place": [
                {"name": row.name, "count": row.count, "elements": row.elements} for row in account.parameters
            ],
        },
        "device": device_to_dict(memory, account),
        "host": {
            "processes": account.processes,
            "gib": rounded(memory.host_bytes / GIB),
            "capacity_gib": None if memory.host_capacity_bytes is None else rounded(memory.host_capacity_bytes / GIB),
        },
        "sources": dict(SOURCES),
        "notes": list(account.notes),
    }


def _layer_to_dict(rows: ActivationRows) -> dict[str, Any]:
    return {
        "attention": LAYER_KINDS[type(rows.layer.attention)],
        "ffn": LAYER_KINDS[type(rows.layer.ffn)],
        "count": rows.count,
        "trains_weights": rows.trains_weights,
        "adapters": rows.adapters,
        "saved": [{"name": row.name, "mib": rounded(row.saved_bytes / _MIB), "kept": row.kept} for row in rows.saved],
        "saved_mib": rounded(rows.saved_bytes / _MIB),
        "kept_mib": rounded(rows.kept_bytes / _MIB),
        "backward_mib": rounded(rows.peak_bytes / _MIB),
    }


def print_sharded_memory(console: Console, plan: Plan, account: ShardedBreakdown) -> None:
    """The parts, what passes through, activations and parameters, from allocated memory to the card, and the host."""
    heading(console, "Memory of a GPU, by part", SOURCES["shards"])
    console.print(_parts(plan, account))
    print_moments(console, account.moments, "beyond what is listed above", SOURCES["moments"])
    if gathered := _gathered_words(plan.layout, account):
        paragraph(console, gathered, style="dim")
    _print_activations(console, plan, account)
    _print_parameters(console, account)
    print_device(console, plan, account, SOURCES)
    if plan.memory.host_bytes:
        _print_host(console, plan, account)


def _parts(plan: Plan, account: ShardedBreakdown) -> Table:
    (stage,) = plan.memory.by_stage
    table = table_of("part", right=("GiB", "%"), last=("what", "formula"))
    total = stage.allocated_bytes
    for name, size in stage.parts_bytes.items():
        rows = [row for row in account.states if row.part == name]
        kind = "peak" if name.startswith("peak") else name
        table.add_row(
            Text(name),
            gib(size),
            f"{100 * size / total:.0f}",
            Text(_what(plan.layout, account, name, rows)),
            Text(SOURCES[kind], style="dim"),
        )
        held = [row for row in rows if not row.on_host]
        for row in held if len(held) > 1 else ():
            table.add_row(Text(f"  {row.name}", style="dim"), gib(row.held_bytes), "", Text(_product(row)), "")
    table.add_row("allocated", gib(total), "100", "", "", style="bold")
    return table


def _what(layout: Layout, account: ShardedBreakdown, name: str, rows: list[StateRow]) -> str:
    """A part in one phrase, with the numbers that it is a product of."""
    held = [row for row in rows if not row.on_host]
    if name in ("weights", "gradients", "optimizer"):
        if len(held) == 1:
            own = "" if held[0].name == name else f"{held[0].name}: "
            return f"{own}{_product(held[0])}"
        if held:
            return ""
        return "in host memory" if rows or layout.offload_optimizer or layout.offload else "none"
    if name == "activations":
        return "one micro batch, from forward to backward, see below"
    if name == "vision activations":
        return "the vision tower's, of one micro batch"
    if name == "workspace":
        return "cuBLAS"
    return _PEAKS.get(name.removeprefix("peak (").removesuffix(")"), "")


def _product(row: StateRow) -> str:
    shared = f" / {row.shards} GPUs" if row.shards > 1 else ""
    return f"{row.element_bytes:.4g} bytes x {count(row.elements)} elements{shared}"


def _gathered_words(layout: Layout, account: ShardedBreakdown) -> str:
    """What the gathered weights among the moments' terms are."""
    if not any(name == "gathered weights" and size for one in account.moments for name, size in one.terms_bytes):
        return ""
    if layout.backend == "fsdp2":
        return "Gathered weights: the layer at hand, the one fetched ahead, and the last unit, in 16 bits."
    if layout.backend == "deepspeed" and layout.zero_stage == 3:
        return "Gathered weights: up to stage3_max_live_parameters of them stay whole, in 16 bits."
    if account.elements.quantised:
        return "Gathered weights: the largest linear layer, unpacked to 16 bits."
    return "Gathered weights: autocast's copies in 16 bits, which backward uses again."


def _print_activations(console: Console, plan: Plan, account: ShardedBreakdown) -> None:
    granularity = plan.layout.recompute.granularity
    for rows in account.layers:
        trained = "weights trained" if rows.trains_weights else "weights frozen"
        adapters = f", {counted(rows.adapters, 'adapter')} in each" if rows.adapters else ""
        layers = f"{layer_kind(rows.layer)}, {counted(rows.count, 'layer')}, {trained}{adapters}"
        heading(console, f"Activations that a layer saves, one micro batch: {layers}", SOURCES["saved"])
        table = table_of("tensor", right=("MiB",), last=("in this plan",))
        for row in rows.saved:
            kept = "kept" if row.kept else "recomputed" if granularity == "full" else "recomputed in part"
            table.add_row(Text(row.name), mib(row.saved_bytes), kept, style=None if row.kept else "dim")
        table.add_row("saved", mib(rows.saved_bytes), "", style="bold")
        kept = "the layer's input alone" if granularity == "full" else ""
        table.add_row("kept to backward", mib(rows.kept_bytes), kept, style="bold")
        table.add_row("added in its backward", mib(rows.peak_bytes), "")
        console.print(table)
        size = rows.kept_bytes * rows.count
        paragraph(
            console, f"{counted(rows.count, 'layer')} x {mib(rows.kept_bytes)} MiB = {gib(size)} GiB of activations."
        )
    if account.without_backward:
        paragraph(
            console,
            f"The first {counted(account.without_backward, 'layer')} have no backward and keep nothing: all before the"
            " first trained layer is frozen.",
        )


def _print_parameters(console: Console, account: ShardedBreakdown) -> None:
    elements = account.elements
    heading(console, "Parameters of the model", SOURCES["parameters"])
    table = table_of("place", right=("elements",), last=("what",))
    for row in account.parameters:
        what = f"{layer_kind(row.layer)}, {counted(row.count, 'layer')}" if row.layer else ""
        table.add_row(row.name, f"{row.elements:,}", what)
    table.add_row("together", f"{elements.total:,}", "", style="bold")
    console.print(table)
    kinds = [("trained", elements.trained), ("frozen", elements.frozen), ("frozen and packed", elements.quantised)]
    words = ", ".join(f"{size:,} {name}" for name, size in kinds if size)
    paragraph(console, f"{words}.")


def _print_host(console: Console, plan: Plan, account: ShardedBreakdown) -> None:
    memory = plan.memory
    heading(console, "Host memory of a node, pinned", SOURCES["host"])
    table = table_of("part", right=("GiB",), last=("what",))
    for row in account.states:
        if row.on_host:
            name = row.name if row.part in row.name else f"{row.part}: {row.name}"
            table.add_row(Text(name), gib(row.held_bytes * account.processes), Text(_product(row)))
    table.add_row("together", gib(memory.host_bytes), f"of {counted(account.processes, 'process', 'processes')}")
    host = memory.host_capacity_bytes
    if host is None:
        table.add_row("the node", "?", "the spec does not say how much there is")
    else:
        table.add_row("the node", gib(host), "", style="bold")
        spare = host - memory.host_bytes
        style = "" if spare >= 0 else "red"
        table.add_row("to spare" if spare >= 0 else "over", gib(abs(spare)), "", style=style)
    console.print(table)
