"""Secrets of a run: taken from the environment of this process, and masked in all that is shown and recorded.

They go to the hosts over the standard input of `start_node`, into the environment of the job. What the job itself
prints of them is in its log, on the host and in the local copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from topoplan.errors import HostError, InputError
from topoplan.hosts.preflight.checks import SECRETS
from topoplan.hosts.result import Result
from topoplan.terminal import plain, with_text
from topoplan.units import named

_Value = TypeVar("_Value")

_HIDDEN = "***"
_SHORTEST = 4
"""Shorter secrets are not masked: their occurrences would mostly be parts of other words."""


def missing(names: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the variables that are not set, or empty."""
    return [name for name in names if not environment.get(name)]


def take(names: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables with their values. Raises InputError if some are not set."""
    if lacking := missing(names, environment):
        what, remedy = _words(lacking)
        raise InputError(what, where="secrets", remedy=remedy)
    return {name: environment[name] for name in names}


def check(names: Sequence[str], environment: Mapping[str, str] = os.environ) -> Result | None:
    """Return the result of checking that all secrets are set, for a preflight; None if there are no secrets."""
    if not names:
        return None
    if not (lacking := missing(names, environment)):
        return Result(name=SECRETS, outcome="ok", what=f"{named(names)} set here")
    what, remedy = _words(lacking)
    return Result(name=SECRETS, outcome="failure", what=what, remedy=remedy)


def _words(lacking: Sequence[str]) -> tuple[str, str]:
    first = lacking[0]
    are, them = ("are", "them") if len(lacking) > 1 else ("is", "it")
    return (
        f"{named(lacking, 8)} {are} not set here, and the spec names {them}",
        f"export {them} in the shell that calls topoplan; `read -rs {first}; export {first}` keeps the value out of its"
        " history",
    )


class Mask:
    """Masks secret values in text, including what is left of one in a truncated line: its first half, at the least."""

    def __init__(self, values: Iterable[str]) -> None:
        """Take the values to mask, also in the form that they have in sanitized text."""
        parts = {part for value in values for line in (value, *value.splitlines()) for part in (line, plain(line))}
        self._values = sorted((part for part in parts if len(part.strip()) >= _SHORTEST), key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return the text with secrets masked."""
        for value in self._values:
            head = value[: max(8, (len(value) + 1) // 2)]
            at = text.find(head)
            while at >= 0:
                size = len(head)
                while size < len(value) and text[at + size : at + size + 1] == value[size]:
                    size += 1
                text = f"{text[:at]}{_HIDDEN}{text[at + size :]}"
                at = text.find(head, at + len(_HIDDEN))
        return text

    def value(self, value: _Value) -> _Value:
        """Return a JSON value or a dataclass with secrets masked."""
        return with_text(value, self.text) if self._values else value

    def error(self, error: HostError) -> HostError:
        """Return the error with secrets masked."""
        what, remedy = self.text(error.what), self.text(error.remedy)
        return HostError(what, host=error.host, problem=error.problem, remedy=remedy)
