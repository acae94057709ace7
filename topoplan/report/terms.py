"""Print the formulas behind an account's terms."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from topoplan.report.tables import heading, table_of
from topoplan.report.text import significant
from topoplan.terms import Term

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
