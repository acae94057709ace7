"""Edits of single keys in a file. Each is tried on a copy and dropped if it would change anything else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from topoplan.errors import InputError
from topoplan.reading.finding import Edit
from topoplan.reading.parts import Part
from topoplan.reading.setup import Configuration, Variable
from topoplan.reading.values import at
from topoplan.specs.scalars import scalar
from topoplan.specs.source import KeyPath, parse_source

_KEEP: Any = object()
_QUOTED = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^']|'')*'"
_ENTRY = re.compile(
    rf"(?P<indent>\s*)(?P<key>{_QUOTED}|[^\s:#\"'][^:#]*?)(?P<colon>\s*:\s*)"
    rf"(?P<value>(?:{_QUOTED}|[^\s#\"'{{\[|>&*!,][^#]*?)?)(?P<end>\s*,?\s*(?:#.*)?)"
)
_SHELL_VALUE = r"(?:'[^']*'|\"[^\"]*\"|[^\s\\'\"]+)"


def change(configuration: Configuration, path: KeyPath, *, name: str = "", value: Any = _KEEP) -> tuple[Edit, ...]:
    """Return an edit of the name or value (or both) of the key at `path`; empty if its line does not allow one."""
    part, line = configuration.part, configuration.source.lines.get(path)
    lines = part.text.splitlines()
    if line is None or not 0 < line <= len(lines):
        return ()
    if configuration.from_command:
        return _shell_change(lines[line - 1], line, str(path[-1]), name, value)
    entry = _ENTRY.fullmatch(lines[line - 1])
    if entry is None:
        return ()
    quote = entry["key"][0] if entry["key"][0] in "\"'" else ""
    key = f"{quote}{name}{quote}" if name else entry["key"]
    text = entry["value"] if value is _KEEP else _text(part, value)
    edit = Edit(first_line=line, last_line=line, text=f"{entry['indent']}{key}{entry['colon']}{text}{entry['end']}")
    new = at(configuration.source.data, path) if value is _KEEP else value
    return _tried(configuration, edit, path, name or str(path[-1]), new)


def corrected_name(configuration: Configuration, key: str) -> tuple[Edit, ...]:
    """Return an edit that gives a misspelt key its name; empty for any other key.

    Nothing that is trained changes: the trainer refuses the key as it is.
    """
    return change(configuration, (key,), name=configuration.misspelt[key]) if key in configuration.misspelt else ()


def drop(configuration: Configuration, path: KeyPath) -> tuple[Edit, ...]:
    """Return an edit that removes the key at `path` and everything below it."""
    lines, first = configuration.part.text.splitlines(), configuration.source.lines.get(path)
    if first is None or not 0 < first <= len(lines):
        return ()
    if configuration.from_command:
        alone = re.fullmatch(rf"\s*--{_option(str(path[-1]))}(?:(?:=|\s+){_SHELL_VALUE})?\s*\\", lines[first - 1])
        return (Edit(first_line=first, last_line=first, text=""),) if alone else ()
    below = (line for place, line in configuration.source.lines.items() if place[: len(path)] == path)
    last = max(below, default=first)
    tries = [Edit(first_line=first, last_line=last, text="")]
    if configuration.part.kind == "json":
        if last < len(lines):  # include the closing bracket of a block
            tries.append(Edit(first_line=first, last_line=last + 1, text=""))
        if first > 1:  # for the last member, also remove the comma after the preceding one
            before = lines[first - 2].rstrip().removesuffix(",")
            tries += [Edit(first_line=first - 1, last_line=edit.last_line, text=before) for edit in tuple(tries)]
    for edit in tries:
        if done := _tried(configuration, edit, path, "", None):
            return done
    return ()


def applied(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with the edits applied, which must not overlap; other lines are unchanged.

    New lines get the line ending of the first line; an edit of the whole text has its own line endings.
    """
    lines = text.split("\n")
    ends_as = "\r" if lines[0].endswith("\r") else ""
    new: list[str] = []
    done = 0
    for edit in sorted(edits, key=lambda edit: (edit.first_line, edit.last_line)):
        first = edit.first_line - 1
        new += lines[done:first]
        end = "" if edit.first_line == 1 and edit.last_line >= len(lines) - 1 else ends_as
        new += [line + end for line in edit.text.split("\n")] if edit.text else []
        done = max(first, edit.last_line)
    return "\n".join(new + lines[done:])


def _text(part: Part, value: Any) -> str:
    return json.dumps(value) if part.kind == "json" else scalar(value)


def _option(key: str) -> str:
    return re.escape(key).replace("_", "[-_]")


def _shell_change(line: str, number: int, key: str, name: str, value: Any) -> tuple[Edit, ...]:
    option = re.compile(rf"(?<!\S)--{_option(key)}(?P<gap>=|\s+|$)(?P<value>{_SHELL_VALUE})?")
    found = option.search(line)
    if found is None or len(option.findall(line)) > 1:
        return ()
    text = found["value"] or ""
    if value is not _KEEP:
        if not text:
            return ()
        text = str(value).lower() if isinstance(value, bool) else str(value)
    new = f"{line[: found.start()]}--{name or key}{found['gap']}{text}{line[found.end() :]}"
    return (Edit(first_line=number, last_line=number, text=new),)


def _tried(configuration: Configuration, edit: Edit, path: KeyPath, name: str, value: Any) -> tuple[Edit, ...]:
    """Return the edit if it only puts `name: value` in place of the key at `path`; otherwise nothing."""
    wanted = _replaced(configuration.source.data, path, name, value)
    text = applied(configuration.part.text, [edit])
    try:
        found = parse_source(text, name="").data
        if configuration.part.kind == "json":
            json.loads(text)  # the YAML parser would accept a trailing comma
    except (InputError, ValueError, RecursionError):
        return ()
    return (edit,) if found == wanted else ()


def _replaced(data: Any, path: KeyPath, name: str, value: Any) -> Any:
    first, *rest = path
    if not isinstance(data, dict):
        return data
    if rest:
        return {key: _replaced(item, tuple(rest), name, value) if key == first else item for key, item in data.items()}
    new = {key: item for key, item in data.items() if key != first}
    return {**new, name: value} if name else new


def rewritten(variable: Variable, pattern: str, new: str) -> tuple[Edit, ...]:
    """Return an edit that replaces a pattern in the variable's line; nothing unless the pattern occurs exactly once."""
    line = line_text(variable)
    if len(re.findall(pattern, line)) != 1:
        return ()
    text = re.sub(pattern, lambda _: new, line)
    return (Edit(first_line=variable.line, last_line=variable.line, text=text),)


def goes_on(part: Part, line: int) -> bool:
    """Whether a line continues the command of the preceding line, so that nothing can be inserted between them."""
    before = part.text.split("\n")[line - 2] if line > 1 else ""
    return re.search(r"(?:\\|&&|\|)\s*$", before) is not None


def line_text(variable: Variable) -> str:
    """Return the line on which a variable is set."""
    lines = variable.part.text.split("\n")
    return lines[variable.line - 1] if 0 < variable.line <= len(lines) else ""
