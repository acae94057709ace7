"""Convert frozen values to plain documents, for `--json`. Fractions are rounded as in `planner/view.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from topoplan.planner.view import rounded
from topoplan.terms import Term


def plain(value: Any) -> Any:
    """Convert a value to JSON types: a dataclass to its fields, a term to its description and its children."""
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, Term):
        return _term(value)
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def picked(value: Any, keys: str) -> dict[str, Any]:
    """Return some attributes of a value: `picked(flow, "name ranks=shape.size")` has the keys `name` and `ranks`."""
    pairs = (key.partition("=") for key in keys.split())
    return {name: plain(attrgetter(attribute or name)(value)) for name, _, attribute in pairs}


def _term(term: Term) -> dict[str, Any]:
    view = picked(term, "name value unit")
    if term.what:
        view["what"] = term.what
    if term.times != 1:
        view["times"] = plain(term.times)
    view |= plain(term.facts)
    view["source"] = term.source
    if term.children:
        view["children"] = plain(term.children)
    return view
