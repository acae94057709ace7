"""A spec file, or a run document, on its way to becoming a cluster, a model and a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from topoplan.errors import InputError, SpecError
from topoplan.specs.source import KeyPath, with_key

if TYPE_CHECKING:
    from topoplan.specs.forms import SpecForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document: its values, each checked on its own, and the location of each."""

    form: SpecForm
    raw: Mapping[str, Any]
    """The document as it was written."""
    place: Callable[[KeyPath], str]
    """Returns the `file:line` of a value."""
    base: Callable[[KeyPath], Path]
    """Returns the directory that relative paths in a value are relative to."""
    is_run_document: bool = False
    """Whether this is a run document of `topoplan predict`, where `nodes` may be left out."""

    def has(self, *path: str) -> bool:
        """Return whether a key is given."""
        value: Any = self.raw
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value is not None

    def fail(self, path: KeyPath, what: str, *, expected: str = "", remedy: str = "") -> NoReturn:
        """Raise a SpecError about the value of a key."""
        where = self.place(path)
        raise SpecError(with_key(where, path, what), where=where, expected=expected, remedy=remedy)

    def fail_missing(self, key: str, why: str = "", *, remedy: str, at: KeyPath = ()) -> NoReturn:
        """Raise a SpecError about a missing key."""
        raise SpecError(f"`{key}` is missing{why}", where=self.place(at), remedy=remedy)

    @contextmanager
    def errors_at(self, *path: str) -> Iterator[None]:
        """Prefix errors about what a key names, such as a file, with the key and its location."""
        try:
            yield
        except InputError as error:
            where = self.place(path)
            raise type(error)(with_key(where, path, str(error)), where=where) from None
