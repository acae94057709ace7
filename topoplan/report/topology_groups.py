"""What the communication groups of a layout cross, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from topoplan.layout.layout import Layout
from topoplan.planner.communication import GroupLinks
from topoplan.report.paragraphs import paragraph
from topoplan.report.topology_words import LINKS, rate_words

_NAMES = {"dp_cp": "dp x cp"}
_PATTERNS = {"ring": "ring", "neighbour": "to the next", "all-to-all": "all to all", "tree": "tree"}


def print_groups(console: Console, layout: Layout, rows: Sequence[GroupLinks]) -> None:
    """One row for each kind of group, its worst placed one."""
    degrees = {key: getattr(layout, key) for key in ("tp", "pp", "cp", "dp", "ep", "etp")}
    words = " ".join(f"{key}{value}" for key, value in degrees.items() if value > 1 or key in ("tp", "pp", "dp"))
    console.print()
    if not rows:
        paragraph(console, f"Communication groups of {words}: none has more than one member.", style="bold")
        return
    paragraph(console, f"Communication groups of {words}", style="bold")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("group", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("groups", justify="right", no_wrap=True)
    table.add_column("first", overflow="fold")
    table.add_column("worst placed", overflow="fold")
    table.add_column("links", overflow="fold")
    table.add_column("tightest", overflow="fold")
    table.add_column("flows\non it", justify="right", no_wrap=True)
    table.add_column("GB/s\na GPU", justify="right", no_wrap=True)
    for row in rows:
        tightest = row.tightest
        kinds = list(dict.fromkeys(LINKS[one.kind] for one in row.crossings))
        table.add_row(
            Text(_NAMES.get(row.name, row.name)),
            f"{row.shape.size:,}",
            f"{row.groups:,}",
            Text(members(row.first)),
            Text("the same" if row.worst == row.first else members(row.worst)),
            Text(", ".join(kinds)),
            Text(f"{LINKS[tightest.kind]} {rate_words(tightest.kind, tightest.rate_bytes_per_s)}"),
            f"{tightest.flows:,}",
            f"{row.member_bytes_per_s / 1e9:.4g}",
        )
    console.print(table)
    patterns = "; ".join(f"{_NAMES.get(row.name, row.name)}: {_PATTERNS[row.pattern]}" for row in rows)

    paragraph(
        console,
        f"Traffic: {patterns}. All groups of a kind are active at the same moment and share the links. GB/s is what a"
        " member sends, with what NCCL reaches of the links.",
        style="dim",
    )


def members(ranks: Sequence[int]) -> str:
    """`0-7`, `0, 8, .. 24`: ranks that are evenly apart."""
    if len(ranks) > 2 and ranks[1] - ranks[0] == 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 3:
        return f"{ranks[0]}, {ranks[1]}, .. {ranks[-1]}"
    return ", ".join(map(str, ranks))
