"""Write to standard output, as JSON or as text."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from topoplan.errors import OutputError

if TYPE_CHECKING:
    from rich.console import Console

What = ParamSpec("What")
PIPE_COLUMNS = 100
"""Default width if standard output is not a terminal."""
_MAX_COLUMNS = 140
_MIN_COLUMNS = 40
_NO_BREAK = "\N{NO-BREAK SPACE}"


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a JSON value in ASCII, so that no terminal or pipe can garble it."""
    sys.stdout.write(json.dumps(value, indent=indent, allow_nan=False) + "\n")


def stdout_console() -> Console:
    """Return a console for standard output: as wide as the terminal, or without one, $COLUMNS or 100 and no color."""
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise  # handled by `main`: rich would end the program with exit code 1

    terminal, said = sys.stdout.isatty(), os.environ.get("COLUMNS", "")
    columns = shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns if terminal or said.isdecimal() else PIPE_COLUMNS
    return _Console(
        file=sys.stdout,
        width=max(_MIN_COLUMNS, min(columns, _MAX_COLUMNS)),
        force_terminal=terminal,
        color_system="auto" if terminal else None,
        highlight=False,
        markup=False,
        emoji=False,
    )


def complaint(message: str) -> str:
    """Return an error message for standard error; on a terminal, sentences are wrapped, and list items indented.

    A command is never broken, whether it has a line of its own or stands in backticks, so that it can be copied whole.
    """
    text = f"topoplan: {message}"
    if not sys.stderr.isatty():
        return text
    import re
    import textwrap

    width, lines = max(_MIN_COLUMNS, shutil.get_terminal_size().columns), []
    for line in text.splitlines():
        content = line.lstrip()
        if not content.startswith(("topoplan ", "Next  ")):
            indent = " " * (len(line) - len(content)) + "  " * content.startswith("- ")
            held = re.sub(r"`[^`]*`", lambda command: command[0].replace(" ", _NO_BREAK), line)
            line = textwrap.fill(
                held, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            ).replace(_NO_BREAK, " ")
        lines.append(line)
    return "\n".join(lines)


def show(
    as_json: bool,
    document: Callable[What, Any],
    on_console: Callable[Concatenate[Console, What], None],
    *what: What.args,
    **how: What.kwargs,
) -> None:
    """Print a verb's result on standard output: its `document` as JSON, or as text."""
    if as_json:
        print_json(document(*what, **how))
    else:
        on_console(stdout_console(), *what, **how)


def write_and_tell(path: str | Path, text: str, *, mark: str, writer: str, force: bool | None = None) -> None:
    """Write a file that replaces only an earlier one of topoplan's (`bundle.write.write_file`), and say so."""
    from topoplan.bundle.write import write_file

    write_file(path, text, mark=mark, writer=writer, force=force)
    print_written(path)


def print_written(path: object) -> None:
    """Print which file was written."""
    stdout_console().print(f"Wrote {path}", soft_wrap=True)


def write_new(output: str, text: str) -> None:
    """Write a new file; an existing one is never overwritten, because it may have been edited."""
    try:
        with Path(output).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise OutputError("exists", where=output, remedy="name another, or remove it first") from error
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=output) from error


def warn(text: str) -> None:
    """Print a line on standard error."""
    sys.stdout.flush()
    sys.stderr.write(f"topoplan: {text}\n")
