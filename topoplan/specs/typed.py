"""Frozen dataclasses from JSON: each field in its declared type, and nothing converted, so that they are written alike.

pydantic could fill them too, but makes floats of whole numbers, and knows neither lines nor what may be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from topoplan.errors import SpecError, nearest
from topoplan.specs.forms import Form
from topoplan.specs.mistakes import check_form, dotted
from topoplan.specs.source import KeyPath, Source
from topoplan.units import shown

_Value = TypeVar("_Value")
_Form = TypeVar("_Form", bound=Form)
_LARGEST = 10**18
_SMALLEST = 1e-12
"""Of a number above zero. Real figures are far within these two, and what is multiplied from them stays finite."""
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class Reader:
    """Values of one document in the types of dataclasses. Every method raises SpecError with the line and the key."""

    def __init__(
        self,
        source: Source,
        *,
        special: Mapping[type, Callable[[Reader, Any, KeyPath], Any]],
        ranges: Mapping[tuple[type, str], tuple[float, float]],
        kinds: Mapping[type, str],
    ) -> None:
        """`special` reads dataclasses whose form has not simply their fields, `ranges` are those of (class, field).

        `kinds` are the words under `kind` that tell the members of a union apart.
        """
        self._source, self._special, self._ranges, self._kinds = source, special, ranges, kinds

    def fail(self, path: KeyPath, what: str, *, expected: str = "", remedy: str = "") -> NoReturn:
        """Raise a SpecError at a key."""
        raise SpecError(
            f"{dotted(path)}: {what}" if path else what,
            where=self._source.place(path),
            expected=expected,
            remedy=remedy,
        )

    def read(self, kind: type[_Value], value: Any, path: KeyPath) -> _Value:
        """`value`, which stands at `path`, as an instance of a dataclass."""
        found: _Value = (
            self._special[kind](self, value, path) if kind in self._special else self.block(kind, value, path)
        )
        return found

    def block(self, kind: type[_Value], value: Any, path: KeyPath, *, read: Mapping[str, Any] | None = None) -> _Value:
        """An instance of a dataclass from its fields; those with a default may be missing. `read` are known already."""
        data, known = self.mapping(value, path), read or {}
        types = _types(kind)  # type: ignore[arg-type]  # a class is hashable
        given = dict(known)
        for name in data:
            if name in known:
                continue
            if name not in types:
                self.unknown(path, name, types)
            field, hint = types[name]
            given[name] = self._value(hint, data[name], (*path, name))
            self._check_range(kind, field, given[name], (*path, name))
        for name, (field, _) in types.items():
            if name not in given and field.default is MISSING and field.default_factory is MISSING:
                self.missing(path, name)
        return kind(**given)

    def mapping(self, value: Any, path: KeyPath) -> Mapping[str, Any]:
        """A JSON object."""
        if not isinstance(value, Mapping):
            self.fail(path, f"{shown(value)} is not a block of keys", expected="expected a JSON object")
        return value

    def items(self, value: Any, path: KeyPath) -> list[Any]:
        """A JSON array."""
        if not isinstance(value, list):
            self.fail(path, f"{shown(value)} is not a list", expected="expected a JSON array")
        return value

    def whole(self, value: Any, path: KeyPath, most: int) -> int:
        """A whole number from 1 to `most`."""
        expected = f"expected a whole number from 1 to {most}"
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            self.fail(path, shown(value), expected=expected)
        return value

    def check_form(self, form: type[_Form], data: Mapping[str, Any], path: KeyPath) -> _Form:
        """Hold what stands at `path` to the limits of a form of the spec file."""
        return check_form(form, data, lambda inside: self._source.place((*path, *inside)))

    def derived(self, data: Mapping[str, Any], path: KeyPath, expected: Mapping[str, Any]) -> None:
        """Refuse a key, beside those that are read, that says other than what follows from them."""
        for key, value in expected.items():
            if data.get(key, value) != value:
                self.fail(
                    (*path, key),
                    f"{shown(data[key])} does not agree with its block",
                    expected=f"expected {shown(value)}",
                )

    def missing(self, path: KeyPath, key: str, *, remedy: str = "") -> NoReturn:
        """Refuse a block without a key."""
        block = f" in `{dotted(path)}`" if path else ""
        raise SpecError(f"`{key}` is missing{block}", where=self._source.place(path), remedy=remedy)

    def unknown(self, path: KeyPath, key: str, known: Mapping[str, Any]) -> NoReturn:
        """Refuse a key."""
        block = f" in `{dotted(path)}`" if path else ""
        raise SpecError(
            f"unknown key {shown(key)}{block}", where=self._source.place((*path, key)), remedy=nearest(key, known)
        )

    def _value(self, hint: Any, value: Any, path: KeyPath) -> Any:
        origin, arguments = get_origin(hint), get_args(hint)
        if hint is Any:
            return value
        if origin in (Union, UnionType):
            return self._one_of(arguments, value, path)
        if origin is Literal:
            if value not in arguments:
                self.fail(path, shown(value), expected=f"expected {' or '.join(map(str, arguments))}")
            return value
        if origin is tuple:
            items = self.items(value, path)
            return tuple(self._value(arguments[0], item, (*path, index)) for index, item in enumerate(items))
        if origin is Mapping:
            block = self.mapping(value, path)
            return {key: self._value(arguments[1], item, (*path, key)) for key, item in block.items()}
        if is_dataclass(hint) and isinstance(hint, type):
            return self.read(hint, value, path)
        # A whole number is a number too; true is neither.
        accepted = (int, float) if hint is float else hint
        if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
            self.fail(path, f"{shown(value)} is not {_WORDS[hint]}")
        return value

    def _one_of(self, hints: tuple[Any, ...], value: Any, path: KeyPath) -> Any:
        others = [hint for hint in hints if hint is not NoneType]
        if value is None and len(others) < len(hints):
            return None
        if len(others) == 1:
            return self._value(others[0], value, path)
        if not any(is_dataclass(hint) for hint in others):
            if type(value) not in others:
                self.fail(path, f"{shown(value)} is not {' or '.join(_WORDS[hint] for hint in others)}")
            return value
        data = dict(self.mapping(value, path))
        words = {self._kinds[hint]: hint for hint in others}
        word = data.pop("kind", None)
        if not isinstance(word, str) or word not in words:
            self.fail((*path, "kind"), shown(word), expected=f"expected {' or '.join(words)}")
        return self.read(words[word], data, path)

    def _check_range(self, kind: type, field: Field[Any], value: Any, path: KeyPath) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        lowest, highest = self._ranges.get((kind, field.name), (_SMALLEST, _LARGEST))
        if lowest == _SMALLEST and field.default == 0:
            lowest = 0
        if not lowest <= value <= highest:
            above = "above 0" if lowest == _SMALLEST else f"from {lowest:g}"
            self.fail(path, f"{shown(value)} is out of range", expected=f"expected a number {above} up to {highest:g}")


@cache
def _types(kind: type) -> Mapping[str, tuple[Field[Any], Any]]:
    """Name -> field and type of a dataclass."""
    hints = get_type_hints(kind)
    return {field.name: (field, hints[field.name]) for field in fields(kind)}
