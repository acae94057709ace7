"""Paragraphs, lists and tables on a console."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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


def apart(console: Console, part: str | Table | Text, *, style: str = "") -> None:
    """A text or a table, below an empty line."""
    console.print()
    console.print(Text(part, style=style) if isinstance(part, str) else part)


def heading(console: Console, title: str) -> None:
    """An empty line and a title."""
    apart(console, title, style="bold")


class _Table(Table):
    """Cells that are strings are never read as markup."""

    def add_row(self, *cells: Any, style: Any = None, end_section: bool = False) -> None:
        plain = (Text(cell) if isinstance(cell, str) else cell for cell in cells)
        super().add_row(*plain, style=style, end_section=end_section)


def table_of(*left: str, right: Sequence[str] = (), last: Sequence[str] = (), whole: int = 0) -> Table:
    """A table with columns of text, of figures, and of text again; so many of the first are kept `whole`."""
    table = _Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for number, header in enumerate(left):
        table.add_column(Text(header), overflow="fold", no_wrap=number < whole)
    for header in right:
        table.add_column(Text(header), justify="right", no_wrap=True)
    for header in last:
        table.add_column(Text(header), overflow="fold")
    return table


GAP = 2
"""Between columns whose widths are worked out here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of figures, in a table that has to fit."""

    header: str
    """Two lines at most."""
    cells: tuple[str | Text, ...]
    left: bool = False
    """Words, not figures."""
    drop: int = 0
    """Columns with the highest number leave first when the terminal is narrow; 0 stays."""

    @property
    def width(self) -> int:
        """With the gap behind it."""
        return GAP + max(len(line) for text in (self.header, *map(str, self.cells)) for line in text.split("\n"))


def fitting(columns: Sequence[Column], room: int) -> list[Column]:
    """The columns that stay where there is so much room."""
    found = list(columns)
    while sum(column.width for column in found) > room and any(column.drop for column in found):
        found.remove(max(found, key=lambda column: column.drop))
    return found


def stage_span(stages: Sequence[int]) -> str:
    """`3`, or `3-6` for stages that follow each other."""
    return str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"


def stage_name(stages: Sequence[int]) -> str:
    """`Stage 3`, or `Stages 3 to 6`."""
    return f"Stage {stages[0]}" if len(stages) == 1 else f"Stages {stages[0]} to {stages[-1]}"
