"""Read a YAML (or JSON) file and keep the line of every key, so that any later error can point to it.

Built on PyYAML's event stream rather than its loader: composing a deeply nested document crashes the C library's
binding, PyYAML resolves YAML 1.1 (`no` is False, `2e-5` is text), and neither reports a duplicate key. Plain
scalars follow the core schema of YAML 1.2, as in editors: only true and false are booleans.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from topoplan.errors import SpecError, nearest_file_name
from topoplan.specs.scalars import plain_scalar as plain_scalar
from topoplan.units import quote

KeyPath = tuple[str | int, ...]
"""The path of a value in a document: `("hosts", 0, "port")`."""

MAX_FILE_BYTES = 1_000_000
MAX_SPEC_BYTES = 10_000_000
"""Size limit of a spec, which may list the hosts of the largest cluster."""
_A_SPEC = "a spec is a short YAML file"
_MAX_VALUES = 1_000_000
_MAX_DEPTH = 40
_TOO_DEEP = f"is nested more than {_MAX_DEPTH} levels deep"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_TAG = "tag:yaml.org,2002:"
_KNOWN_TAGS = {None, "!", *(_TAG + kind for kind in ("str", "int", "float", "bool", "null", "seq", "map"))}
_WIDE_COLON = re.compile(r"\s*[\"']?[A-Za-z_][\w.-]*[\"']?\s*\N{FULLWIDTH COLON}")
_OLD_BOOLEANS = frozenset({"yes", "no", "on", "off", "y", "n"})


class NoTextError(SpecError):
    """A file whose content the system does not give, or that is no text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A document, with the line of each of its values."""

    name: str
    """The file as the user named it, or a stand-in such as `runs.jsonl:3` or `--set`."""
    data: dict[str, Any]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    """Line of each key and list item; empty if the document is not a whole file."""
    old_booleans: frozenset[KeyPath] = frozenset()
    """Paths of values written as a bare yes, no, on or off: text in YAML 1.2, booleans in YAML 1.1."""

    def place(self, path: KeyPath) -> str:
        """Return `file:line` of a value, or of the nearest enclosing block with a known line."""
        for end in range(len(path), 0, -1):
            if line := self.lines.get(path[:end]):
                return f"{self.name}:{line}"
        return self.name


def read_source(path: Path) -> Source:
    """Read the mapping in a YAML or JSON file. Raises SpecError if the path leads to anything else."""
    return parse_source(read_text(path, most_bytes=MAX_SPEC_BYTES), name=shown_path(path))


def shown_path(path: Path) -> str:
    """Return a path for messages: as given, with control characters escaped."""
    return str(path) if str(path).isprintable() else repr(str(path))


def dotted(path: KeyPath) -> str:
    """Format a path as `hosts[0].port`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def with_key(where: str, path: KeyPath, what: str) -> str:
    """Put the key in front of what is wrong with its value, unless the location, such as an option, says it already."""
    key = dotted(path)
    return what if not key or where.startswith("--") or where.endswith(key) else f"{key}: {what}"


_HELD: ContextVar[Mapping[Path, str]] = ContextVar("_HELD", default=MappingProxyType({}))


@contextmanager
def held(texts: Mapping[str, str]) -> Iterator[None]:
    """Serve texts as files of the working directory, by name: a browser hands over contents without paths."""
    token = _HELD.set({Path.cwd() / name: text for name, text in texts.items()})
    try:
        yield
    finally:
        _HELD.reset(token)


def is_held(path: Path) -> bool:
    """Whether a path names an in-memory text (see `held`) rather than a file on disk."""
    return Path.cwd() / path in _HELD.get()


def path_of(key: str) -> KeyPath:
    """Split a dotted key such as `model.model_path` into a path."""
    return tuple(key.split("."))


def at(data: Any, path: KeyPath) -> Any:
    """Return the value at a path, or None."""
    for part in path:
        held = range(len(data)) if isinstance(data, list) else data if isinstance(data, Mapping) else ()
        if part not in held:
            return None
        data = data[part]
    return data


def below(base: Path, name: str) -> Path:
    """Resolve `name` relative to `base`, unless it is absolute or starts with `~`."""
    try:
        return base / Path(name).expanduser()
    except RuntimeError:  # ~someone, where no such user exists
        return base / name


