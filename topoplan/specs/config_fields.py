"""Typed access to the values of a config.json, each under any of its common names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from topoplan.errors import ModelError

_Value = TypeVar("_Value")
_MOST = 2**31 - 1
"""Upper limit of an integer; more is a typing error."""


class Fields:
    """A config's values. A null value counts as missing, as in transformers. All accessors raise ModelError."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self.where = config, where

    def find(self, *names: str) -> str | None:
        """Return the first of `names` that has a value in the config."""
        return next((name for name in names if self._config.get(name) is not None), None)

    def has(self, *names: str) -> bool:
        """Return whether the config has a value for one of `names`."""
        return self.find(*names) is not None

    def raw(self, name: str) -> Any:
        """Return a value unchecked, or None."""
        return self._config.get(name)

    def refusal(self, what: str, expected: str) -> ModelError:
        """Return the error for an inconsistent config."""
        return ModelError(what, where=self.where, expected=f"expected {expected}")

    def wrong(self, name: str, expected: str) -> ModelError:
        """Return the error for a single bad value."""
        value = repr(self._config.get(name))
        return self.refusal(f"{name} is {value if len(value) <= 60 else f'{value[:57]}...'}", expected)

    def missing(self, *names: str) -> ModelError:
        """Return the error for a missing required value."""
        others = f", which may also be named {', '.join(names[1:])}" if names[1:] else ""
        return ModelError(
            f"{names[0]} is missing",
            where=self.where,
            expected=f"expected a positive integer{others}",
            remedy="add it, or name a model of the catalog (`topoplan show models`)",
        )

    def _read(
        self, names: tuple[str, ...], default: _Value, expected: str, is_right: Callable[[Any], bool]
    ) -> Any | _Value:
        name = self.find(*names)
        if name is None:
            return default
        if not is_right(self._config[name]):
            raise self.wrong(name, expected)
        return self._config[name]

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
        """Return an integer within bounds. Without a default, a missing value raises an error that lists its names."""
        value = self._read(names, default, "an integer", _is_integer)
        if value is None:
            raise self.missing(*names)
        if value != default and not least <= value <= most:
            raise self.wrong(self.find(*names) or "", f"an integer from {least:,} to {most:,}")
        return int(value)

    def fraction(self, *names: str, default: float) -> float:
        """Return a number from 0 to 1."""
        return float(self._read(names, default, "a number from 0 to 1", lambda value: is_number(value, 0, 1)))

    def boolean(self, *names: str, default: bool) -> bool:
        """Return a boolean."""
        return bool(self._read(names, default, "true or false", lambda value: isinstance(value, bool)))

    def text(self, *names: str, default: str = "") -> str:
        """Return a string."""
        return str(self._read(names, default, "a string", lambda value: isinstance(value, str)))

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """Return an object, or None if missing."""
        return self._read((name,), None, "an object", lambda value: isinstance(value, Mapping))

    def indices(self, name: str) -> tuple[int, ...]:
        """Return a list of layer numbers, empty if missing."""
        return tuple(self._read((name,), (), "a list of layer numbers", lambda value: _is_list(value, _is_integer)))

    def words(self, name: str, length: int) -> tuple[str, ...]:
        """Return a list with one word per layer, empty if missing."""
        found = self._read(
            (name,),
            None,
            "a list of one word a layer",
            lambda value: _is_list(value, lambda word: isinstance(word, str)),
        )
        if found is not None and len(found) != length:
            what = f"{name} has {len(found)} entries and num_hidden_layers is {length}"
            raise self.refusal(what, "one entry a layer")
        return tuple(found or ())


def is_number(value: Any, least: float, most: float) -> bool:
    """Return whether a value is a number (not a boolean) within bounds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(is_right, value))
