"""What a function prints on a console."""

from collections.abc import Callable
from io import StringIO
from typing import Any

from rich.console import Console


def printed(
    function: Callable[..., None], *arguments: Any, width: int = 100, encoding: str = "utf-8", **named: Any
) -> str:
    """`function` is called with a console of so many columns, and the arguments."""
    # How rich knows a terminal that has no line drawing.
    stream: StringIO = type("Stream", (StringIO,), {"encoding": encoding})()
    function(Console(file=stream, width=width, color_system=None, highlight=False), *arguments, **named)
    return stream.getvalue()
