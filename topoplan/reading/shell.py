"""Reads a whole script: the commands as its shell parses them, and what these run once wrappers are removed."""

from __future__ import annotations

from dataclasses import replace

from topoplan.reading.parts import Part
from topoplan.reading.recognizer import Recognizers
from topoplan.reading.session import Environment, Script, read_session
from topoplan.reading.wrappers import unwrapped


def read_script(part: Part, recognizers: Recognizers, environment: Environment | None = None) -> Script:
    """Read a shell part, given the environment exported before it. Raises SpecError."""
    script = read_session(part, environment)
    meant, told = unwrapped(part, script.commands, {name for one in recognizers for name in one.names})
    return replace(script, unwrapped_commands=meant, variables=(*script.variables, *told))
