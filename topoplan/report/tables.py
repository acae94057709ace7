"""Paragraphs, lists and tables on a console."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text


def paragraph(console: Console, text: str, *, style: str = "") -> None:
    """`text` wrapped at the console's width. It is never read as markup: names may hold brackets."""
    console.print(Text(text, style=style))


def bullets(console: Console, texts: Iterable[str]) -> None:
    """Each text behind a dash, its further lines under its first."""
    for text in texts:
        lines = Text(text).wrap(console, console.width - 2)
        for number, line in enumerate(lines):
            line.rstrip()
            console.print(Text("- " if number == 0 else "  ") + line)


def heading(console: Console, title: str) -> None:
    """An empty line and a title."""
    console.print()
    paragraph(console, title, style="bold")


def table_of(*left: str, right: Sequence[str] = (), last: Sequence[str] = (), whole: int = 0) -> Table:
    """A table with columns of text, of figures, and of text again; so many of the first are kept `whole`."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for number, header in enumerate(left):
        table.add_column(Text(header), overflow="fold", no_wrap=number < whole)
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
