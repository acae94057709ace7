"""Keys and values that Trinity-RFT does not take: OmegaConf holds a file against the classes of `common/config.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.catalog import key_list
from topoplan.errors import nearest
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Configuration
from topoplan.reading.values import as_number, as_whole, at
from topoplan.specs.source import KeyPath, plain_scalar
from topoplan.trainers.trinity.table import RULES
from topoplan.units import quote, shown

_TOP = "Config"
_YES_OR_NO = frozenset(["true", "false", "yes", "no", "on", "off", "y", "n", "1", "0"])


def key_findings(configuration: Configuration) -> Iterator[Finding]:
    """What is wrong with each key by itself."""
    yield from _block(configuration, (), (_TOP,))


def _block(configuration: Configuration, path: KeyPath, classes: tuple[str, ...]) -> Iterator[Finding]:
    block = at(configuration.source.data, path)
    if not isinstance(block, Mapping):
        return
    known: dict[str, str] = {}
    for name in reversed(classes):  # the newest version's last
        known |= key_list("trinity")["classes"][name]
    for key, value in block.items():
        place = (*path, key)
        if key not in known:
            where = quote(".".join(map(str, path))) if path else "the configuration"
            remedy = nearest(str(key), known)
            yield RULES["trinity-unknown-key"].at(configuration, place, where=where, name=shown(key), remedy=remedy)
            continue
        kind, _, until = known[key].partition(" <")
        if until:
            yield RULES["trinity-removed-key"].at(configuration, place, until=until)
        elif finding := _value(configuration, place, classes[0], kind, value):
            yield finding
        yield from _inner(configuration, place, kind)


def _inner(configuration: Configuration, path: KeyPath, kind: str) -> Iterator[Finding]:
    """What a key holds: a class, or a list or a mapping of one."""
    classes = tuple(name for name in re.findall(r"\w+", kind) if name in key_list("trinity")["classes"])
    if not classes:
        return
    value = at(configuration.source.data, path)
    if kind.startswith("[") and isinstance(value, list):
        for number in range(len(value)):
            yield from _block(configuration, (*path, number), classes)
    elif kind.startswith("{") and isinstance(value, Mapping):
        for key in value:
            yield from _block(configuration, (*path, key), classes)
    else:
        yield from _block(configuration, path, classes)


def _value(configuration: Configuration, path: KeyPath, group: str, kind: str, value: Any) -> Finding | None:
    if value is None or (isinstance(value, str) and "${" in value):
        return None
    name = f"{group}.{path[-1]}"
    if choices := key_list("trinity")["choices"].get(name):
        return _choice(configuration, path, name, choices, value)
    read = plain_scalar(value) if isinstance(value, str) else value
    fits = {
        "int": as_whole(read) is not None and not isinstance(read, float),
        "float": as_number(read) is not None,
        "bool": isinstance(read, bool) or str(value).lower() in _YES_OR_NO,
        "str": not isinstance(value, list | Mapping),
    }
    if fits.get(kind, True):
        return None
    wanted = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}[kind]
    return RULES["trinity-wrong-value"].at(configuration, path, value=shown(value), wanted=wanted, close="")


def _choice(configuration: Configuration, path: KeyPath, name: str, choices: list[str], value: Any) -> Finding | None:
    close = nearest(str(value).lower(), choices)
    is_open = name in key_list("trinity")["open"]
    if str(value).lower() in choices or (is_open and not close):
        return None
    wanted = f"one of {', '.join(choices)}"
    close = f"; {close}" if close else ""
    return RULES["trinity-wrong-value"].at(configuration, path, value=shown(value), wanted=wanted, close=close)
