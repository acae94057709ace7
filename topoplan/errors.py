"""Every error that topoplan raises on purpose.

    TopoplanError                 exit code 1
    |-- InputError                exit code 2: something the user gave is wrong
    |   |-- UnitError             a quantity without its unit, or with the wrong one
    |   |-- SpecError             a spec, job or run document
    |   |-- ModelError            a model that is unknown, incomplete or of an unsupported architecture
    |   |-- LayoutError           a layout or a pin that no rule allows
    |   `-- OutputError           a place to write to that cannot be used
    |-- NoLayoutFitsError         the search ended, and nothing fits
    `-- HostError                 a machine that cannot be reached, or does not do what it should

A message says what is wrong, where, what was expected and what to do, in one or two lines.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
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
"""What went wrong with a host, for programs. On the way in: `unresolved` name, `unreachable` network, `refused`
connection, `timeout` (no answer), `proxy` (its command or jump host does not pass us on), `banner` (it hung up, and may
not next time), `protocol` (no SSH server, or no common algorithm), `key-unknown`, `key-changed`, `key-revoked` (the
host's key), `auth` (who we are). Later: `lost` connection, `deadline` of a command, `command` (it failed there)."""


class TopoplanError(Exception):
    """Base of all errors that a user may see. `str(error)` is the whole message."""

    exit_code = 1


class InputError(TopoplanError):
    """Something the user gave is wrong."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", expected: str = "", remedy: str = "") -> None:
        """Compose the message; each part is a phrase without a full stop.

        `where` is a file with its line, a key or an option; `expected` what would be right; `remedy` what to do.
        """
        self.what, self.where, self.expected, self.remedy = what, where, expected, remedy
        head = f"{where}: {what}" if where else what
        super().__init__("; ".join(part for part in (head, expected, remedy) if part))


class UnitError(InputError):
    """A quantity without its unit, or with the wrong one."""


class SpecError(InputError):
    """A spec, job or run document that cannot be read or does not make sense."""


class ModelError(InputError):
    """A model that is unknown, incomplete or of an architecture that is not supported."""


class LayoutError(InputError):
    """A layout or a pin that no rule allows."""


class OutputError(InputError):
    """A place to write to that cannot be used."""


class NoLayoutFitsError(TopoplanError):
    """The search ended, and nothing fits."""


class HostError(TopoplanError):
    """One machine that cannot be reached, or does not do what it should."""

    def __init__(self, what: str, *, host: str, problem: HostProblem, remedy: str = "") -> None:
        """Compose the message; `what` and `remedy` are phrases without a full stop, `host` the user's name for it.

        What a host said may be among the words: nothing in them is for a terminal to obey.
        """
        self.what, self.host, self.problem, self.remedy = plain(what), plain(host), problem, plain(remedy)
        super().__init__("; ".join(part for part in (f"{self.host}: {self.what}", self.remedy) if part))


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the known word nearest to `word`, or an empty string."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f"did you mean {by_lower[close[0]]!r}?" if close else ""


def listed(names: Sequence[str], word: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
