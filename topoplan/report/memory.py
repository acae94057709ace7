"""The memory of a plan by part, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from topoplan.engines.account import MemoryAccount
from topoplan.planner.plan import Plan
from topoplan.report.dump import picked, plain
from topoplan.report.tables import elements, heading, mib, paragraph, print_formulas, stage_name, stage_span, table_of
from topoplan.report.text import counted, gib
from topoplan.terms import Term


def memory_to_dict(plan: Plan, account: MemoryAccount) -> dict[str, Any]:
    """Return every term of a plan's memory."""
    return {
        **picked(account, "device margin"),
        "capacity_bytes": plan.memory.capacity_bytes,
        "host": plain(account.host),
        "host_capacity_bytes": plan.memory.host_capacity_bytes,
        **picked(account, "worst_stage=worst stages moments layers parameters"),
    }


def print_memory(console: Console, plan: Plan, account: MemoryAccount) -> None:
    """Print the fullest GPU's memory, from its parts to single tensors and from allocated memory to the whole card."""
    allocated = account.device.at("reserved", "allocated")
    if len(account.stages) > 1:
        heading(console, "Stages, GiB")
        console.print(_stages(account))
    heading(console, f"{_who(account)}, by part")
    console.print(_parts(allocated))
    heading(console, "From allocated tensors to the card")
    console.print(_on_card(plan, account))
    if account.host:
        heading(console, "Pinned host memory of a node")
        console.print(_host(plan, account.host))
    heading(console, "Possible peaks, on top of the parts above")
    console.print(_moments(account.moments))
    if activations := allocated.child("activations"):
        heading(console, "Activations kept from forward to backward")
        console.print(_kept(activations))
    for layer in account.layers:
        layers = counted(layer.facts["count"], "layer")
        heading(console, f"Activations that a layer saves for one micro batch: {layer.name}, {layers}")
        console.print(_saved(layer))
    _print_parameters(console, account.parameters)
    reserved = account.device.at("reserved")
    named = [*allocated.children, *reserved.children[1:], *account.device.children[1:], account.margin]
    named += [account.parameters, *([account.host] if account.host else [])]
    saved = [("saved by a layer", layer) for layer in account.layers[:1]]
    print_formulas(console, [*((one.name, one) for one in named), *saved])


def _who(account: MemoryAccount) -> str:
    if not account.stages:
        return "Memory of a GPU"
    stages = next(stages for one in account.stages if account.worst in (stages := one.facts["stages"]))
    return f"Memory of {stage_name(stages).lower()}"


_SHORT = {
    "gradients": "grads",
    "optimizer": "optim.",
    "workspace": "work",
    "activations": "act.",
    "vision activations": "vision\nact.",
    "copies for offload": "offl.\ncopies",
    "reference model": "ref.\nmodel",
}
"""Names of parts, shortened for column headers."""


def _stages(account: MemoryAccount) -> Table:
    names = list(dict.fromkeys(one.name for stage in account.stages for one in stage.children))
    headers = [_SHORT.get(name, name) for name in names]
    table = table_of("stage", right=("layers", *headers, "all"), last=("peak in",))
    for stage in account.stages:
        parts = {one.name: one.value for one in stage.children}
        table.add_row(
            stage_span(stage.facts["stages"]),
            str(stage.facts["layers"]),
            *(gib(parts[name]) if name in parts else "-" for name in names),
            gib(stage.value),
            str(stage.facts["peak"]),
            style="bold" if account.worst in stage.facts["stages"] else None,
        )
    return table


def _parts(allocated: Term) -> Table:
    table = table_of("part", right=("GiB", "%"), last=("what",))
    for part in allocated.children:
        states = [one for one in part.children if "shards" in one.facts]
        what = part.what or _product(part)
        if len(states) == 1 and not what:
            own = "" if states[0].name == part.name else f"{states[0].name}: "
            what = f"{own}{_product(states[0])}"
        table.add_row(part.name, gib(part.value), f"{100 * part.value / allocated.value:.0f}", what)
        for one in states if len(states) > 1 else ():
            table.add_row(Text(f"  {one.name}", style="dim"), gib(one.value), "", _product(one))
    table.add_row("allocated", gib(allocated.value), "100", "", style="bold")
    return table


def _product(term: Term) -> str:
    """Format a term as a product (bytes x elements / GPUs), if its facts contain the factors."""
    if "element_bytes" not in term.facts:
        return ""
    shards = term.facts.get("shards", 1)
    shared = f" / {shards} GPUs" if shards > 1 else ""
    return f"{term.facts['element_bytes']:.4g} bytes x {elements(term.facts['elements'])} elements{shared}"


def _moments(moments: Sequence[Term]) -> Table:
    table = table_of("moment", right=("MiB",), last=("term",))
    for position, moment in enumerate(moments):
        style = "dim" if position else "bold"
        table.add_row(moment.name, mib(moment.value), "below the peak" if position else "the peak", style=style)
        for one in moment.children:
            words = f"{one.name}: {one.what}" if one.what and not position else one.name
            table.add_row("", mib(one.value), words, style="dim" if position else None)
    return table


