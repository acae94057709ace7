"""A sequence of objects named by module, each imported when it is first accessed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, TypeVar, overload

_One = TypeVar("_One")


class OnDemand(Sequence[_One]):
    """A lazy tuple: most commands need only its first items, and importing the rest would dominate their run time."""

    def __init__(self, *homes: str) -> None:
        """`homes` are `module:name` strings, one for each item."""
        self._homes = homes
        self._known: dict[str, Any] = {}

    def __len__(self) -> int:
        """Return the number of items, without importing any."""
        return len(self._homes)

    @overload
    def __getitem__(self, place: int) -> _One: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[_One, ...]: ...
    def __getitem__(self, place: int | slice) -> _One | tuple[_One, ...]:
        """Import and return one item, or the tuple of items in a slice."""
        if isinstance(place, slice):
            return tuple(map(self._found, self._homes[place]))
        return self._found(self._homes[place])

    def _found(self, home: str) -> _One:
        if home not in self._known:
            module, name = home.split(":")
            self._known[home] = getattr(import_module(module), name)
        found: _One = self._known[home]
        return found
