"""Values that YAML changes before the trainer sees them.

LLaMA-Factory reads a file with OmegaConf (`hparams/parser.py::read_args`): PyYAML's loader with YAML 1.1 booleans, but
with a float syntax of its own that includes 2e-5. `to_container` is called without `resolve`, so `${...}` stays text.
HfArgumentParser.parse_dict then checks no types, and any text counts as true.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from topoplan.reading.edits import change
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import texts, word_boolean
from topoplan.specs.secrets import is_secret_name
from topoplan.specs.source import plain_scalar
from topoplan.trainers.llamafactory.key_list import Key
from topoplan.trainers.llamafactory.rules.keys import RENAMED, key_of
from topoplan.trainers.llamafactory.rules.table import RULES
from topoplan.units import quote, shown

_TRUTH = {"true": True, "yes": True, "on": True, "y": True, "false": False, "no": False, "off": False, "n": False}
_NULL_WORDS = frozenset({"null", "Null", "NULL", "None", "none", "nil", "~"})
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_CLOSED = re.compile(r"\$\{[^${}]+\}")

_WORD_FOR_NO = {"report_to": "none"}
"""Key -> the word that disables it, for keys that take text and where the word is not `no`."""
_PRINTED_QUOTES = re.compile(
    "[\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}\N{LEFT SINGLE QUOTATION MARK}]([^\n]+)"
    "[\N{RIGHT DOUBLE QUOTATION MARK}\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}]"
)
_OTHER_COMMAS = re.compile("\\s*[\N{FULLWIDTH COMMA}\N{IDEOGRAPHIC COMMA}\N{FULLWIDTH SEMICOLON};]\\s*")


def findings(setup: Setup) -> Iterator[Finding]:
    """Report bare yes and no, quoted booleans, numbers and nulls, `${`, and typographic quotes."""
    for configuration in setup.of("llamafactory"):
        if configuration.from_command:
            continue  # command lines are not YAML
        for name in configuration.source.data:
            if finding := misread(setup, configuration, name):
                yield finding
        yield from _interpolations(configuration)
        yield from _typographic(configuration)


def misread(setup: Setup, configuration: Configuration, name: str) -> Finding | None:
    """Return the finding on a value that YAML reads differently from what was meant, if any."""
    key, value = key_of(setup, configuration, name), configuration.get(name)
    if configuration.from_command or key is None or not isinstance(value, str):
        return None
    word = word_boolean(configuration, (name,))
    if word is not None:
        return None if "bool" in key.types else _bare_word(configuration, name, key, value, word)
    if "str" in key.types and value not in _NULL_WORDS:
        return None
    lower = value.lower()
    if lower in _TRUTH and "bool" in key.types:
        rule = "yaml-quoted-boolean" if lower in ("true", "false") else "yaml-quoted-boolean.word"
        return _finding(configuration, name, rule, _TRUTH[lower])
    if value in _NULL_WORDS and key.nullable and value not in key.choices and value != _WORD_FOR_NO.get(name):
        return _finding(configuration, name, "yaml-null-text", _WORD_FOR_NO.get(name), value=value)
    if "str" not in key.types and {"int", "float"} & set(key.types) and _NUMBER.fullmatch(value):
        number = float(value.replace("_", ""))
        is_whole = "int" in key.types and number.is_integer()
        return _finding(configuration, name, "yaml-quoted-number", int(number) if is_whole else number)
    return None


def _bare_word(configuration: Configuration, name: str, key: Key, value: str, word: bool) -> Finding:
    off = _WORD_FOR_NO.get(name) or ("no" if "no" in key.choices else None)
    meant = off if off is not None and not word else value.lower()
    rule = "yaml-boolean-word.choice" if "no" in key.choices else "yaml-boolean-word"
    words = {"value": value, "taken": str(word).lower(), "word": word, "choices": ", ".join(key.choices)}
    return _finding(configuration, name, rule, meant, **words)


def _finding(configuration: Configuration, key: str, rule: str, meant: Any, **words: Any) -> Finding:
    written = "null" if meant is None else f'"{meant}"' if isinstance(meant, str) else str(meant).lower()
    return RULES[rule].at(
        configuration,
        key,
        level="warning" if meant is True else "error",  # any text counts as true, which was meant
        text=shown(configuration.get(key)),
        name=RENAMED.get(key, key),
        meant=written,
        edits=change(configuration, (key,), name=RENAMED.get(key, ""), value=meant),
        **words,
    )


def _interpolations(configuration: Configuration) -> Iterator[Finding]:
    for path, text in texts(configuration.source.data):
        if "${" in text and not is_secret_name(str(path[0])):
            is_open = "${" in _CLOSED.sub("", _CLOSED.sub("", text))
            rule = RULES["yaml-interpolation.open" if is_open else "yaml-interpolation"]
            yield rule.at(configuration, path, name=quote(".".join(map(str, path))), text=shown(text))


def _typographic(configuration: Configuration) -> Iterator[Finding]:
    """Report typographic quotes and commas from text editors and input methods, which YAML does not recognize."""
    for key, value in configuration.source.data.items():
        if not isinstance(value, str) or key == "default_system":  # free text
            continue
        if match := _PRINTED_QUOTES.fullmatch(value):
            yield RULES["yaml-typographic"].at(
                configuration,
                key,
                name=quote(key),
                first=value[0],
                last=value[-1],
                meant=quote(match[1]),
                edits=change(configuration, (key,), value=plain_scalar(match[1])),
            )
        elif key in ("dataset", "eval_dataset") and (other := _OTHER_COMMAS.search(value)):
            edits = change(configuration, (key,), value=_OTHER_COMMAS.sub(",", value))
            yield RULES["yaml-typographic.comma"].at(configuration, key, comma=other[0].strip(), edits=edits)
