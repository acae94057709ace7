"""The result of checking a host, or all hosts together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "warning", "failure", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one check on one host."""

    name: str = ""
    """Name of the check in kebab case, the same on all hosts: `gpus-free`."""
    host: str = ""
    """The host as the spec names it; empty if the result concerns all hosts together."""
    outcome: Outcome
    what: str
    """What was found, as a phrase without a full stop."""
    remedy: str = ""
    """What to do; empty if all is well."""


def ok(what: str) -> Result:
    """Return a result without a problem."""
    return Result(outcome="ok", what=what)


def warning(what: str, remedy: str, *, name: str = "", host: str = "") -> Result:
    """Return a result for a problem that may slow the run or make it fail."""
    return Result(name=name, host=host, outcome="warning", what=what, remedy=remedy)


def failure(what: str, remedy: str, *, name: str = "", host: str = "") -> Result:
    """Return a result for a problem that would stop or hang the run, or make it train something else than intended."""
    return Result(name=name, host=host, outcome="failure", what=what, remedy=remedy)


def skipped(why: str) -> Result:
    """Return a result for a check that was not possible."""
    return Result(outcome="skipped", what=why)