def is_there(path: Path, test: Callable[[Path], bool] = Path.exists) -> bool:
    """Whether a path passes `test`; False for a path that the system refuses to look up."""
    try:
        return test is not Path.is_dir if is_held(path) else test(path)
    except (OSError, ValueError):
        return False


def read_text(path: Path, *, most_bytes: int = MAX_FILE_BYTES, wanted: str = _A_SPEC) -> str:
    """Return the text of a file. Raises SpecError, which tells the kind of file that is `wanted`, if it is not one."""
    name = shown_path(path)
    if is_held(path):
        content = _HELD.get()[Path.cwd() / path].encode("utf-8", "surrogatepass")
        return decoded(content, name=name, most_bytes=most_bytes, wanted=wanted)
    try:
        if path.is_dir():
            found = sorted(entry.name for entry in path.glob("*.yaml"))[:3]
            remedy = f"it holds {', '.join(found)}" if found else "give a YAML file"
            raise SpecError("is a directory, not a file", where=name, remedy=remedy)
        with path.open("rb") as file:
            # Never read more than the limit: the path may be a device or a pipe.
            return decoded(file.read(most_bytes + 1), name=name, most_bytes=most_bytes, wanted=wanted)
    except FileNotFoundError:
        raise SpecError("no such file", where=name, remedy=nearest_file(path)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise NoTextError(f"cannot be read: {reason}", where=name) from None


def decoded(content: bytes, *, name: str, most_bytes: int = MAX_FILE_BYTES, wanted: str = _A_SPEC) -> str:
    """Decode file content read up to one byte past the limit. Raises SpecError if it is too large or binary."""
    if len(content) > most_bytes:
        raise SpecError(f"is larger than {most_bytes // 10**6} MB", where=name, remedy=wanted)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise NoTextError("is not a text file in UTF-8", where=name, remedy=wanted)
    return text


def nearest_file(path: Path) -> str:
    """Return `did you mean 'x'?` for the sibling closest to a missing file, or an empty string."""
    try:
        return nearest_file_name(path.name, (entry.name for entry in path.parent.iterdir()))
    except (OSError, ValueError):
        return ""


def parse_source(text: str, *, name: str) -> Source:
    """Parse the mapping in `text`. Raises SpecError with `name` and the line."""
    reader = _Reader(name)
    value = reader.document(text)
    if value is None:
        raise SpecError("is empty", where=name, expected="expected keys with their values, a line each")
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "one value"
        raise SpecError(f"holds {kind}", where=name, expected="expected keys with their values, a line each")
    return Source(name=name, data=value, lines=reader.lines, old_booleans=frozenset(reader.old_booleans))


def parse_value(text: str, *, name: str) -> Any:
    """Parse one value as it would follow a key, for options such as `--set key=value`. Raises SpecError."""
    value = _Reader(name).document(text)
    # Behind a key, only braces and brackets begin keys or items on the same line: `?` is text.
    is_block = isinstance(value, dict | list) and "\n" not in text and text.lstrip()[:1] not in ("{", "[", "&", "!")
    # YAML joins the lines of a text with blanks; whoever takes the value is to see them.
    is_folded = isinstance(value, str) and "\n" in text.strip()
    return text.strip() if is_block or is_folded else value


class _Reader:
    """Turn a YAML event stream into values, with bounded depth and size."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[KeyPath, int] = {}
        self.old_booleans: set[KeyPath] = set()
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._values = 0

    def document(self, text: str) -> Any:
        try:
            return self._document(iter(yaml.parse(text, Loader=_LOADER)))
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = self.name
            if mark is not None and not where.startswith("--"):  # an option is a single line, shown whole
                where = f"{where}:{mark.line + 1}:{mark.column + 1}"
            problem = error.problem or "cannot be parsed"
            if "nesting depth" in problem:  # libyaml's own limit, which its scanner may meet before _value meets ours
                raise SpecError(_TOO_DEEP, where=where) from None
            remedy = ""
            if "\\t" in problem or "tab" in problem or "cannot start any token" in problem:
                remedy = "indent with spaces, and put text that starts with a special character in quotes"
            elif "could not find expected ':'" in problem and error.context_mark is not None:
                where = f"{self.name}:{error.context_mark.line + 1}"
                remedy = "write `key: value`, with a plain colon and a space behind it"
            elif "mapping values" in problem:
                remedy = "a value that holds `: ` needs quotes"
                before = text.splitlines()[: mark.line + 1] if mark else []
                wide = next((number for number, line in enumerate(before, 1) if _WIDE_COLON.match(line)), None)
                if wide is not None:
                    remedy = f"line {wide} has a full-width colon behind its key; write `: `"
            raise SpecError(f"is not valid YAML: {problem}", where=where, remedy=remedy) from None
        except yaml.YAMLError as error:
            reason = str(error).splitlines()[0]
            raise SpecError(f"is not valid YAML: {reason}", where=self.name) from None

    def _document(self, events: Iterator[Any]) -> Any:
        value: Any = None
        documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._error("a second document starts here", event, remedy="keep one document in a file")
            elif isinstance(event, yaml.NodeEvent):
                value = self._value(event, events, ())
        return value

    def _error(self, what: str, event: Any, *, expected: str = "", remedy: str = "") -> SpecError:
        return SpecError(what, where=f"{self.name}:{event.start_mark.line + 1}", expected=expected, remedy=remedy)

    def _value(self, event: Any, events: Iterator[Any], path: KeyPath) -> Any:
        if len(path) > _MAX_DEPTH:
            raise self._error(_TOO_DEEP, event)
        before = self._values
        self._values += 1
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise self._error(f"alias *{event.anchor} names no finished anchor", event)
            value, size = self._anchors[event.anchor]
            self._values += size
        else:
            tag = event.tag
            if tag not in _KNOWN_TAGS:
                raise self._error(f"tag {quote(tag)} is not supported", event, remedy="leave it out")
            if isinstance(event, yaml.ScalarEvent):
                value = self._scalar(event, path)
            elif isinstance(event, yaml.SequenceStartEvent):
                value = self._sequence(events, path)
            else:
                value = self._mapping(events, path)
            if event.anchor:
                self._anchors[event.anchor] = (value, self._values - before)
        # Aliases of aliases can grow exponentially, so the limit applies to the expanded size.
        if self._values > _MAX_VALUES:
            raise self._error(f"holds more than {_MAX_VALUES} values, aliases written out", event)
        return value

    def _scalar(self, event: Any, path: KeyPath) -> Any:
        text: str = event.value
        if not event.implicit[0] and event.tag in (None, "!", _TAG + "str"):
            return text
        if text.lower() in _OLD_BOOLEANS:
            self.old_booleans.add(path)
        return plain_scalar(text)

    def _sequence(self, events: Iterator[Any], path: KeyPath) -> list[Any]:
        items: list[Any] = []
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            item_path = (*path, len(items))
            self.lines[item_path] = event.start_mark.line + 1
            items.append(self._value(event, events, item_path))
        return items

    def _mapping(self, events: Iterator[Any], path: KeyPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            line: int = event.start_mark.line + 1
            if not isinstance(event, yaml.ScalarEvent):
                raise self._error("a key that is not plain text", event, expected="expected `key: value`")
            key: str = event.value
            key_path = (*path, key)
            if key == "<<" and event.implicit[0]:
                for name, value in self._merged(event, self._value(next(events), events, key_path)).items():
                    merged.setdefault(name, value)
                    self.lines.setdefault((*path, name), line)
                continue
            if key in mapping:
                first = self.lines[key_path]
                raise self._error(
                    f"key {key!r} is given twice; first on line {first}", event, remedy="keep one of them"
                )
            self.lines[key_path] = line
            mapping[key] = self._value(next(events), events, key_path)
        return merged | mapping

    def _merged(self, event: Any, value: Any) -> dict[str, Any]:
        """Return the keys of `<<: *base` or `<<: [*a, *b]`; the first block that has a key wins."""
        blocks = value if isinstance(value, list) else [value]
        if not all(isinstance(block, dict) for block in blocks):
            raise self._error("`<<` merges something else than blocks", event, expected="expected `<<: *anchor`")
        return {name: item for block in reversed(blocks) for name, item in block.items()}
