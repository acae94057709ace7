"""Frozen values that people write as blocks of keys.

A field made by `key` says what its key means, and its annotation what it may hold (`kinds`); pydantic reads both.
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
    """A field of a frozen value that people write, with what it means, for the schema that an editor reads.

    The example is for messages too, and `alias` is the key that is written where the field has another name. Without a
    default (MISSING) it is required; a mutable default is given as its type, and then the field counts in comparisons
    alone: the value that holds it can be hashed all the same.
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
    """A field with the meaning and the default that it has in another class."""
    own = kind.__dataclass_fields__[name]
    return field(default=own.default, default_factory=own.default_factory, hash=own.hash, metadata=own.metadata)


def as_base(kind: type[_Value], value: Any, **changes: Any) -> _Value:
    """A frozen value as one of the class that its own extends, with some fields changed."""
    return kind(**{own.name: getattr(value, own.name) for own in fields(kind)} | changes)  # type: ignore[arg-type]


def tidied(value: Any, short_key: str) -> Any:
    """What stands for a block, as its keys with their values. A key without a value (null) counts as left out."""
    if short_key and isinstance(value, str | int) and not isinstance(value, bool):
        return {short_key: str(value)}  # `gpu: 4090` is a name too
    if isinstance(value, Mapping):
        return {name: content for name, content in value.items() if content is not None}
    return value


class Block:
    """A frozen value that people write as a block of keys, of which no other is accepted."""

    __slots__ = ()
    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    short_key: ClassVar[str] = ""
    """The key that a bare text in place of the block stands for: `gpu: h100-sxm-80gb`."""

    def given(self) -> dict[str, Any]:
        """The fields that have a value."""
        values = {own.name: getattr(self, own.name) for own in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        function = {"type": "no-info", "function": lambda value: tidied(value, cls.short_key)}
        return {"type": "function-before", "function": function, "schema": handler(source)}
