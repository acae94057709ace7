"""Frozen values that are written in files as blocks of keys.

A field made by `key` carries its description, and its annotation carries its kind (`kinds`); pydantic reads both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

_Value = TypeVar("_Value")


def key(description: str, example: Any = None, *, default: Any = None, alias: str = "") -> Any:
    """Return a dataclass field for a key of a file, with the description shown in the JSON Schema.

    `example` also appears in messages. `alias` is the key in the file if it differs from the field's name. Without a
    default (MISSING), the key is required. A mutable default is given as its type; the field then takes part in
    comparisons but not in the hash, so that the value stays hashable.
    """
    told: dict[str, Any] = {"description": description}
    if example is not None:
        told["examples"] = [example]
    if alias:
        told["alias"] = alias
    if isinstance(default, type):
        return field(default_factory=default, hash=False, metadata=told)
    return field(default=default, metadata=told)


def as_in(kind: type[Any], name: str) -> Any:
    """Return a field with the description and default of a field of another class."""
    own = kind.__dataclass_fields__[name]
    return field(default=own.default, default_factory=own.default_factory, hash=own.hash, metadata=own.metadata)


def as_base(kind: type[_Value], value: Any, **changes: Any) -> _Value:
    """Convert a frozen value to its base class `kind`, with some fields changed."""
    return kind(**{own.name: getattr(value, own.name) for own in fields(kind)} | changes)  # type: ignore[arg-type]


def tidied(value: Any, short_key: str) -> Any:
    """Expand the short form of a block into a mapping, and drop keys without a value (null)."""
    if short_key and isinstance(value, str | int) and not isinstance(value, bool):
        return {short_key: str(value)}  # a name may look like a number: `gpu: 4090`
    if isinstance(value, Mapping):
        return {name: content for name, content in value.items() if content is not None}
    return value


class Block:
    """A frozen value that is written in a file as a block of keys; unknown keys are refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    short_key: ClassVar[str] = ""
    """The key that a bare value in place of the block sets: `gpu: h100-sxm-80gb`."""

    def given(self) -> dict[str, Any]:
        """Return the fields whose value is not None."""
        values = {own.name: getattr(self, own.name) for own in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        function = {"type": "no-info", "function": lambda value: tidied(value, cls.short_key)}
        return {"type": "function-before", "function": function, "schema": handler(source)}
