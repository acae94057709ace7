"""Turn commands into launches: those that start training, with their number of processes and their configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from topoplan.errors import SpecError
from topoplan.reading.recognizer import Recognizer, Recognizers, misspelt_keys, of_program
from topoplan.reading.session import Command, Script
from topoplan.reading.setup import Configuration, Launch
from topoplan.reading.starters import split_launch
from topoplan.reading.words import Word
from topoplan.specs.source import KeyPath, Source, path_of, plain_scalar

_MOST_LAUNCHES = 200
_MOST_JSON_CHARS = 20_000

_CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
_YAML_QUOTED = re.compile(r"'(.*)'", re.DOTALL)
"""Quotes in a word `key='text'`, which OmegaConf.from_cli removes because it reads the value as YAML."""
_LONG_OPTION = re.compile(r"--[A-Za-z]")
BROKEN_CONTINUATION = re.compile(r"\\[ \t]+$")
"""The end of a line whose backslash stands before blanks, and so does not continue the command."""
_OPTION = re.compile(r"--?[A-Za-z][\w.:-]*(?:=.*)?", re.DOTALL)


def launches(script: Script, recognizers: Recognizers) -> Iterator[Launch]:
    """Yield the commands of a script that start training, in order. Raises SpecError if there are implausibly many."""
    for count, launch in enumerate(
        filter(None, (_launch(script, one, recognizers) for one in script.unwrapped_commands))
    ):
        if count == _MOST_LAUNCHES:
            raise SpecError(
                f"starts training more than {_MOST_LAUNCHES} times",
                where=script.part.place(launch.first_line),
                remedy="give the commands of one job",
            )
        yield launch


def cut_off(script: Script, recognizers: Recognizers) -> Iterator[tuple[Command, Command]]:
    """Yield each command of a launcher or trainer that ends too early, and the command that should belong to it.

    The latter begins with an option, or stands behind a backslash that blanks follow.
    """
    lines = script.part.text.split("\n")
    ends = {one.last_line for one in script.unwrapped_commands if _names_launcher(one, recognizers)}
    for before, command in pairwise(script.commands):
        word, last = command.words[0], before.last_line
        is_option = _LONG_OPTION.match(word.text) and not word.quoted
        if last in ends and (is_option or (command.first_line > last and BROKEN_CONTINUATION.search(lines[last - 1]))):
            yield before, command


def _names_launcher(command: Command, recognizers: Recognizers) -> bool:
    start = split_launch(command.words)
    if start is None or start.starter or start.program is None:
        return start is not None and bool(start.starter)
    program = _usual(recognizers, start.program.text, module=start.module)
    return (of_program(recognizers, program) or _of_script(recognizers, program, start.arguments)) is not None


def _launch(script: Script, one: Command, recognizers: Recognizers) -> Launch | None:
    start = split_launch(one.words)
    if start is None or start.program is None:
        return None
    arguments: Sequence[Word] = start.arguments
    program = _usual(recognizers, start.program.text, module=start.module)
    trains = of_program(recognizers, program) or _of_script(recognizers, program, arguments)
    if not start.starter and trains is None:
        return None
    method = arguments[0].text if arguments else ""
    takes_method = trains is not None and trains.command == program
    if trains is not None and takes_method and not re.fullmatch(trains.methods, method):
        return None  # chat, api, export, ...
    own = arguments[1:] if takes_method and not method.endswith(_CONFIG_SUFFIXES) else arguments
    config_file, rest = _config_file(own, trains.file_options if trains else ())
    configuration = None
    if trains is not None:
        source = source_of(rest, name=script.part.name, has_file=bool(config_file) or trains.has_blocks)
        source = _in_blocks(source) if trains.has_blocks else source
        if source.data:
            over_file = bool(config_file)
            configuration = Configuration(
                trainer=trains.trainer,
                part=script.part,
                source=source,
                from_command=True,
                over_file=over_file,
                misspelt=misspelt_keys(trains, source.data.keys(), from_command=True),
            )
    return Launch(
        part=script.part,
        first_line=one.first_line,
        last_line=one.last_line,
        starter=start.starter,
        called=start.called,
        options=start.options,
        program=program,
        trains=trains,
        arguments=tuple(word.text for word in arguments),
        variables=one.environment.variables() if one.environment else (),
        configuration=configuration,
        config_file=config_file,
        background=one.background,
        wrappers=one.wrappers,
        wrapper_words=one.wrapper_words,
    )


def _usual(recognizers: Recognizers, text: str, *, module: bool) -> str:
    """Return a program's usual name: a path to swift/cli/sft.py is swift.cli.sft, which starts no torchrun."""
    return next(filter(None, (one.rule_name_of(text, module) for one in recognizers)), text)


