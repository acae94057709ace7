"""Arguments that ms-swift's commands refuse.

Sources, at ms-swift 4.6.0: `swift/arguments/`, `swift/megatron/arguments/`, `swift/trainers/arguments.py`, and
`swift/pipelines/base.py`, which stops at arguments that are left over. Its parser is argparse's (HfArgumentParser): a
beginning that fits one option alone stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.errors import nearest
from topoplan.reading.edits import change, drop
from topoplan.reading.finding import Finding
from topoplan.reading.found import found
from topoplan.reading.processes import launch_of
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import as_number
from topoplan.specs.secrets import secrets_in
from topoplan.trainers.llamafactory.rules.keys import newer_findings
from topoplan.trainers.swift.arguments import COMMANDS, Command, arguments_of, swift_versions
from topoplan.units import quote, shown


def command_of(setup: Setup, configuration: Configuration) -> Command:
    """The command that reads a configuration; one that names an rlhf_type is for `swift rlhf`."""
    if configuration.trainer == "swift-megatron":
        return "megatron sft"
    launch = launch_of(setup, configuration)
    words = (launch.program.rpartition(".")[2], *launch.arguments[:1]) if launch else ()
    return "swift rlhf" if "rlhf" in words or configuration.get("rlhf_type") is not None else "swift sft"


def argument_findings(configuration: Configuration, command: Command) -> Iterator[Finding]:
    """What is wrong with each argument by itself."""
    known = arguments_of(command)
    version = swift_versions()[-1]
    since = {name: entry["since"] for name, entry in known.types.items() if entry and "since" in entry}
    yield from newer_findings(configuration, since, "ms-swift", f"ms-swift {swift_versions()[0]}")
    for key, value in configuration.source.data.items():
        if key in known.types or (key == "ENV" and not configuration.from_command):
            if any(secrets_in({key: value})):
                what = f"{key} holds a token or password in a command that gets copied and shared"
                yield found(
                    configuration, "swift-secret", "warning", key, what, remedy="set it in the environment of the nodes"
                )
            elif finding := _wrong_value(configuration, key, known.types.get(key)):
                yield finding
            continue
        if key == "config" and configuration.get("use_ray"):
            continue  # swift/ray/megatron/pipeline.py reads it before the parser does
        began = [name for name in known.types if name.startswith(key)]
        if len(began) == 1 and configuration.from_command:
            continue
        if key in known.renamed:
            new = known.renamed[key]
            yield found(
                configuration,
                "swift-renamed-argument",
                "error",
                key,
                f"--{key} is refused by ms-swift 4, which calls it --{new}",
                why="version 3 had the old name; arguments that are left over stop version 4: 'remaining_argv'",
                remedy=f"write --{new}",
                edits=drop(configuration, (key,))
                if new in configuration.source.data
                else change(configuration, (key,), name=new),
            )
            continue
        others = [one for one in COMMANDS if one != command and key in arguments_of(one).types]
        if key in known.gone:
            what, remedy = f"--{quote(key)} is refused by ms-swift 4; version 3 had it", "take it out"
        elif others:
            what = f"--{quote(key)} belongs to `{others[0]}`, and `{command}` refuses it"
            remedy = nearest(key, known.types)
        else:
            what = f"--{quote(key)} is no argument of `{command}` (ms-swift {version}), which refuses it"
            remedy = nearest(key, known.types)
        yield found(
            configuration,
            "swift-unknown-argument",
            "error",
            key,
            what,
            why="arguments that are left over stop it: 'remaining_argv'",
            remedy=remedy or "take it out",
        )


def _wrong_value(configuration: Configuration, key: str, entry: Mapping[str, Any] | None) -> Finding | None:
    """Values that argparse refuses: another choice, or no number where one is wanted."""
    value = configuration.get(key)
    if entry is None or value is None or "list" in entry["types"] or not isinstance(value, str):
        return None
    choices, types = entry.get("choices", ()), entry["types"]
    if "$" in value or (value in ("None", "null", "") and entry.get("nullable")):
        return None  # a variable of the shell, or nothing
    if choices and value not in choices:
        close = nearest(value, choices)
        what, remedy = f"--{key} {shown(value)}", f"expected one of {', '.join(choices)}"
        remedy = f"{remedy}; {close}" if close else remedy
    elif set(types) <= {"int", "float"} and as_number(_number(value)) is None:
        what, remedy = f"--{key} {shown(value)} is no number", "expected a number"
    elif types == ["bool"] and value.lower() not in ("true", "false", "yes", "no", "t", "f", "y", "n", "1", "0"):
        what, remedy = f"--{key} {shown(value)} is neither true nor false", "expected true or false"
    else:
        return None
    return found(configuration, "swift-wrong-value", "error", key, what, why="argparse refuses it", remedy=remedy)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
