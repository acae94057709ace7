"""Arguments that ms-swift's commands refuse.

Sources, at ms-swift 4.6.0: `swift/arguments/`, `swift/megatron/arguments/`, `swift/trainers/arguments.py`, and
`swift/pipelines/base.py`, which refuses unknown arguments. Its parser is argparse (HfArgumentParser), which accepts
unambiguous abbreviations of options.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.catalog import key_list
from topoplan.errors import nearest
from topoplan.reading.edits import change, corrected_name, drop
from topoplan.reading.finding import Finding
from topoplan.reading.processes import launch_of
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import as_number, range_missed
from topoplan.specs.secrets import secrets_in
from topoplan.trainers.key_classes import newer_keys
from topoplan.trainers.swift.arguments import COMMANDS, Command, arguments_of, swift_versions
from topoplan.trainers.swift.rules.table import RULES
from topoplan.units import quote, shown

_OWN_RANGE = ("eval_steps", "warmup_ratio")
"""Arguments whose range is ms-swift's own: eval_steps -1 disables evaluation, and warmup_ratio has a rule."""


def command_of(setup: Setup, configuration: Configuration) -> Command:
    """Return the command that reads a configuration; one with an rlhf_type is for `swift rlhf`."""
    if configuration.trainer == "swift-megatron":
        return "megatron sft"
    launch = launch_of(setup, configuration)
    words = (launch.program.rpartition(".")[2], *launch.arguments[:1]) if launch else ()
    if {"sft", "pt"} & {*words}:
        return "swift sft"
    return "swift rlhf" if "rlhf" in words or configuration.get("rlhf_type") is not None else "swift sft"


def argument_findings(configuration: Configuration, command: Command) -> Iterator[Finding]:
    """Report faults of single arguments."""
    known = arguments_of(command)
    since = {name: entry["since"] for name, entry in known.types.items() if entry and "since" in entry}
    for key, needs, newer in newer_keys(configuration, since):
        oldest = swift_versions()[0]
        yield RULES["swift-new-argument"].at(configuration, key, needs=needs, version=newer, oldest=oldest)
    for key, value in configuration.source.data.items():
        if key in known.types or (key == "ENV" and not configuration.from_command):
            if any(secrets_in({key: value})):
                yield RULES["swift-secret"].at(configuration, key)
            elif finding := _wrong_value(configuration, key, known.types.get(key)):
                yield finding
            continue
        if key == "config" and configuration.get("use_ray"):
            continue  # swift/ray/megatron/pipeline.py reads it before the parser
        if configuration.from_command and sum(name.startswith(key) for name in known.types) == 1:
            continue
        if key in known.renamed:
            new = known.renamed[key]
            edits = change(configuration, (key,), name=new)
            if new in configuration.source.data:
                edits = drop(configuration, (key,)) if configuration.get(new) == value else ()
            yield RULES["swift-renamed-argument"].at(configuration, key, new=new, edits=edits)
        else:
            yield _unknown(configuration, key, command)


def _unknown(configuration: Configuration, key: str, command: Command) -> Finding:
    known, argument = arguments_of(command), quote(key)
    if key in known.gone:
        return RULES["swift-unknown-argument.gone"].at(configuration, key, argument=argument)
    close = nearest(key, known.types)
    others = [one for one in COMMANDS if one != command and key in arguments_of(one).types]
    if others:
        rule = RULES["swift-unknown-argument.other"]
        return rule.at(configuration, key, argument=argument, other=others[0], command=command, remedy=close)
    rule, version = RULES["swift-unknown-argument"], swift_versions()[-1]
    edits = corrected_name(configuration, key)
    return rule.at(configuration, key, argument=argument, command=command, version=version, remedy=close, edits=edits)


def _wrong_value(configuration: Configuration, key: str, entry: Mapping[str, Any] | None) -> Finding | None:
    """Report values that argparse refuses: invalid choices, or text in place of a number."""
    value = configuration.get(key)
    found = _number(value) if isinstance(value, str) else as_number(value)
    bounds = key_list("ranges")["ranges"].get(key) if key not in _OWN_RANGE else None
    if missed := range_missed(bounds, found):
        return RULES["swift-wrong-value.range"].at(configuration, key, value=shown(value), missed=missed)
    if entry is None or "list" in entry["types"] or "dict" in entry["types"] or not isinstance(value, str | float):
        return None
    choices, types, value = entry.get("choices", ()), entry["types"], str(value)
    if "$" in value or re.fullmatch("<.+>", value) or (value in ("None", "null", "") and entry.get("nullable")):
        return None  # a shell variable, a placeholder for the reader, or no value
    if choices and value not in choices:
        close = nearest(value, choices)
        return RULES["swift-wrong-value"].at(
            configuration, key, value=shown(value), choices=", ".join(choices), close=f"; {close}" if close else ""
        )
    is_whole = re.fullmatch(r"[+-]?[\d_]+", value.strip()) is not None
    if set(types) <= {"int", "float"} and (as_number(found) is None or ("float" not in types and not is_whole)):
        wanted = "a number" if "float" in types else "a whole number"
        return RULES["swift-wrong-value.number"].at(configuration, key, value=shown(value), wanted=wanted)
    if types == ["bool"] and value.lower() not in ("true", "false", "yes", "no", "t", "f", "y", "n", "1", "0"):
        return RULES["swift-wrong-value.switch"].at(configuration, key, value=shown(value))
    return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
