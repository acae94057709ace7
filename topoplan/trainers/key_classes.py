"""Checks keys and values against classes, one per block: keys that a trainer does not accept, and keys it ignores.

The classes are key lists of the catalog: the fields of each class, with the kind of their value or the class it holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from topoplan.catalog import key_list
from topoplan.errors import nearest
from topoplan.reading.finding import Finding
from topoplan.reading.rules import Rule
from topoplan.reading.setup import Configuration
from topoplan.reading.values import as_number, as_whole, range_missed, texts
from topoplan.specs.source import KeyPath, at, path_of, plain_scalar
from topoplan.units import named, quote, shown

_MISSPELT = 0.85
"""Minimum similarity, from 0 to 1, at which a name counts as a misspelling of another."""
_ONE_LETTER = 0.93
"""Minimum similarity to a registered name for names that users may register too."""
_OFF_AT_MINUS_ONE = ("eval_steps", "save_steps", "logging_steps", "top_k")
_YES_OR_NO = frozenset(["true", "false", "yes", "no", "on", "off", "y", "n", "1", "0"])


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyClasses:
    """The classes of one trainer, and the rules that report on its keys."""

    listed: str
    """Name of the key list."""
    top: str
    """The class of the whole document."""
    unknown: Rule
    others: Rule | None = None
    """Rule for keys that resemble no known one, if another program might read them."""
    wrong: Rule
    removed: Rule | None = None
    ignores_others: bool = False
    """True if other keys are ignored or are variables of the file; only keys close to a known one are then reported."""

    def findings(self, configuration: Configuration) -> Iterator[Finding]:
        """Report faults of single keys."""
        yield from self._block(configuration, (), (self.top,))

    @property
    def _classes(self) -> Mapping[str, Mapping[str, str]]:
        classes: Mapping[str, Mapping[str, str]] = key_list(self.listed)["classes"]
        return classes

    def _block(self, configuration: Configuration, path: KeyPath, classes: tuple[str, ...]) -> Iterator[Finding]:
        block = at(configuration.source.data, path)
        if not isinstance(block, Mapping):
            return
        known: dict[str, str] = {}
        for name in reversed(classes):  # the newest version comes first and overrides the others
            known |= self._classes[name]
        for key, value in block.items():
            place = (*path, key)
            if key not in known:
                yield from self._unknown(configuration, place, known)
                continue
            kind, _, until = known[key].partition(" <")
            if until and self.removed is not None:
                yield self.removed.at(configuration, place, until=until)
            elif finding := self._value(configuration, place, classes[0], kind, value):
                yield finding
            yield from self._inner(configuration, place, kind)

    def _unknown(self, configuration: Configuration, place: KeyPath, known: Mapping[str, str]) -> Iterator[Finding]:
        key, path = str(place[-1]), place[:-1]
        if configuration.from_command and sum(name.startswith(key) for name in known) == 1:
            return  # argparse accepts an unambiguous abbreviation of an option
        remedy = nearest(key, known)
        if self.ignores_others and (
            not get_close_matches(key, known, cutoff=_MISSPELT)
            or re.search(rf"\$\{{{re.escape(key)}\b", configuration.part.text)
        ):
            return
        where = quote(".".join(map(str, path))) if path else "the configuration"
        flag = "--" + key.replace("_", "-")
        rule = self.unknown if remedy or self.others is None else self.others
        yield rule.at(configuration, place, where=where, name=shown(key), flag=flag, remedy=remedy)

    def _inner(self, configuration: Configuration, path: KeyPath, kind: str) -> Iterator[Finding]:
        """Check the value of a key that is a class, or a list or mapping of one."""
        classes = tuple(name for name in re.findall(r"\w+", kind) if name in self._classes)
        if not classes:
            return
        value = at(configuration.source.data, path)
        if kind.startswith("[") and isinstance(value, list):
            for number in range(len(value)):
                yield from self._block(configuration, (*path, number), classes)
        elif kind.startswith("{") and isinstance(value, Mapping):
            for key in value:
                yield from self._block(configuration, (*path, key), classes)
        else:
            yield from self._block(configuration, path, classes)

    def _value(self, configuration: Configuration, path: KeyPath, group: str, kind: str, value: Any) -> Finding | None:
        if value is None or (isinstance(value, str) and ("$" if configuration.from_command else "${") in value):
            return None
        if configuration.from_command and isinstance(value, list) and any("$" in str(one) for one in value):
            return None
        name = f"{group}.{path[-1]}"
        if choices := key_list(self.listed)["choices"].get(name):
            return self._choice(configuration, path, name, choices, value)
        read = plain_scalar(value) if isinstance(value, str) else value
        fits = {
            "int": as_whole(read) is not None and not isinstance(read, float),
            "float": as_number(read) is not None,
            "bool": isinstance(read, bool) or str(value).lower() in _YES_OR_NO,
            "str": not isinstance(value, list | Mapping) and not (configuration.from_command and value is True),
            "switch": kind != "switch" or not self._value_of_a_switch(configuration, path),
        }
        if fits.get(kind, True):
            return self._range(configuration, path, read)
        wanted = {
            "int": "a whole number",
            "float": "a number",
            "bool": "true or false",
            "str": "text",
            "switch": "no value: it is a switch",
        }[kind]
        return self.wrong.at(configuration, path, value=shown(value), wanted=wanted, close="")

    def _range(self, configuration: Configuration, path: KeyPath, value: Any) -> Finding | None:
        bounds = key_list("ranges")["ranges"].get(path[-1]) if path[-1] not in _OFF_AT_MINUS_ONE else None
        if not (missed := range_missed(bounds, value)):
            return None
        return self.wrong.at(configuration, path, value=shown(value), wanted=f"a number {missed}", close="")

    @staticmethod
    def _value_of_a_switch(configuration: Configuration, path: KeyPath) -> bool:
        """Whether a flag that takes no value is given one: `--bf16 true`, where argparse refuses the extra word."""
        flag = str(path[-1]).replace("_", "[-_]")
        lines = configuration.part.text.split("\n")
        return re.search(rf"--{flag}[ =]+[^-\s\\#;&|<>\"'$`)]", lines[(configuration.line(*path) or 1) - 1]) is not None

    def _choice(
        self, configuration: Configuration, path: KeyPath, name: str, choices: list[str], value: Any
    ) -> Finding | None:
        listed = choices if configuration.from_command else [choice.lower() for choice in choices]
        close = nearest(str(value), choices)
        document = key_list(self.listed)
        if name in document.get("registered", ()):
            is_meant = not get_close_matches(str(value), choices, cutoff=_ONE_LETTER)
        else:
            is_meant = name in document["open"] and not close
        if str(value) in listed or str(value).lower() in listed or is_meant:
            return None
        wanted = f"one of {', '.join(choices)}"
        close = f"; {close}" if close else ""
        return self.wrong.at(configuration, path, value=shown(value), wanted=wanted, close=close)


def newer_keys(configuration: Configuration, since: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield per version: the first of its keys in a configuration, a phrase like `a, b and c need`, and the version."""
    by_version: dict[str, list[str]] = {}
    for key in configuration.source.data:
        if key in since:
            by_version.setdefault(since[key], []).append(key)
    for version, keys in by_version.items():
        yield keys[0], f"{named(keys, 4)} {'needs' if len(keys) == 1 else 'need'}", version


_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")


def undefined(configuration: Configuration, rule: Rule) -> Iterator[Finding]:
    """Report OmegaConf references `${a.b}` to missing keys, except in a file composed of several (`defaults:`)."""
    data = configuration.source.data
    if "defaults" in data or configuration.part.is_excerpt:
        return
    for path, text in texts(data):
        for name in _REFERENCE.findall(text):
            *block, key = path_of(name)
            held = at(data, tuple(block))
            if not isinstance(held, dict) or key not in held:
                yield rule.at(configuration, path, name=quote(name))