def _kept(activations: Term) -> Table:
    """Tabulate what each layer (or chunk, with its layers) keeps, and the number of such layers."""
    table = table_of("what", right=("MiB each", "count", "GiB"))

    def add(term: Term, indent: str) -> None:
        table.add_row(f"{indent}{term.name}", mib(term.each), f"{term.times:,.0f}", gib(term.value))
        if any(one.children or one.times != term.times for one in term.children):
            for one in term.children:
                add(one, f"{indent}  ")

    for one in activations.children:
        add(one, "")
    return table


def _saved(layer: Term) -> Table:
    freed = any("freed_by" in one.facts for one in layer.children)
    table = table_of("tensor", right=("MiB",), last=(*(["freed by recomputing"] if freed else []), "in this plan"))
    for one in layer.children:
        kept, by = one.facts["kept"], [Text(", ".join(one.facts["freed_by"]))] if freed else []
        state = "kept" if kept else one.what or "recomputed"
        table.add_row(one.name, mib(one.value), *by, state, style=None if kept else "dim")
    table.add_row("saved", mib(layer.value), style="bold")
    table.add_row("kept to backward", mib(layer.facts["kept_bytes"]), style="bold")
    table.add_row("added during its backward", mib(layer.facts["backward_bytes"]))
    return table


def _print_parameters(console: Console, parameters: Term) -> None:
    """Print the weights by layer, then those of embedding and head; per rank if sharded, otherwise of the model."""
    kinds = [one for one in parameters.children if one.children]
    words = f" ({parameters.what})" if parameters.what else ""
    for one in kinds:
        title = f"Weights of a layer, elements: {one.name}, {counted(int(one.times), 'layer')}"
        heading(console, f"{title}{words}")
        console.print(_weights(one.children, int(one.times)))
    if rest := [one for one in parameters.children if not one.children]:
        heading(console, "Weights outside the layers, elements" if kinds else "Weights, elements")
        console.print(_weights(rest, 1))
    totals = ", ".join(f"{value:,} {name}" for name, value in parameters.facts.items() if value)
    paragraph(console, f"All {parameters.name}: {totals}.")


def _weights(rows: Sequence[Term], count: int) -> Table:
    if not any("cut_by" in one.facts for one in rows):
        table = table_of("weight", right=("elements", "layers"))
        for one in rows:
            table.add_row(one.name, f"{one.value:,}", f"{one.times:,}" if one.times > 1 else "")
        return table
    table = table_of("weight", right=("whole model", "per rank"), last=("sharded by",))
    for one in rows:
        each = one.value // count
        table.add_row(one.name, f"{one.facts['whole']:,}", f"{each:,}", str(one.facts["cut_by"]))
    whole, own = sum(one.facts["whole"] for one in rows), sum(one.value for one in rows) // count
    table.add_row("total", f"{whole:,}", f"{own:,}", "", style="bold")
    if count > 1:
        table.add_row(f"x {count} layers", f"{count * whole:,}", f"{count * own:,}", "", style="bold")
    return table


def _on_card(plan: Plan, account: MemoryAccount) -> Table:
    table = table_of("", right=("GiB",), last=("what",))

    def add(term: Term, *, bold: bool = False) -> None:
        table.add_row(term.name, gib(term.value), term.what, style="bold" if bold else None)

    reserved, *beside = account.device.children
    allocated, *waste = reserved.children
    add(allocated, bold=True)
    for one in waste:
        add(one)
    add(reserved, bold=True)
    for one in beside:
        add(one)
        for part in one.children:
            size = f"{part.name}: {counted(part.facts['ranks'], 'rank')}, {mib(part.value)} MiB"
            table.add_row("", "", Text(size, style="dim"))
    add(account.device, bold=True)
    if (with_gaps := gib(plan.memory.with_gaps_bytes)) != gib(plan.memory.device_bytes):
        what = "what it shows while the card has room: with gaps that torch gives back"
        table.add_row("with gaps", with_gaps, Text(what, style="dim"))
    add(account.margin)
    table.add_row("card", gib(plan.memory.capacity_bytes), "", style="bold")
    _add_spare(table, -plan.memory.excess_bytes)
    return table


def _add_spare(table: Table, spare: float) -> None:
    table.add_row("headroom" if spare >= 0 else "missing", gib(abs(spare)), "", style="" if spare >= 0 else "red")


def _host(plan: Plan, host: Term) -> Table:
    table = table_of("part", right=("GiB",), last=("what",))
    for one in host.children:
        table.add_row(one.name, gib(one.value), _product(one))
    processes = counted(host.facts["processes"], "process", "processes")
    table.add_row("total", gib(host.value), f"of {processes}", style="bold")
    capacity = plan.memory.host_capacity_bytes
    if capacity is None:
        table.add_row("the node", "?", "not in the spec")
        return table
    table.add_row("the node", gib(capacity), "", style="bold")
    _add_spare(table, capacity - host.value)
    return table
