"""Every error that topoplan raises on purpose.

    TopoplanError                 exit code 1
    |-- InputError                exit code 2: something the user gave is wrong
    |   |-- UnitError             a quantity without its unit, or with the wrong one
    |   |-- SpecError             a spec, job or run document
    |   |-- ModelError            a model that is unknown, incomplete or of an unsupported architecture
    |   |-- LayoutError           a layout or a pin that no rule allows
    |   `-- OutputError           a place to write to that cannot be used
    `-- NoLayoutFitsError         the search ended, and nothing fits

A message says what is wrong, where, what was expected and what to do, in one or two lines.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the known word nearest to `word`, or an empty string."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f"did you mean {by_lower[close[0]]!r}?" if close else ""
