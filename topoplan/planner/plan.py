"""What a prediction, a rejection and a ranking look like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Protocol, overload

from topoplan.engines.prediction import Memory, StageMemory, Time
from topoplan.layout.layout import Layout
from topoplan.specs.spec import Spec

__all__ = ["Counts", "Memory", "Plan", "Plans", "Ranked", "Ranking", "Rejection", "StageMemory", "Time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A layout with its predicted memory and time."""

    layout: Layout
    memory: Memory
    time: Time
    tokens_per_s_per_gpu: float
    """Tokens of the sequences in a step, over seconds and GPUs; padding does not count where lengths are known."""
    model_flops_per_s_per_gpu: float
    """Model FLOP/s, without recomputation."""
    mfu: float
    """model_flops_per_s_per_gpu over the card's dense peak at the job's precision."""
    trainer: str | None = None
    """The one that it is computed and written for; None where none can run it."""
    warnings: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    """Known trouble, in sentences that are among these warnings or those of the plan's bundle."""
    padding_share: float | None = None
    """Share of a step's positions that are padding; None where the lengths of the samples are not known."""

    @property
    def id(self) -> str:
        """Short, stable name of the layout."""
        return self.layout.id

    @property
    def fits(self) -> bool:
        """The memory is within the card, less its margin."""
        return self.memory.fits


class Ranked(Protocol):
    """What the order of plans goes by."""

    @property
    def layout(self) -> Layout: ...  # noqa: D102
    @property
    def memory(self) -> Memory: ...  # noqa: D102
    @property
    def tokens_per_s_per_gpu(self) -> float: ...  # noqa: D102
    @property
    def caveats(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def id(self) -> str: ...  # noqa: D102


class Plans(Sequence[Plan]):
    """Plans in their order, each put together when first asked for: a search finds thousands, and few are read."""

    def __init__(self, layouts: Sequence[Layout], plan: Callable[[int], Plan]) -> None:
        """`plan` gives the plan at a place, from 0, of the layout at that place."""
        self.layouts = layouts
        self._plan, self._known = plan, dict[int, Plan]()
        self._places = range(len(layouts))

    def __len__(self) -> int:
        """How many there are."""
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> Plan: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, place: int | slice) -> Plan | tuple[Plan, ...]:
        """The plan at a place, or a tuple of those of a slice."""
        if isinstance(place, slice):
            return tuple(self[each] for each in self._places[place])
        place = self._places[place]
        if place not in self._known:
            self._known[place] = self._plan(place)
        return self._known[place]

    def __eq__(self, other: object) -> bool:
        """Equal to any sequence of equal plans."""
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A layout that is out, and why."""

    layout: Layout
    rule: str
    """Name of the rule, or `memory`."""
    reason: str
    """The failed equation with its numbers, or the stage and the GiB by which it is over."""
    fix: str = ""
    """The nearest change that would make it legal or make it fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many layouts a search met, and what became of them: the others add up to `candidates`."""

    candidates: int = 0
    illegal: int = 0
    out_of_memory: int = 0
    dominated: int = 0
    """Slower than a ranked one that differs in its pipeline split, recomputation and offload alone, or too large."""
    ranked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a way out changes, as options of the command line."""

    kind: str
    """`nodes`, `lora` and so on: a key of `planner.ways_out.KINDS`."""
    words: str
    sets: tuple[str, ...] = ()
    """Values of `--set`."""
    pins: tuple[str, ...] = ()
    """Values of `--pin`."""
    backend: str | None = None
    """Value of `--backend`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """A change with which a job fits, or one with which it does not either."""

    change: Change
    plan: Plan | None = None
    reason: str = ""
    """Why there is no plan."""
    is_tried: bool = True
    """Its searches were all done."""
    command: str = ""
    """What ranks the changed job, for a shell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Result of a search. `plans` is sorted, best first."""

    spec: Spec
    plans: Plans
    counts: Counts
    elapsed_s: float
    safe: int | None = None
    """The place, from 0, of the fastest plan that has no caveat and memory to spare; None where there is none."""
    searched: float = 1.0
    """Share of the search that was done before it was stopped; 1 is all."""
    rejected: tuple[Rejection, ...] = ()
    """All of them when asked for, else only the nearest misses."""
    notes: tuple[str, ...] = field(default=())
    """Sentences on what the usual alternatives would cost."""
    crossings: tuple[str, ...] = ()
    """Sentences on the other backends and trainers: what a change to each costs and buys, or why there is none."""
    data_notes: tuple[str, ...] = ()
    """Sentences on the lengths of the samples and what the best plan makes of them; none where they are not known."""
    searched_backends: tuple[str, ...] = ()
    """Those that were searched, or cannot be."""
    ways_out: tuple[WayOut, ...] = ()
    """Where nothing fits, or nothing with room: what would, as far as somebody asked for it."""
