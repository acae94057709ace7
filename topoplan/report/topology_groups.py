"""The links that a layout's communication groups use, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from topoplan.engines.registry import engine_of
from topoplan.layout.layout import Layout
from topoplan.planner.communication import GroupLinks, StepFlow
from topoplan.report.tables import heading, paragraph, table_of
from topoplan.report.text import layout_label, significant
from topoplan.report.time import MOMENTS
from topoplan.report.topology_words import LINKS, rate_words

NAMES = {"dp_cp": "dp x cp"}
"""Display names of groups whose identifiers are not words."""
_PATTERNS = {"ring": "ring", "neighbour": "to the next", "all-to-all": "all to all", "tree": "tree"}

_MEANINGS = {
    "ulysses": "ranks that share a sequence",
    "cp": "ranks that share a sequence",
    "shards": "ranks that divide the states of the model between them",
    "replicas": "ranks that hold the same states and add up their gradients",
}


def print_groups(console: Console, layout: Layout, rows: Sequence[GroupLinks]) -> None:
    """Print one row per kind of group, for its worst-placed group."""
    words = layout_words(layout)
    console.print()
    if not rows:
        paragraph(console, f"Communication groups of {words}: none has more than one member.", style="bold")
        return
    paragraph(console, f"Communication groups of {words}", style="bold")
    table = table_of("group", right=("size", "groups"), last=("first", "worst placed", "links", "tightest"))
    for header in ("flows\non it", "GB/s\na GPU"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        tightest = row.tightest
        table.add_row(
            NAMES.get(row.name, row.name),
            f"{row.shape.size:,}",
            f"{row.groups:,}",
            members(row.first),
            "the same" if row.worst == row.first else members(row.worst),
            ", ".join(dict.fromkeys(LINKS[one.kind] for one in row.links)),
            f"{LINKS[tightest.kind]} {rate_words(tightest.kind, tightest.rate_bytes_per_s)}",
            f"{tightest.messages:,}",
            f"{row.member_bytes_per_s / 1e9:.4g}",
        )
    console.print(table)
    patterns = "; ".join(f"{NAMES.get(row.name, row.name)}: {_PATTERNS[row.pattern]}" for row in rows)
    paragraph(
        console,
        f"Traffic: {patterns}. All groups of a kind are active at the same moment and share the links. GB/s is what a"
        " member sends, with what NCCL reaches of the links.",
        style="dim",
    )
    if "backend" in engine_of(layout.backend).group_keys(layout):
        paragraph(console, "; ".join(f"{row.name}: {_MEANINGS[row.name]}" for row in rows) + ".", style="dim")


def group_words(row: GroupLinks, flows: Sequence[StepFlow]) -> str:
    """Describe a kind of group: `tp: 8 groups of 4, tightest NVLink 450 GB/s; a GPU sends 12.3 GB in a step`."""
    groups = "1 group" if row.groups == 1 else f"{row.groups:,} groups"
    tightest = f"{LINKS[row.tightest.kind]} {rate_words(row.tightest.kind, row.tightest.rate_bytes_per_s)}"
    sent = sum(one.member_bytes for one in flows if one.group == row.name)
    sends = f"; a GPU sends {_gb(sent)} GB in a step" if sent else ""
    return f"{NAMES.get(row.name, row.name)}: {groups} of {row.shape.size:,}, tightest {tightest}{sends}"


def layout_words(layout: Layout) -> str:
    """Return the parts of a layout that determine its groups: `tp4 pp2 dp4`, or `fsdp2 hybrid ulysses2 dp8`."""
    keys = engine_of(layout.backend).group_keys(layout)
    if "backend" in keys:
        return layout_label(layout).partition(" mbs")[0]
    degrees = {key: getattr(layout, key) for key in keys}
    return " ".join(f"{key}{value}" for key, value in degrees.items() if value > 1 or key in ("tp", "pp", "dp"))


def print_step_flows(console: Console, flows: Sequence[StepFlow]) -> None:
    """Print what a GPU sends in a step, and the resulting load on the busiest link of each kind."""
    if not flows:
        return
    heading(console, "Bytes of a step, GB")
    kinds = list(dict.fromkeys(kind for flow in flows for kind in flow.link_bytes))
    right = ("a GPU\nsends", *(f"busiest\n{LINKS[kind]}" for kind in kinds))
    table = table_of("what", "group", "kind", "in", right=right)
    for one in flows:
        times = f" x {one.flow.times}" if one.flow.times > 1 else ""
        table.add_row(
            one.flow.name,
            NAMES.get(one.group, one.group),
            one.flow.call.kind,
            f"{MOMENTS[one.flow.moment]}{times}",
            _gb(one.member_bytes),
            *(_gb(one.link_bytes.get(kind, 0.0)) for kind in kinds),
        )
    if len(flows) > 1:
        sent = sum(one.member_bytes for one in flows)
        on_links = (sum(one.link_bytes.get(kind, 0.0) for one in flows) for kind in kinds)
        table.add_row("together", "", "", "", _gb(sent), *map(_gb, on_links), style="bold")
    console.print(table)
    words = "Busiest: the most loaded link of its kind, one way, all groups together."
    if any(one.group == "embd" for one in flows):
        words += " embd: the stages that hold the tied embedding."
    paragraph(console, words, style="dim")


def _gb(size_bytes: float) -> str:
    return significant(size_bytes / 1e9) if size_bytes else "-"


def members(ranks: Sequence[int]) -> str:
    """Format evenly spaced ranks as `0-7` or `0, 8, .. 24`."""
    if len(ranks) > 2 and ranks[1] - ranks[0] == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 3:
        return f"{ranks[0]}, {ranks[1]}, .. {ranks[-1]}"
    return ", ".join(map(str, ranks))
