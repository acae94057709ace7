"""Secrets of a run: taken from the environment of this process, and kept out of all that is shown and noted.

They go to the hosts by the standard input of `start_node`, into the environment of the job. What the job itself prints
of them is in its log, there and in the copy here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from topoplan.errors import HostError, InputError
from topoplan.hosts.preflight.looks import SECRETS
from topoplan.hosts.result import Result
from topoplan.terminal import plain, with_text
from topoplan.units import named

_Value = TypeVar("_Value")

_HIDDEN = "***"
_SHORTEST = 4
"""Of shorter ones every occurrence would be another word's."""


def missing(names: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Those that are not set, or empty."""
    return [name for name in names if not environment.get(name)]


def take(names: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables with their values. Raises InputError for those that are not set."""
    if lacking := missing(names, environment):
        what, remedy = _words(lacking)
        raise InputError(what, where="secrets", remedy=remedy)
    return {name: environment[name] for name in names}


def check(names: Sequence[str], environment: Mapping[str, str] = os.environ) -> Result | None:
    """The same as a line of a preflight; None where there are no secrets."""
    if not names:
        return None
    if not (lacking := missing(names, environment)):
        return Result(name=SECRETS, outcome="ok", what=f"{named(names)} set here")
    what, remedy = _words(lacking)
    return Result(name=SECRETS, outcome="failure", what=what, remedy=remedy)


def _words(lacking: Sequence[str]) -> tuple[str, str]:
    """What is wrong, and what to do."""
    first = lacking[0]
    are, them = ("are", "them") if len(lacking) > 1 else ("is", "it")
    return (
        f"{named(lacking, 8)} {are} not set here, and the spec names {them}",
        f"export {them} in the shell that calls topoplan; `read -rs {first}; export {first}` keeps the value out of its"
        " history",
    )


class Mask:
    """Takes values out of text. Also what is left of one where a long line was cut: its first half, at the least."""

    def __init__(self, values: Iterable[str]) -> None:
        """Know them, and how they look once they are plain."""
        parts = {part for value in values for line in (value, *value.splitlines()) for part in (line, plain(line))}
        self._values = sorted((part for part in parts if len(part.strip()) >= _SHORTEST), key=len, reverse=True)

    def text(self, text: str) -> str:
        """A text without them."""
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
        """A value of JSON, or a dataclass, without them."""
        return with_text(value, self.text) if self._values else value

    def error(self, error: HostError) -> HostError:
        """An error without them."""
        what, remedy = self.text(error.what), self.text(error.remedy)
        return HostError(what, host=error.host, problem=error.problem, remedy=remedy)
