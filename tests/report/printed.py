"""The output of functions that print on a console."""

from collections.abc import Callable
from io import StringIO
from typing import Any

from rich.console import Console


def printed(
    function: Callable[..., None], *arguments: Any, width: int = 100, encoding: str = "utf-8", **named: Any
) -> str:
    """Call `function` with a console of the given width and the arguments; return what it printed."""
    # This is how rich recognizes a terminal without line-drawing characters.
    stream: StringIO = type("Stream", (StringIO,), {"encoding": encoding})()
    function(Console(file=stream, width=width, color_system=None, highlight=False), *arguments, **named)
    return stream.getvalue()
