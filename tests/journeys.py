"""Journeys from an empty directory to a bundle, as sessions on an 80 x 24 terminal; `make readme` rewrites them.

The first command of each is what a new user types; the others are copied from the `Next` line of the one before.
"""

import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from topoplan.cli.main import main

DIRECTORY = Path(__file__).parent / "data" / "journeys"
COLUMNS, LINES = 80, 24
MOST_COMMANDS = 3
_PROMPT = "$ "
_TERMINAL = {"COLUMNS": str(COLUMNS), "LINES": str(LINES)}


def run(command: str) -> str:
    """Return what an 80-column terminal shows for a `topoplan` command in the working directory."""
    program, *arguments = shlex.split(command)
    assert program == "topoplan"
    shown = io.StringIO()
    with (
        mock.patch.dict(os.environ, _TERMINAL),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(shown),
        contextlib.suppress(SystemExit),
    ):
        main(arguments)
    return "".join(f"{line.rstrip()}\n" for line in shown.getvalue().splitlines())


def session(first: str) -> Iterator[tuple[str, str]]:
    """Yield commands and their output, in an empty directory, until one writes a bundle."""
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        command: str | None = first
        for _ in range(MOST_COMMANDS):
            if command is not None:
                shown = run(command)
                yield command, shown
                command = next_command(shown)


def next_command(shown: str) -> str | None:
    """Return the suggested next command, or None."""
    found = re.findall(r"^Next  (topoplan .*)$", shown, re.MULTILINE)
    return found[-1] if found else None


def written(title: str, commands: Iterator[tuple[str, str]]) -> str:
    """Return a session as the text of its file."""
    return f"# {title}\n\n" + "\n".join(f"{_PROMPT}{command}\n{shown}" for command, shown in commands)


def read(path: Path) -> tuple[str, list[tuple[str, str]]]:
    """Read a session's title, and its commands with their output."""
    title, *rest = re.split(r"^\$ ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    pairs = [part.partition("\n")[::2] for part in rest]
    return title.strip().removeprefix("# "), [(command, shown.rstrip("\n") + "\n") for command, shown in pairs]


def rows(shown: str) -> list[str]:
    """Return the rows on the terminal."""
    lines = shown.splitlines()
    return [line[start : start + COLUMNS] for line in lines for start in range(0, max(1, len(line)), COLUMNS)]


if __name__ == "__main__":
    for file in sorted(DIRECTORY.glob("*.txt")):
        heading, recorded = read(file)
        file.write_text(written(heading, session(recorded[0][0])), encoding="utf-8")
