"""What YAML makes of a value before the trainer sees it.

LLaMA-Factory reads a file with OmegaConf (`hparams/parser.py::read_args`): PyYAML's loader with its YAML 1.1 booleans,
and a float of its own, so that 2e-5 is a number. `to_container` is called without `resolve`: `${...}` stays text. Then
HfArgumentParser.parse_dict checks no type, and any text counts as true.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from topoplan.reading.edits import change
from topoplan.reading.finding import Finding
from topoplan.reading.found import found
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import texts, word_boolean
from topoplan.specs.secrets import is_secret_name
from topoplan.specs.source import plain_scalar
from topoplan.trainers.llamafactory.key_list import Key
from topoplan.trainers.llamafactory.rules.keys import RENAMED, key_of
from topoplan.units import quote, shown

_TRUTH = {"true": True, "yes": True, "on": True, "y": True, "false": False, "no": False, "off": False, "n": False}
_NULL_WORDS = frozenset({"null", "Null", "NULL", "None", "none", "nil", "~"})
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_CLOSED = re.compile(r"\$\{[^${}]+\}")

_WORD_FOR_NO = {"report_to": "none"}
"""What switches a key off that takes text, where it is not `no`."""


def findings(setup: Setup) -> Iterator[Finding]:
    """Lost line breaks; bare yes and no, quoted booleans, numbers and nulls, and `${`."""
    for configuration in setup.configurations:
        if configuration.part.unfolded and not configuration.from_command:
            yield _lost_line_breaks(configuration)
    for configuration in setup.of("llamafactory"):
        if configuration.from_command:
            continue  # no YAML is read
        for name in configuration.source.data:
            if finding := misread(setup, configuration, name):
                yield finding
        yield from _interpolations(configuration)
        yield from _typographic(configuration)


def _lost_line_breaks(configuration: Configuration) -> Finding:
    """Of a block in a page nobody would think that it can be read so; a file somebody means to use."""
    part = configuration.part
    return Finding(
        rule="yaml-lost-line-breaks",
        severity="note" if part.label else "error",
        part=part,
        line=1,
        what=f"{len(configuration.source.data)} keys stand on one line: line breaks were lost, and are put back here",
        why="YAML ends a value at the end of its line, and takes all behind a # for a comment",
        remedy="write each key on a line of its own",
    )


def misread(setup: Setup, configuration: Configuration, name: str) -> Finding | None:
    """What is wrong where YAML makes something else of the value of a key than was meant."""
    key, value = key_of(setup, configuration, name), configuration.get(name)
    if configuration.from_command or key is None or not isinstance(value, str):
        return None
    return _judged(configuration, name, key, value)


def _judged(configuration: Configuration, name: str, key: Key, value: str) -> Finding | None:
    word = word_boolean(configuration, (name,))
    if word is not None:
        return None if "bool" in key.types else _bare_word(configuration, name, key, value, word)
    if "str" in key.types and value not in _NULL_WORDS:
        return None
    if value.lower() in _TRUTH and "bool" in key.types:
        return _finding(
            configuration,
            name,
            "yaml-quoted-boolean",
            f"{name}: {shown(value)} is text, and any text counts as true",
            why="the parser checks no types" if value.lower() in ("true", "false") else _WHY_TEXT,
            meant=_TRUTH[value.lower()],
        )
    if value in _NULL_WORDS and key.nullable and value not in key.choices and value != _WORD_FOR_NO.get(name):
        return _finding(
            configuration,
            name,
            "yaml-null-text",
            f"{name}: {value} is the text {shown(value)}, not the absence of a value",
            why="YAML's word for nothing is null, without quotes",
            meant=_WORD_FOR_NO.get(name),
        )
    if "str" not in key.types and {"int", "float"} & set(key.types) and _NUMBER.fullmatch(value):
        meant: Any = float(value.replace("_", ""))
        whole = "int" in key.types and meant.is_integer()
        return _finding(
            configuration,
            name,
            "yaml-quoted-number",
            f"{name}: {shown(value)} is text, not a number",
            why="the parser checks no types, and the trainer fails where it calculates with it",
            meant=int(meant) if whole else meant,
        )
    return None


_WHY_TEXT = "only a bare yes, no, on, off, true or false is a boolean, and the parser checks no types"


def _bare_word(configuration: Configuration, name: str, key: Key, value: str, word: bool) -> Finding:
    taken = str(word).lower()
    off = _WORD_FOR_NO.get(name) or ("no" if "no" in key.choices else None)
    meant = off if off is not None and not word else value.lower()
    why = f"YAML 1.1 takes the bare word {value} for {taken}"
    if "no" in key.choices:
        why += f", and the parser stops with '{word} is not a valid' value of its list ({', '.join(key.choices)})"
    rule, what = "yaml-boolean-word", f"{name}: {value} is the boolean {taken}, not text"
    return _finding(configuration, name, rule, what, why=why, meant=meant)


def _finding(configuration: Configuration, name: str, rule: str, what: str, *, why: str, meant: Any) -> Finding:
    written = "null" if meant is None else f'"{meant}"' if isinstance(meant, str) else str(meant).lower()
    new_name = RENAMED.get(name, name)
    return found(
        configuration,
        rule,
        "warning" if meant is True else "error",  # text that counts as the true that was meant
        name,
        what,
        why=why,
        remedy=f"write {new_name}: {written}",
        edits=change(configuration, (name,), name=RENAMED.get(name, ""), value=meant),
    )


def _interpolations(configuration: Configuration) -> Iterator[Finding]:
    for path, text in texts(configuration.source.data):
        if "${" not in text or is_secret_name(str(path[0])):
            continue
        name = quote(".".join(map(str, path)))
        broken = "${" in _CLOSED.sub("", _CLOSED.sub("", text))
        yield found(
            configuration,
            "yaml-interpolation",
            "error",
            path,
            f"{name} holds a '${{' without its end, which OmegaConf refuses"
            if broken
            else f"{name} holds {shown(text)}, which stays as it stands",
            why="LLaMA-Factory reads the file with OmegaConf and never fills in ${...}, not even ${oc.env:...}",
            remedy="write the value itself",
        )


def _typographic(configuration: Configuration) -> Iterator[Finding]:
    """Quotes and commas as text editors and input methods put them in place of those that YAML and the parser know."""
    for name, value in configuration.source.data.items():
        if not isinstance(value, str) or name == "default_system":  # a text of its own
            continue
        if match := _PRINTED_QUOTES.fullmatch(value):
            yield found(
                configuration,
                "yaml-typographic",
                "error",
                name,
                f"{quote(name)}: {value[0]} and {value[-1]} are no quotes of YAML, and become a part of the value",
                remedy=f"write {name}: {quote(match[1])}",
                edits=change(configuration, (name,), value=plain_scalar(match[1])),
            )
        elif name in ("dataset", "eval_dataset") and (other := _OTHER_COMMAS.search(value)):
            yield found(
                configuration,
                "yaml-typographic",
                "error",
                name,
                f"{name}: {other[0].strip()} separates no data sets",
                why="data/parser.py looks the whole text up in dataset_info.json; the names are split at a plain comma",
                remedy="write a comma",
                edits=change(configuration, (name,), value=_OTHER_COMMAS.sub(",", value)),
            )


_PRINTED_QUOTES = re.compile(
    "[\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}\N{LEFT SINGLE QUOTATION MARK}]([^\n]+)"
    "[\N{RIGHT DOUBLE QUOTATION MARK}\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}]"
)
_OTHER_COMMAS = re.compile("\\s*[\N{FULLWIDTH COMMA}\N{IDEOGRAPHIC COMMA}\N{FULLWIDTH SEMICOLON};]\\s*")
