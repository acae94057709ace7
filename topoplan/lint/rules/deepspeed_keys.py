"""Keys and values that DeepSpeed refuses or does not read.

Sources: DeepSpeed 0.19 `runtime/config.py`, `runtime/config_utils.py` (blocks forbid unknown keys, and drop "auto"),
`runtime/zero/config.py`, `runtime/zero/offload_config.py`; transformers 5.6.0 `integrations/deepspeed.py` (fill_match).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from topoplan.errors import nearest
from topoplan.lint.rules.deepspeed_document import ZERO, Document
from topoplan.reading.edits import change, drop
from topoplan.reading.finding import Finding
from topoplan.reading.values import as_number, as_whole
from topoplan.specs.source import KeyPath, plain_scalar
from topoplan.units import shown

_DEVICES = ("none", "cpu", "nvme")
_BOOLEAN_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "t", "f", "y", "n", "0", "1"})
"""pydantic's."""


@cache
def _known() -> Mapping[str, Any]:
    path = files("topoplan.catalog").joinpath("trainer_keys", "deepspeed.json")
    document: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def key_findings(document: Document) -> Iterator[Finding]:
    """What is wrong with each key alone."""
    known = _known()
    for key in document.data:
        if key not in known["top"] and not str(key).startswith(("_", "//")):  # a comment, as JSON has none
            yield document.finding(
                "unknown-key",
                "warning",
                (key,),
                f"DeepSpeed has no key {shown(key)}, and does not read it",
                remedy=nearest(key, known["top"]) or "take it out",
                edits=() if nearest(key, known["top"]) else drop(document.holder, (*document.path, key)),
            )
    for name, fields in known["blocks"].items():
        path: KeyPath = tuple(name.split("."))
        block = document.get(*path)
        if block is None or (name == ZERO and isinstance(block, bool)):
            continue
        if not isinstance(block, Mapping):
            yield document.finding(
                "wrong-value",
                "error",
                path,
                f"{name} is {shown(block)}",
                remedy="expected a block of keys" + (', such as {"device": "cpu"}' if "offload" in name else ""),
            )
            continue
        for key, value in block.items():
            yield from _field(document, name, (*path, key), fields, value)


def _field(document: Document, block: str, path: KeyPath, fields: Mapping[str, str], value: Any) -> Iterator[Finding]:
    key = str(path[-1])
    if key not in fields:
        refuses = block != "activation_checkpointing"
        yield document.finding(
            "unknown-key",
            "error" if refuses else "warning",
            path,
            f"{block} has no key {shown(key)}, and {'the configuration is refused' if refuses else 'it is not read'}",
            remedy=nearest(key, fields) or "take it out",
        )
        return
    new = _known()["deprecated"].get(key)
    if new is not None:
        edits = change(document.holder, (*document.path, *path), name=new) if new.startswith("stage3_") else ()
        what = f"{key} is deprecated: {new} has taken its place"
        yield document.finding("deprecated-key", "note", path, what, remedy=f"write {new}", edits=edits)
    if block != "activation_checkpointing" and (expected := _unfit(key, fields[key], value)):
        meant = plain_scalar(value) if isinstance(value, str) and fields[key] == "int" else None
        fits = isinstance(meant, int | float) and not isinstance(meant, bool) and float(meant).is_integer()
        yield document.finding(
            "wrong-value",
            "error",
            path,
            f"{block}.{key} is {shown(value)}",
            why="DeepSpeed checks the type when it starts",
            remedy=f"expected {expected}",
            edits=change(document.holder, (*document.path, *path), value=int(meant)) if fits and meant else (),
        )


def _unfit(key: str, kind: str, value: Any) -> str:
    """What was expected in place of a value that pydantic refuses; empty where it takes it."""
    if value is None or value == "auto" or (isinstance(value, bool) and kind in ("bool", "int", "float")):
        return ""
    if key == "stage":
        return "" if as_whole(value) in (0, 1, 2, 3) else "0, 1, 2 or 3"
    if key == "device":
        return "" if value in _DEVICES else "none, cpu or nvme"
    if kind == "bool":
        taken = value in (0, 1) if isinstance(value, int | float) else isinstance(value, str)
        words = not isinstance(value, str) or value.lower() in _BOOLEAN_WORDS
        return "" if taken and words else "true or false"
    if kind in ("int", "float"):
        if isinstance(value, str):
            return "" if value.strip().lstrip("+-").isdigit() or kind == "float" else "a number, without quotes"
        fits = as_whole(value) is not None if kind == "int" else as_number(value) is not None
        return "" if fits else "a whole number" if kind == "int" else "a number"
    if kind == "dict":
        told = key in ("offload_param", "offload_optimizer")  # as blocks of their own
        return "" if told or isinstance(value, Mapping) else "a block of keys"
    return "" if isinstance(value, str) else "text"
