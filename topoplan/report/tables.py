"""Tables of figures and the words that they share."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from topoplan.report.paragraphs import paragraph


def heading(console: Console, title: str) -> None:
    """An empty line and a title."""
    console.print()
    paragraph(console, title, style="bold")


def table_of(*left: str, right: Sequence[str] = (), last: Sequence[str] = ()) -> Table:
    """A table with columns of text, of figures, and of text again."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for header in left:
        table.add_column(Text(header), overflow="fold")
    for header in right:
        table.add_column(Text(header), justify="right", no_wrap=True)
    for header in last:
        table.add_column(Text(header), overflow="fold")
    return table


def stage_span(stages: Sequence[int]) -> str:
    """`3`, or `3-6` for stages that follow each other."""
    return str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"


def stage_name(stages: Sequence[int]) -> str:
    """`Stage 3`, or `Stages 3 to 6`."""
    return f"Stage {stages[0]}" if len(stages) == 1 else f"Stages {stages[0]} to {stages[-1]}"