def _of_script(recognizers: Recognizers, program: str, arguments: Sequence[Word]) -> Recognizer | None:
    """Return the recognizer of the trainer whose keys a Python script takes as arguments."""
    if not program.endswith(".py"):
        return None
    keys = {_key(word.text) for word in arguments if word.text.startswith("--")}
    first = arguments[0].text if arguments else ""
    return next((one for one in recognizers if one.is_training_script(program, keys, first)), None)


def _config_file(arguments: Sequence[Word], options: Sequence[str]) -> tuple[str, Sequence[Word]]:
    """Return the configuration file among the arguments, and the arguments that may be keys after it.

    The file comes first in LLaMA-Factory and ms-swift, and after options in Trinity-RFT and ROLL.
    """
    if options:
        said = source_of(arguments, name="", has_file=False).data
        parts = [str(said[name]) for name in options if name in said]
        file = "/".join(parts)
        behind = [word for word in arguments if not _is_option(word)]
        return f"{file}.yaml" if file and not file.endswith(_CONFIG_SUFFIXES) else file, behind
    if arguments and arguments[0].text.endswith(_CONFIG_SUFFIXES) and not arguments[0].text.startswith("-"):
        return arguments[0].text, arguments[1:]
    return "", arguments


def deepspeed_file(launch: Launch) -> str:
    """Return the JSON file given with --deepspeed or --deepspeed_config, for any program."""
    for at, text in enumerate(launch.arguments):
        name, equals, value = text.partition("=")
        if name in ("--deepspeed", "--deepspeed_config", "--deepspeed-config"):
            value = value if equals else "".join(launch.arguments[at + 1 : at + 2])
            return value if value.endswith(".json") else ""
    return ""


def _key(text: str) -> str:
    return text.lstrip("-").partition("=")[0].replace("-", "_")


def source_of(arguments: Sequence[Word], *, name: str, has_file: bool) -> Source:
    """Parse arguments into keys and values. After a file, LLaMA-Factory takes only `key=value` (OmegaConf.from_cli)."""
    data: dict[str, Any] = {}
    lines: dict[KeyPath, int] = {}
    at = 0
    while at < len(arguments):
        word = arguments[at]
        at += 1
        values: list[str] = []
        key, equals, value = word.text.partition("=")
        if _is_option(word):
            if equals:
                values = [value]
            while at < len(arguments) and not _is_option(arguments[at]):
                values.append(arguments[at].text)
                at += 1
        elif has_file and equals and re.fullmatch(r"\+{0,2}[A-Za-z_][\w.]*", key):
            if quoted := _YAML_QUOTED.fullmatch(value):
                data[key], lines[(key,)] = quoted[1].replace("''", "'"), word.line
                continue
            values = [value]
        else:
            continue
        key = _key(key)
        data[key] = _value(values)
        lines[(key,)] = word.line
        if isinstance(data[key], list):
            lines |= {(key, number): word.line for number in range(len(values))}
    return Source(name=name, data=data, lines=lines)


def _in_blocks(source: Source) -> Source:
    """Return a document of nested blocks for keys `block.key=value`; `+key`, which adds a key, counts as a key."""
    data: dict[str, Any] = {}
    lines: dict[KeyPath, int] = {}
    for key, value in source.data.items():
        *blocks, last = path = path_of(key.lstrip("+"))
        block: Any = data
        for name in blocks:
            block = block.setdefault(name, {}) if isinstance(block, dict) else None
        if isinstance(block, dict):
            block[last] = value
            lines[path] = source.lines.get((key,), 0)
    return replace(source, data=data, lines=lines)


def _is_option(word: Word) -> bool:
    """Whether a word is an option `--key` or `-k`, but not a negative number. Quotes make no difference in bash."""
    return _OPTION.fullmatch(word.text) is not None


def _value(values: Sequence[str]) -> Any:
    if not values:
        return True  # a flag without a value
    if len(values) > 1:
        return [_scalar(value) for value in values]
    return _scalar(values[0])


def _scalar(text: str) -> Any:
    """Parse a value as HfArgumentParser does: numbers, true and false; a mapping in JSON; otherwise text."""
    if text.startswith("{") and text.endswith("}") and len(text) <= _MOST_JSON_CHARS:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        return value if isinstance(value, dict) else text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    value = plain_scalar(text)
    return text if value is None else value
