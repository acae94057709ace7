"""Build a document by layering files and options, tracking the origin of every part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from topoplan.errors import InputError, LayoutError, SpecError
from topoplan.specs.source import KeyPath, Source, dotted, parse_value, with_key
from topoplan.units import quote, shown

if TYPE_CHECKING:
    from topoplan.specs.forms import SpecForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document: its values, each checked on its own, and the location of each."""

    form: SpecForm
    raw: Mapping[str, Any]
    """The document as it was written."""
    place: Callable[[KeyPath], str]
    """Returns the `file:line` of a value."""
    base: Callable[[KeyPath], Path]
    """Returns the directory that relative paths in a value are relative to."""
    is_run_document: bool = False
    """Whether this is a run document of `topoplan predict`, where `nodes` may be left out."""

    def has(self, *path: str) -> bool:
        """Return whether a key is given."""
        value: Any = self.raw
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value is not None

    def fail(self, path: KeyPath, what: str, *, expected: str = "", remedy: str = "") -> NoReturn:
        """Raise a SpecError about the value of a key."""
        where = self.place(path)
        raise SpecError(with_key(where, path, what), where=where, expected=expected, remedy=remedy)

    def fail_missing(self, key: str, why: str = "", *, remedy: str, at: KeyPath = ()) -> NoReturn:
        """Raise a SpecError about a missing key."""
        raise SpecError(f"`{key}` is missing{why}", where=self.place(at), remedy=remedy)

    @contextmanager
    def errors_at(self, *path: str) -> Iterator[None]:
        """Prefix errors about what a key names, such as a file, with the key and its location."""
        try:
            yield
        except InputError as error:
            where = self.place(path)
            raise type(error)(with_key(where, path, str(error)), where=where) from None


_SCHEMA_KEY = "$schema"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Where a part of a document came from."""

    source: Source
    at: KeyPath = ()
    """The part's path within `source`."""
    base: Path
    """The directory that relative paths in the part are relative to."""


class Draft:
    """A spec's document under construction: files and options in layers, with the origin of every part."""

    def __init__(self, source: Source, *, base: Path, is_run_document: bool = False) -> None:
        self._data = {key: value for key, value in source.data.items() if key != _SCHEMA_KEY}
        self._is_run_document = is_run_document
        self._origins: dict[KeyPath, _Origin] = {(): _Origin(source=source, base=base)}
        self._given: dict[KeyPath, tuple[Any, str]] = {}
        """What options give: path of a value -> the value, and the option."""

    def place(self, path: KeyPath) -> str:
        """Return the `file:line` or the option that a value came from."""
        origin, there = self._origin(path)
        return origin.source.place(there)

    def _origin(self, path: KeyPath) -> tuple[_Origin, KeyPath]:
        """Return the origin of a value, and the value's path within it."""
        start = next(end for end in range(len(path), -1, -1) if path[:end] in self._origins)
        origin = self._origins[path[:start]]
        return origin, (*origin.at, *path[start:])

    def put(self, path: KeyPath, value: Any, source: Source, *, base: Path | None = None, at: KeyPath = ()) -> None:
        """Set the value at a path, creating its parent blocks; it came from `at` in `source`.

        Without a `base`, the value came from an option, whose relative paths start in the working directory.
        """
        block = self._data
        for depth, key in enumerate(path[:-1]):
            inner = block.get(str(key))
            if key == "gpu" and isinstance(inner, str):
                inner = {"name": inner}
            if inner is not None and not isinstance(inner, Mapping):
                there = path[: depth + 1]
                what = f"`{dotted(there)}` is {shown(inner)}, not a block of keys ({self.place(there)})"
                raise SpecError(what, where=source.name)
            # Copy, so that a document passed by a caller, or a block shared by aliases, is not modified.
            block[str(key)] = dict(inner or {})
            block = block[str(key)]
        block[str(path[-1])] = value
        for known in [known for known in self._origins if known[: len(path)] == path]:
            del self._origins[known]
        self._origins[path] = _Origin(source=source, at=at, base=base or Path.cwd())

    def has(self, key: str) -> bool:
        """Return whether a top-level key is given."""
        return key in self._data

    def drop(self, key: str) -> None:
        """Remove a top-level key."""
        self._data.pop(key, None)

    def replace_job(self, source: Source, *, base: Path) -> None:
        """Take the job, and the model if there is one, from a job file."""
        if "job" not in source.data:
            data = {key: value for key, value in source.data.items() if key != _SCHEMA_KEY}
            self.put(("job",), data, source, base=base)
            return
        for key in source.data:
            if key not in ("job", "model", _SCHEMA_KEY):
                raise SpecError(
                    f"unknown key {quote(key)!r} in a job file",
                    where=source.place((key,)),
                    expected="expected `job:` and perhaps `model:`, or the keys of a job alone",
                )
        for key in ("job", "model"):
            if key in source.data:
                self.put((key,), source.data[key], source, base=base, at=(key,))

    def give(self, path: KeyPath, value: Any, option: str) -> None:
        """Set the value at a path, from an option. Raises an error if another option has given it another value."""
        self.check_once(path, value, option)
        self.put(path, value, Source(name=option, data={}))

    def check_once(self, path: KeyPath, value: Any, option: str) -> None:
        """Raise LayoutError for a pin, or else SpecError, if options give a key two different values."""
        for key, one in _leaves(path, value):
            before, by = self._given.setdefault(key, (one, option))
            if before != one:
                is_pin = key[:2] == ("job", "pin")
                name = f"{dotted(key[2:])} is pinned" if is_pin else f"{dotted(key).removeprefix('job.')} is set"
                raise (LayoutError if is_pin else SpecError)(
                    f"{name} to {shown(before)} and to {shown(one)}",
                    where=f"{by} and {option}",
                    remedy="keep one of them",
                )

    def override(self, *texts: str) -> None:
        """Apply each `--set key=value`."""
        for text in texts:
            name, value, option = _assignment(text, "--set", "seq_len=8192")
            self.give(_override_path(name, option), value, option)

    def pin(self, pins: Mapping[str, Any] | str | Sequence[str]) -> None:
        """Add pins to those of the job, given as a mapping, as `tp=4,pp=1`, or as several such texts."""
        for key, value, option in _mapped(pins) if isinstance(pins, Mapping) else _written(pins):
            self.give(("job", "pin", *key.split(".")), value, option)

    def document(self) -> Document:
        """Check the values one by one and return the document. Raises SpecError or UnitError."""
        from topoplan.specs.forms import SpecForm
        from topoplan.specs.mistakes import check_form

        self._check_trainer_words()
        form = check_form(SpecForm, self._data, self.place)
        return Document(
            form=form,
            raw=self._data,
            place=self.place,
            base=lambda path: self._origin(path)[0].base,
            is_run_document=self._is_run_document,
        )

    def _check_trainer_words(self) -> None:
        """Refuse a bare yes or no under `trainer`: some trainer keys expect the word, others a boolean."""
        job = self._data.get("job")
        trainer = job.get("trainer") if isinstance(job, Mapping) else None
        for key, word in trainer.items() if isinstance(trainer, Mapping) else ():
            origin, there = self._origin(("job", "trainer", str(key)))
            if there in origin.source.old_booleans:
                raise SpecError(
                    f"job.trainer.{key}: a bare {word} is a word to some readers of YAML and a boolean to others",
                    where=origin.source.place(there),
                    remedy=f'write "{word}" in quotes, or true or false',
                )


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the path and value of everything that a value sets, into its blocks."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves((*path, str(key)), inner)
    else:
        yield path, value


