"""Keys and values that DeepSpeed refuses or ignores.

Sources: DeepSpeed 0.19 `runtime/config.py`, `runtime/config_utils.py` (blocks forbid unknown keys and drop "auto"),
`runtime/zero/config.py`, `runtime/zero/offload_config.py`; transformers 5.6.0 `integrations/deepspeed.py` (fill_match).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.catalog import key_list
from topoplan.errors import misspelt, nearest
from topoplan.lint.rules.deepspeed_document import ZERO, Document
from topoplan.reading.edits import change, drop
from topoplan.reading.finding import Finding
from topoplan.reading.values import as_number, as_whole, range_missed
from topoplan.specs.source import KeyPath, plain_scalar
from topoplan.units import shown

_DEVICES = ("none", "cpu", "nvme")
_READ_BY_HAND = ("activation_checkpointing", "flops_profiler", "aio")
"""Blocks from which DeepSpeed takes what it knows, of any type."""
_BOOLEAN_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "t", "f", "y", "n", "0", "1"})
"""Strings that pydantic accepts as booleans."""


def key_findings(document: Document) -> Iterator[Finding]:
    """Report faults of single keys."""
    known = key_list("deepspeed")
    for key, value in document.data.items():
        if expected := _unfit(key, known["top"].get(key, ""), value):
            yield document.finding("wrong-value.top", (key,), value=shown(value), expected=expected)
        if key not in known["top"] and not str(key).startswith(("_", "//")):  # such keys serve as comments in JSON
            close = nearest(key, known["top"])
            edits = () if close else drop(document.holder, (*document.path, key))
            yield document.finding("unknown-key", (key,), name=shown(key), remedy=close, edits=edits)
    for place, choices in known["choices"].items():
        block, _, key = place.rpartition(".")
        path: KeyPath = (block, key) if block else (key,)
        value = document.get(*path)
        if isinstance(value, str) and value.lower() not in {choice.lower() for choice in choices}:
            expected = nearest(value, choices) or f"one of {', '.join(choices)}"
            yield document.finding(
                "wrong-value", path, block=block or "the document", value=shown(value), expected=expected
            )
    yield from _parameters(document)
    for name, fields in known["blocks"].items():
        path = tuple(name.split("."))
        block = document.get(*path)
        if block is None or (name == ZERO and isinstance(block, bool)):
            continue
        if isinstance(block, Mapping):
            for key, value in block.items():
                yield from _field(document, name, (*path, key), fields, value)
        else:
            example = ', such as {"device": "cpu"}' if "offload" in name else ""
            yield document.finding("wrong-value.block", path, name=name, value=shown(block), example=example)


def _parameters(document: Document) -> Iterator[Finding]:
    """Report parameters that the optimizer or the scheduler does not take, which Python refuses."""
    for block, takes in key_list("deepspeed")["params"].items():
        known, given = takes.get(str(document.get(block, "type"))), document.get(block, "params")
        for key in given if known and isinstance(given, Mapping) else ():
            if key not in known:
                path: KeyPath = (block, "params", key)
                name = f"{block} {document.get(block, 'type')}"
                yield document.finding(
                    "unknown-key.block", path, block=name, name=shown(key), remedy=nearest(key, known)
                )


def _field(document: Document, block: str, path: KeyPath, fields: Mapping[str, str], value: Any) -> Iterator[Finding]:
    key, is_checked = str(path[-1]), block not in _READ_BY_HAND
    if key not in fields:
        rule = "unknown-key.block" if is_checked else "unknown-key.activations"
        name = misspelt(key, fields) if is_checked else ""  # a key that is not read must not take effect
        edits = change(document.holder, (*document.path, *path), name=name) if name else ()
        yield document.finding(rule, path, block=block, name=shown(key), remedy=nearest(key, fields), edits=edits)
        return
    new = key_list("deepspeed")["deprecated"].get(key)
    if new is not None:
        edits = change(document.holder, (*document.path, *path), name=new) if new.startswith("stage3_") else ()
        yield document.finding("deprecated-key", path, new=new, edits=edits)
    if is_checked and (expected := _unfit(key, fields[key], value)):
        meant = plain_scalar(value) if isinstance(value, str) and fields[key] == "int" else None
        fits = isinstance(meant, int | float) and not isinstance(meant, bool) and float(meant).is_integer()
        edits = change(document.holder, (*document.path, *path), value=int(meant)) if fits and meant else ()
        yield document.finding("wrong-value", path, block=block, value=shown(value), expected=expected, edits=edits)


def _unfit(key: str, kind: str, value: Any) -> str:
    """Return what pydantic expects in place of a value; empty if it accepts the value."""
    if not kind or value is None or value == "auto" or (isinstance(value, bool) and kind in ("bool", "int", "float")):
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
        kind_of = "a whole number" if kind == "int" else "a number"
        missed = range_missed(key_list("deepspeed")["ranges"].get(key), value)
        return kind_of if not fits else f"{kind_of} {missed}" if missed else ""
    if kind == "dict":
        told = key in ("offload_param", "offload_optimizer")  # checked as blocks of their own
        return "" if told or isinstance(value, Mapping) else "a block of keys"
    return "" if isinstance(value, str) else "text"
