"""Conversion between a trainer's keys and layouts: one row per key, which writes it, shows it and reads it back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from topoplan.layout.layout import Layout
from topoplan.specs.facts import facts_of
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers.models import model_of
from topoplan.trainers.refusal import Refusal, missing_precision
from topoplan.trainers.yaml_text import Entry

if TYPE_CHECKING:
    from topoplan.reading.setup import Configuration, Launch, Setup
    from topoplan.reading.values import Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedSharding:
    """Sharding by DeepSpeed, by FSDP2, or none (DDP), in terms of a layout's keys."""

    backend: str = "ddp"
    zero_stage: int = 0
    offload_optimizer: bool = False
    offload_param: bool = False
    sharding: str = "full"
    offload: bool = False
    checkpoints: bool = False
    """True if FSDP recomputes activations regardless of the trainer's own key."""
    casts: bool = True
    """True if FSDP keeps trained parameters in fp32, as it does with mixed precision."""
    assumption: str = ""


@dataclass(slots=True, kw_only=True)
class Reading:
    """A configuration whose layout is being read."""

    keys: Keys
    model: Model
    world: int
    """Number of GPUs that the configuration runs on."""
    launch: Launch | None = None
    """The command that starts the configuration."""
    sharding: StatedSharding = field(default_factory=StatedSharding)
    """How states are sharded, for data-parallel backends."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Parts of the layout that the preceding rows have read."""

    @property
    def is_moe(self) -> bool:
        """Whether the model has experts."""
        return facts_of(self.model).is_moe

    @property
    def replicas(self) -> int:
        """The data-parallel size that remains after the degrees read so far."""
        split: int = math.prod(self.parts.get(name, 1) for name in ("tp", "pp", "cp", "ulysses"))
        return max(1, self.world // split)


Read: TypeAlias = Callable[[Reading, str], Any]
Write: TypeAlias = Callable[[Spec, Layout], Any]
Comment: TypeAlias = str | Callable[[Spec, Layout], str]


def degree(reading: Reading, key: str) -> int:
    """Read a whole number, 1 if the key is absent. Raises SpecError for any other value."""
    return reading.keys.degree(key)


def flag(reading: Reading, key: str) -> bool:
    """Read a boolean."""
    return reading.keys.flag(key)


def nothing(spec: Spec, layout: Layout) -> None:
    """Write no key."""


@dataclass(frozen=True, slots=True)
class Row:
    """One key of a trainer."""

    key: str
    part: str = ""
    """The part of the layout that `read` returns; empty if another row reads this key too."""
    read: Read = degree
    """Read the part, by the key's name. Raises SpecError for a wrong type, NotPredictedError if not supported."""
    comment: Comment = ""
    """Comment that explains the line in the file."""
    write: Write | None = None
    """Return the value for a file, None to leave the key out; by default the part's value in the layout."""
    show: Write | None = None
    """Return the value for display in the trainer's terms; by default the value for a file."""

    def value(self, spec: Spec, layout: Layout) -> Any:
        """Return the value in a file of the trainer; None if the key is left out."""
        return getattr(layout, self.part) if self.write is None else self.write(spec, layout)


Rows: TypeAlias = Mapping[str, Row]


def by_key(*rows: Row) -> Rows:
    """Return rows by key, in order; a later row replaces an earlier one for the same key."""
    return {row.key: row for row in rows}


def entries(rows: Rows, keys: Iterable[str], spec: Spec, layout: Layout) -> list[Entry]:
    """Return the file's lines for these keys, skipping those that are left out."""
    found = []
    for row in (rows[key] for key in keys):
        if (value := row.value(spec, layout)) is not None:
            comment = row.comment if isinstance(row.comment, str) else row.comment(spec, layout)
            found.append(Entry(row.key, value, comment))
    return found


def shown(rows: Rows, spec: Spec, layout: Layout) -> dict[str, Any]:
    """Return a layout in the trainer's terms; None for a key that is best left out."""
    return {row.key: (row.show or row.value)(spec, layout) for row in rows.values()}


def layout_of(rows: Rows, reading: Reading, **further: Any) -> Layout:
    """Return the layout that the keys describe, legal or not. Raises whatever the rows' `read` raises.

    `further` are parts that no key sets. The data-parallel size is what the other degrees leave of the GPUs.
    """
    parts = reading.parts
    parts.update(further)
    for row in rows.values():
        if row.part:
            parts[row.part] = row.read(reading, row.key)
    return Layout.of(**parts, dp=reading.replicas)


def none(*_: object) -> Iterator[Any]:
    """Yield nothing."""
    return iter(())


def common(keys: Keys, _: Job, __: str | None = None) -> Mapping[str, Any]:
    """Return keys of a file that go along with its job whatever plan is chosen, in all trainers on transformers."""
    names = keys.value("dataset")
    found: dict[str, Any] = {
        "dataset": ",".join(map(str, names)) if isinstance(names, list) else names,
        "learning_rate": keys.number("learning_rate"),
        "epochs": keys.number("num_train_epochs"),
    }
    return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How to interpret a trainer's configuration, for one of its training paths."""

    reads: str
    """Which configurations the codec reads: the path that a Recognizer's `path` returns, else its `trainer`."""
    rows: Rows
    defaults: Callable[[], Mapping[str, Any]]
    """The trainer's defaults: key -> value."""
    view: Callable[[Configuration, Setup], Configuration] = lambda configuration, _: configuration
    """Return a configuration with the keys that the rows use, if its own are arranged differently. Raises SpecError."""
    length: str = ""
    """Key of the sequence length in tokens; empty if there is none."""
    needs_length: bool = True
    """True if the sample length is unknown without that key; False if the trainer then leaves samples uncut."""
    shards: bool = False
    """True if DeepSpeed, FSDP or accelerate files determine how states are sharded."""
    model: Callable[[Configuration, str, int], tuple[Model, str]] = model_of
    """Look up a model by name, empty if none is given; also return what was assumed to find it. Raises ModelError."""
    gpus: Callable[[Keys], int | None] | None = None
    """Number of GPUs that the file itself asks for, for trainers whose command does not give it."""
    layout: Callable[[Reading], Layout]
    """Read the layout. Raises SpecError for a value of a wrong type, NotPredictedError for an unsupported value."""
    job: Callable[[Reading, Layout, int], Job]
    """Read the job, given the sequence length in tokens. Raises as `layout` does."""
    carries: Callable[[Keys, Job, str | None], Mapping[str, Any]] = common
    """Further keys for a spec's job that do not affect the layout: those that plans of a backend can have, or, for
    None, plans of every backend that may train the job."""
    takes: Callable[[str, Any], bool] = lambda *_: False
    """Whether the trainer takes a key with a value, for keys of another trainer's file."""
    refusals: Callable[[Spec], Iterator[Refusal]] = missing_precision
    """Jobs that the trainer refuses to run from its files."""
    tells_faults: bool = False
    """Whether `check` reports the known faults of packages that its layouts meet (`fault_rules.py`)."""
    follows: tuple[str, ...] = ()
    """Keys, besides the rows, whose right value depends on the layout and that are emitted with it."""
    assumptions: Callable[[Reading, Layout, Job], Iterator[str]] = none
    """Sentences on what the files leave open; empty ones are dropped."""
