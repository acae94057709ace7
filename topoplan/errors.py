"""The exceptions that topoplan raises on purpose.

    TopoplanError                 exit code 1
    |-- InputError                exit code 2: something the user gave is wrong
    |   |-- UnitError             a quantity without its unit, or with the wrong one
    |   |-- SpecError             a spec, job or run document
    |   |-- ModelError            a model that is unknown, incomplete or of an unsupported architecture
    |   |-- LayoutError           a layout or a pin that no rule allows
    |   `-- OutputError           a place to write to that cannot be used
    |-- NoLayoutFitsError         the search ended, and nothing fits; exit code 130 if it was interrupted
    `-- HostError                 a machine that cannot be reached, or does not do what it should

A message says what is wrong, where, what was expected and what to do, in one or two lines.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Literal

from topoplan.terminal import plain

HostProblem = Literal[
    "unresolved",
    "unreachable",
    "refused",
    "timeout",
    "proxy",
    "banner",
    "protocol",
    "key-unknown",
    "key-changed",
    "key-revoked",
    "auth",
    "lost",
    "deadline",
    "command",
]
"""The kind of failure on a host, for programs.

While connecting: `unresolved` (host name), `unreachable` (network), `refused` (connection), `timeout` (no answer),
`proxy` (the proxy command or jump host does not forward the connection), `banner` (the server hung up before its
banner; a retry may succeed), `protocol` (no SSH server, or no common algorithm), `key-unknown`, `key-changed`,
`key-revoked` (the host key), `auth` (authentication). Once connected: `lost` (connection), `deadline` (a command ran
past it), `command` (a command failed).
"""


INTERRUPTED = 130
"""Exit code 128 + SIGINT, as in shells."""


class TopoplanError(Exception):
    """Base class of all errors shown to a user. `str(error)` is the whole message."""

    exit_code = 1


class InputError(TopoplanError):
    """Invalid user input."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", expected: str = "", remedy: str = "") -> None:
        """Compose the message; each part is a phrase without a final period.

        `where` is a file and line, a key or an option; `expected` is what would be right; `remedy` is what to do.
        """
        self.what, self.where, self.expected, self.remedy = what, where, expected, remedy
        head = f"{where}: {what}" if where else what
        super().__init__("; ".join(part for part in (head, expected, remedy) if part))


class UnitError(InputError):
    """A quantity with a missing or wrong unit."""


class SpecError(InputError):
    """A spec, job or run document that cannot be read or is inconsistent."""


class ModelError(InputError):
    """A model that is unknown, incomplete or of an unsupported architecture."""


class LayoutError(InputError):
    """A layout or a pin that the rules reject."""


class OutputError(InputError):
    """An output path that cannot be used."""


class NoLayoutFitsError(TopoplanError):
    """The search ended without a layout that fits."""

    def __init__(self, message: str, *, interrupted: bool = False) -> None:
        """Take the whole message, and whether the user ended the search."""
        super().__init__(message)
        if interrupted:
            self.exit_code = INTERRUPTED


class HostError(TopoplanError):
    """A host that cannot be reached or that misbehaves."""

    def __init__(self, what: str, *, host: str, problem: HostProblem, remedy: str = "") -> None:
        """Compose the message; `what` and `remedy` are phrases without a final period, `host` is the name in the spec.

        Parts of the message may come from the host, so terminal control characters are removed from all of them.
        """
        self.what, self.host, self.problem, self.remedy = plain(what), plain(host), problem, plain(remedy)
        super().__init__("; ".join(part for part in (f"{self.host}: {self.what}", self.remedy) if part))


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` for the known word closest to `word`, or an empty string."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f"did you mean {by_lower[close[0]]!r}?" if close else ""


def nearest_file_name(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` for the closest name of a file that is alike without its suffix, or an empty string:
    a common `.yaml` makes any two short names close."""
    return nearest(name, [other for other in known if nearest(PurePath(name).stem, [PurePath(other).stem])])


_LEAST_MISSPELT = 6
"""Length of the shortest word that is taken for a misspelling: one letter makes another word of a shorter one."""


def misspelt(word: str, known: Iterable[str]) -> str:
    """Return the only known word from which `word` differs by a letter that is missing, added, wrong or
    swapped with the next one; '' if there is none, or several. A digit is no letter: `adam_beta3` is no misspelling."""
    close = [name for name in known if len(word) >= _LEAST_MISSPELT and _by_a_letter(word, name)]
    return close[0] if len(close) == 1 else ""


def _by_a_letter(one: str, other: str) -> bool:
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    one, other = one[same:], other[same:]
    if one[1:] == other or one == other[1:]:
        changed = max(one, other, key=len)[:1]
    elif one[1:] == other[1:]:
        changed = one[:1] + other[:1]
    elif one[:2] == other[1::-1] and one[2:] == other[2:]:
        changed = one[:2]
    else:
        return False
    return bool(changed) and not any(character.isdigit() for character in changed)


def listed(names: Sequence[str], word: str = "and") -> str:
    """Join names into `a`, `a and b` or `a, b and c`."""
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