def _assignment(text: str, option: str, example: str) -> tuple[str, Any, str]:
    """Parse `key=value` into key, value and the option for messages. Raises SpecError."""
    name, equals, written = text.partition("=")
    where = f"{option} {quote(text)}"
    if not equals or not name.strip():
        raise SpecError("is not key=value", where=where, remedy=f"write it as {option} {example}")
    return name.strip(), given_value(written, where), where


def given_value(text: str, option: str) -> Any:
    """Parse the value of an option. Raises SpecError if it is empty; `null` means that a key is left out."""
    if not text.strip():
        raise SpecError("has no value", where=option, expected="expected one, or null for a key that is left out")
    return parse_value(text, name=option)


def _mapped(pins: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    return ((str(key), value, f"pin {key}") for key, value in pins.items())


def _written(pins: str | Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    texts = [pins] if isinstance(pins, str) else pins
    parts = (part.strip() for text in texts for part in text.split(","))
    return (_assignment(part, "--pin", "tp=4,pp=1") for part in parts if part)


def _override_path(name: str, option: str) -> KeyPath:
    """Return the path in the document of a key given to `--set`."""
    from topoplan.specs.forms import GpuForm, JobForm, PinForm, SpecForm
    from topoplan.specs.mistakes import keys_of, likely_key

    parts = tuple(name.split("."))
    if not all(parts):
        raise SpecError(f"{shown(name)} is not a key", where=option, remedy="write it as --set seq_len=8192")
    if parts[0] in keys_of(SpecForm):
        return parts
    if parts[0] in keys_of(JobForm):
        return ("job", *parts)
    remedy = "other keys of the trainer are set as --set trainer.KEY=VALUE"
    if likely := likely_key(parts[0], [*keys_of(SpecForm), *keys_of(JobForm)]):
        remedy = f"did you mean {likely!r}?"
    elif likely := likely_key(parts[0], keys_of(PinForm)):
        remedy = f"a layout key is held with --pin {likely}=..."
    elif likely := likely_key(parts[0], keys_of(GpuForm)):
        remedy = f"write it as --set gpu.{likely}=..."
    raise SpecError(f"unknown key {shown(parts[0])}", where=option, remedy=remedy)
