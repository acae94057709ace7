"""One line of a preflight: what was looked at on which host, and what came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "warning", "failure", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The outcome of one check on one host."""

    name: str
    """Kebab-case, the same on all hosts: `gpus-free`."""
    host: str
    """As the spec names it; empty for what concerns all of them together."""
    outcome: Outcome
    what: str
    """What was found, in one phrase without a full stop."""
    remedy: str = ""
    """What to do; empty where all is well."""
