"""What came out of looking at a host, or at all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "warning", "failure", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of one look at one host."""

    name: str = ""
    """What was looked at. Kebab-case, the same on all hosts: `gpus-free`."""
    host: str = ""
    """As the spec names it; empty for what concerns all of them together."""
    outcome: Outcome
    what: str
    """What was found, in one phrase without a full stop."""
    remedy: str = ""
    """What to do; empty where all is well."""


def ok(what: str) -> Result:
    """All is well."""
    return Result(outcome="ok", what=what)


def warning(what: str, remedy: str, *, name: str = "", host: str = "") -> Result:
    """The run may be slow, or fail."""
    return Result(name=name, host=host, outcome="warning", what=what, remedy=remedy)


def failure(what: str, remedy: str, *, name: str = "", host: str = "") -> Result:
    """The run would stop or hang, or train something else than was asked for."""
    return Result(name=name, host=host, outcome="failure", what=what, remedy=remedy)


def skipped(why: str) -> Result:
    """It could not be looked at."""
    return Result(outcome="skipped", what=why)
