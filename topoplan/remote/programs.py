"""The texts of programs that run on hosts: separate files in the `scripts` folder of a package."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def program(room: str, name: str) -> str:
    """Return the text of a program, such as `program("hosts", "collect.sh")`."""
    return files("topoplan").joinpath(room, "scripts", name).read_text(encoding="utf-8")
