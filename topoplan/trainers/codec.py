"""A trainer's keys and the parts of a layout: one row a key, which writes it, shows it, and reads it back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from topoplan.layout.layout import Layout
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Configuration, Launch, Setup
from topoplan.reading.values import Keys
from topoplan.specs.facts import facts_of
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers.carried import common
from topoplan.trainers.models import model_of
from topoplan.trainers.refusal import Refusal
from topoplan.trainers.sharding import Sharding
from topoplan.trainers.shared_refusals import missing_precision
from topoplan.trainers.yaml_text import Entry


@dataclass(slots=True, kw_only=True)
class Reading:
    """A configuration whose layout is being read."""

    keys: Keys
    model: Model
    world: int
    """GPUs that it runs on."""
    launch: Launch | None = None
    """The command that starts it."""
    sharding: Sharding = field(default_factory=Sharding)
    """Where data alone is split."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Parts of the layout: those of the rows above."""

    @property
    def is_moe(self) -> bool:
        """Whether the model has experts."""
        return facts_of(self.model).is_moe

    @property
    def replicas(self) -> int:
        """The data parallel size that the degrees above leave."""
        split: int = math.prod(self.parts.get(name, 1) for name in ("tp", "pp", "cp", "ulysses"))
        return max(1, self.world // split)


Read: TypeAlias = Callable[[Reading, str], Any]
Write: TypeAlias = Callable[[Spec, Layout], Any]
Comment: TypeAlias = str | Callable[[Spec, Layout], str]


def degree(reading: Reading, key: str) -> int:
    """A whole number, 1 where it is not given. Raises SpecError for anything else."""
    return reading.keys.degree(key)


def flag(reading: Reading, key: str) -> bool:
    """A switch."""
    return reading.keys.flag(key)


def nothing(spec: Spec, layout: Layout) -> None:
    """Writes no key."""


@dataclass(frozen=True, slots=True)
class Row:
    """One key of a trainer."""

    key: str
    part: str = ""
    """Of the layout, that `read` gives; empty where another row's reads this key too."""
    read: Read = degree
    """From the key's name. Raises SpecError for a wrong type, NotPredictedError for what no layout has."""
    comment: Comment = ""
    """Why the line is there."""
    write: Write | None = None
    """The value in a file, None where the key is left out; the part as it is unless told otherwise."""
    show: Write | None = None
    """The value where a layout is told in the trainer's words; as it is written unless told otherwise."""

    def value(self, spec: Spec, layout: Layout) -> Any:
        """In a file of the trainer; None: left out."""
        return getattr(layout, self.part) if self.write is None else self.write(spec, layout)


Rows: TypeAlias = Mapping[str, Row]


def by_key(*rows: Row) -> Rows:
    """Rows by their keys, in order; a later one of a key takes the place of an earlier one."""
    return {row.key: row for row in rows}


def entries(rows: Rows, keys: Iterable[str], spec: Spec, layout: Layout) -> list[Entry]:
    """The lines of a file for these keys, without those that are left out."""
    found = []
    for row in (rows[key] for key in keys):
        if (value := row.value(spec, layout)) is not None:
            comment = row.comment if isinstance(row.comment, str) else row.comment(spec, layout)
            found.append(Entry(row.key, value, comment))
    return found


def shown(rows: Rows, spec: Spec, layout: Layout) -> dict[str, Any]:
    """A layout in the trainer's words; None where the key is best left out."""
    return {row.key: (row.show or row.value)(spec, layout) for row in rows.values()}


def layout_of(rows: Rows, reading: Reading, **further: Any) -> Layout:
    """The layout that the keys mean, legal or not. Raises what the rows' `read` raises.

    `further` are parts that no key says. The data parallel size is what the other degrees leave of the GPUs.
    """
    parts = reading.parts
    parts.update(further)
    for row in rows.values():
        if row.part:
            parts[row.part] = row.read(reading, row.key)
    return Layout.of(**parts, dp=reading.replicas)


def none(*_: object) -> Iterator[Any]:
    """Nothing to say."""
    return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """What a configuration of a trainer means, for one of its ways to train."""

    reads: str
    """What its configurations are recognised as: the way that a Recogniser's `path` gives, else its `trainer`."""
    rows: Rows
    defaults: Callable[[], Mapping[str, Any]]
    """Of the trainer: key -> value."""
    view: Callable[[Configuration, Setup], Configuration] = lambda configuration, _: configuration
    """A configuration in the keys of the rows, where it has them otherwise. Raises SpecError."""
    length: str = ""
    """Key of the tokens of a sequence; empty where there is none."""
    needs_length: bool = True
    """Without it nothing says how long samples are; else the trainer cuts none."""
    shards: bool = False
    """Files of DeepSpeed, FSDP or accelerate say how states are split."""
    model: Callable[[Configuration, str, int], tuple[Model, str]] = model_of
    """The model of that name, empty where none is given, and what was assumed to find it. Raises ModelError."""
    gpus: Callable[[Keys], int | None] | None = None
    """How many GPUs the file itself is for, where no command says so."""
    layout: Callable[[Reading], Layout]
    """Raises SpecError for a value of a wrong type, NotPredictedError for what is not predicted."""
    job: Callable[[Reading, Layout, int], Job]
    """The same, of sequences of so many tokens."""
    carries: Callable[[Keys, Job], Mapping[str, Any]] = common
    """Keys of a spec's job that go along with it and that no layout is read from."""
    refusals: Callable[[Spec], Iterator[Refusal]] = missing_precision
    """Jobs of its files that the trainer refuses."""
    findings: Callable[[Setup, Configuration, Spec, Layout], Iterator[Finding]] = none
    """What rules say that need the whole layout."""
    follows: tuple[str, ...] = ()
    """Keys beside the rows that are right for one layout and wrong for another; as they are written for it."""
    assumptions: Callable[[Reading, Layout, Job], Iterator[str]] = none
    """Sentences on what the files do not say; empty ones are left out."""
