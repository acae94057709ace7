"""Objects that stand in a list by the modules that have them, and are imported when they are come to."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, TypeVar, overload

_One = TypeVar("_One")


class OnDemand(Sequence[_One]):
    """A tuple of which most commands need the first ones alone, and importing the others takes longer than they do."""

    def __init__(self, *homes: str) -> None:
        """Each is `module:name`."""
        self._homes = homes
        self._known: dict[str, Any] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._homes)

    @overload
    def __getitem__(self, place: int) -> _One: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[_One, ...]: ...
    def __getitem__(self, place: int | slice) -> _One | tuple[_One, ...]:
        """One of them, or a tuple of those of a slice."""
        if isinstance(place, slice):
            return tuple(map(self._found, self._homes[place]))
        return self._found(self._homes[place])

    def _found(self, home: str) -> _One:
        if home not in self._known:
            module, name = home.split(":")
            self._known[home] = getattr(import_module(module), name)
        found: _One = self._known[home]
        return found
