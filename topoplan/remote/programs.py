"""The texts of programs that run on hosts: files of their own, in the folder `scripts` of a room."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def program(room: str, name: str) -> str:
    """The text of one: `program("hosts", "collect.sh")`."""
    return files("topoplan").joinpath(room, "scripts", name).read_text(encoding="utf-8")
