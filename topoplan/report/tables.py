"""Print paragraphs, lists, tables, and the formulas behind an account on a console."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column as RichColumn
from rich.table import Table
from rich.text import Text

from topoplan.report.text import significant
from topoplan.terms import Term


def paragraph(console: Console, text: str, *, style: str = "") -> None:
    """Print text wrapped at the console's width, never interpreted as markup, because names may contain brackets."""
    console.print(Text(text, style=style))


def bullets(console: Console, texts: Iterable[str]) -> None:
    """Print each text after a dash, with its further lines indented."""
    for text in texts:
        hanging(console, Text(text), "- ", "  ")


def hanging(console: Console, text: Text, first: str, further: str) -> None:
    """Print wrapped text, with `first` before its first line and `further` before the others."""
    width = console.width - max(len(first), len(further))
    for number, line in enumerate(text.wrap(console, width)):
        line.rstrip()
        console.print(Text(further if number else first) + line)


def apart(console: Console, part: str | Table | Text, *, style: str = "") -> None:
    """Print a text or a table after an empty line."""
    console.print()
    console.print(Text(part, style=style) if isinstance(part, str) else part)


def heading(console: Console, title: str) -> None:
    """Print an empty line and a title."""
    apart(console, title, style="bold")


_JOINT = re.compile(r"(?<=[^\s+_/-][+_/-])(?=[^\s+_/-])|(?<=::)(?=\S)")
"""Places inside a word, such as `sel:layernorm+moe_act`, at which it may break."""


def _cuts(text: str, width: int) -> list[int]:
    """Return where words wider than `width` break: at their joints, each piece as long as possible."""
    cuts: list[int] = []
    for word in re.finditer(r"\S+", text):
        start, last = word.start(), 0
        joints = [one.start() for one in _JOINT.finditer(text, *word.span())] if len(word[0]) > width else []
        for end in (*joints, word.end()):
            if end - start > width and last > start:
                cuts.append(last)
                start = last
            last = end
    return cuts


def lines_of(text: str, width: int) -> list[str]:
    """Return a text as lines of at most `width` characters, breaking words at their joints if they have any."""
    cuts = _cuts(text, width)
    pieces = [text[start:end] for start, end in pairwise((0, *cuts, len(text)))]
    return [line for piece in pieces for line in textwrap.wrap(piece, width)]


@dataclass(frozen=True, slots=True)
class _Cell:
    """A text that breaks at the joints of its words where a whole word has no room."""

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        cuts = [] if options.no_wrap else _cuts(self.text.plain, options.max_width)
        yield Text("\n").join(self.text.divide(cuts)) if cuts else self.text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.text)


class _Table(Table):
    """A table whose string cells are never interpreted as markup, and whose words stay whole while there is room.

    Rich makes the widest columns narrower until a table fits, whatever words they hold.
    """

    def add_column(self, header: RenderableType = "", *arguments: Any, **named: Any) -> None:
        """Add a column; see rich."""
        super().add_column(_cell(header), *arguments, **named)

    def add_row(self, *cells: Any, style: Any = None, end_section: bool = False) -> None:
        """Add a row; see rich."""
        super().add_row(*map(_cell, cells), style=style, end_section=end_section)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Set the widths of the columns that may wrap, if the table is too wide; then print as rich does."""
        widths = [max(map(cell_len, _lines_in(column)), default=0) for column in self.columns]
        room = options.max_width - GAP * (len(widths) - 1)
        wraps = [number for number, column in enumerate(self.columns) if not column.no_wrap]
        if sum(widths) > room:
            for least in (_longest_words, _longest_pieces, lambda column: 1):
                floors = {number: least(self.columns[number]) for number in wraps}
                while sum(widths) > room:
                    wide = [number for number in wraps if widths[number] > floors[number]]
                    if not wide:
                        break
                    widths[max(wide, key=lambda number: (widths[number], number))] -= 1
            for number in wraps:
                self.columns[number].width = widths[number]
        yield from super().__rich_console__(console, options)


def _cell(content: Any) -> Any:
    if isinstance(content, str):
        content = Text(content)
    return _Cell(content) if isinstance(content, Text) else content


def _lines_in(column: RichColumn) -> Iterator[str]:
    for cell in (column.header, *column.cells):
        yield from cell.text.plain.split("\n") if isinstance(cell, _Cell) else ()


def _longest_words(column: RichColumn) -> int:
    return max((cell_len(word) for line in _lines_in(column) for word in line.split()), default=1)


def _longest_pieces(column: RichColumn) -> int:
    return max((cell_len(piece) for line in _lines_in(column) for piece in _JOINT.sub(" ", line).split()), default=1)


def table_of(*left: str, right: Sequence[str] = (), last: Sequence[str] = (), whole: int = 0) -> Table:
    """Return a table of text (`left`), figures (`right`) and text (`last`); the first `whole` columns never wrap."""
    table = _Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for number, header in enumerate(left):
        table.add_column(Text(header), overflow="fold", no_wrap=number < whole)
    for header in right:
        table.add_column(Text(header), justify="right", no_wrap=True)
    for header in last:
        table.add_column(Text(header), overflow="fold")
    return table


GAP = 2
"""Gap between columns of fixed width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of figures in a table with limited width."""

    header: str
    """The header, at most two lines."""
    cells: tuple[str | Text, ...]
    left: bool = False
    """Whether the column is left-aligned, because it holds words."""
    drop: int = 0
    """Priority for removal on a narrow terminal: the highest number goes first, 0 is never removed."""

    @property
    def width(self) -> int:
        """The width of the column, including the gap before the next one."""
        return GAP + max(len(line) for text in (self.header, *map(str, self.cells)) for line in text.split("\n"))


def fitting(columns: Sequence[Column], room: int) -> list[Column]:
    """Return the columns that fit in `room`, dropping those with the highest `drop` first."""
    found = list(columns)
    while sum(column.width for column in found) > room and any(column.drop for column in found):
        found.remove(max(found, key=lambda column: column.drop))
    return found


def stage_span(stages: Sequence[int]) -> str:
    """Return `3`, or `3-6` for consecutive stages."""
    return str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"


def stage_name(stages: Sequence[int]) -> str:
    """Return `Stage 3`, or `Stages 3 to 6`."""
    return f"Stage {stages[0]}" if len(stages) == 1 else f"Stages {stages[0]} to {stages[-1]}"


_MIB = 2**20


def print_formulas(console: Console, rows: Iterable[tuple[str, Term]]) -> None:
    """Print the source of each name's formulas; names with the same sources share a row."""
    names: dict[tuple[str, ...], list[str]] = {}
    listed: set[str] = set()
    for name, term in rows:
        sources = tuple(dict.fromkeys(one.source for one in term.leaves()))
        # A term whose formulas are all listed already shows its own source instead.
        sources = (term.source,) if sources not in names and set(sources) <= listed else sources
        names.setdefault(sources, []).append(name)
        listed |= set(sources)
    heading(console, "Formulas, as files and names in the package topoplan/, and their sources")
    table = table_of("figure", last=("formula; source",))
    for sources, shared in names.items():
        for number, source in enumerate(sources):
            table.add_row("" if number else ", ".join(shared), Text(source, style="dim"))
    console.print(table)


def mib(size_bytes: float) -> str:
    """Format bytes in MiB with one decimal."""
    return f"{size_bytes / _MIB:,.1f}"


def elements(count: float) -> str:
    """Format a number of elements: 8.19B, 42.1M."""
    return f"{significant(count / 1e9)}B" if count >= 1e9 else f"{significant(count / 1e6)}M"
