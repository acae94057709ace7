"""A script, whole: what its shell reads, and what the commands in it come to."""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.reading.parts import Part
from topoplan.reading.recogniser import Recognisers
from topoplan.reading.session import Command, Environment, read_session
from topoplan.reading.setup import Variable
from topoplan.reading.wrappers import Unwrapped, unwrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a piece of shell text says."""

    part: Part
    commands: tuple[Command, ...]
    """As they are written."""
    meant: tuple[Unwrapped, ...]
    """Those that are meant: behind `srun`, in the text of `bash -c`."""
    variables: tuple[Variable, ...]
    """Set in the environment, anywhere in it."""
    not_exported: tuple[Variable, ...]
    """Set for the shell alone: no process sees them."""
    environment: Environment | None
    """At its end."""
    unclosed: tuple[str, int] | None
    """A quote or bracket that is never closed, and its line."""


def read_script(part: Part, recognisers: Recognisers, environment: Environment | None = None) -> Script:
    """What a shell part says; `environment` is what was exported before it. Raises SpecError."""
    session = read_session(part, environment)
    meant, told = unwrapped(part, session.commands, {name for one in recognisers for name in one.names})
    return Script(
        part=part,
        commands=session.commands,
        meant=meant,
        variables=(*session.variables, *told),
        not_exported=session.not_exported,
        environment=session.environment,
        unclosed=session.unclosed,
    )
