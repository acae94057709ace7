"""A spec file, or a run document, on its way to a cluster and a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from topoplan.errors import InputError, SpecError
from topoplan.specs.source import KeyPath, dotted

if TYPE_CHECKING:
    from topoplan.specs.forms import SpecForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document: what it says, checked value by value, and where each value stands."""

    form: SpecForm
    place: Callable[[KeyPath], str]
    """`file:line` of a value."""
    raw: Mapping[str, Any]
    """The document as it was written."""
    is_run_document: bool = False
    """One of `topoplan predict`, where `nodes` may be left out."""

    def fail(self, path: KeyPath, what: str, *, expected: str = "", remedy: str = "") -> NoReturn:
        """Raise a SpecError about the value of a key, or about the whole."""
        raise SpecError(
            f"{dotted(path)}: {what}" if path else what, where=self.place(path), expected=expected, remedy=remedy
        )

    def lacks(self, key: str, why: str = "", *, remedy: str, at: KeyPath = ()) -> NoReturn:
        """Raise a SpecError about a key that is not there."""
        raise SpecError(f"`{key}` is missing{why}", where=self.place(at), remedy=remedy)

    def has(self, *path: str) -> bool:
        """Whether a key is given."""
        value: Any = self.raw
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value is not None


def relocated(error: InputError, where: str) -> InputError:
    """The same error with a place in front."""
    return type(error)(str(error), where=where)
