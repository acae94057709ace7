"""Wrapped text on a console."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
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
