"""The interface of an engine: a way to train a layout, with its layouts, rules, memory, time and wording.

Megatron-core is one engine, the data-parallel family (DDP, DeepSpeed's ZeRO, FSDP2) another. Callers do not need to
know which engine they have; `engines/registry.py` lists them. Accounts and timelines are imported only when one is
asked for, because a search does not need them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from topoplan.engines.prediction import Memory, StageMemory, Time
from topoplan.engines.rule import Broken, Rule, broken_rule
from topoplan.layout.layout import Layout
from topoplan.network.placement import Group
from topoplan.specs.case import Case
from topoplan.specs.cluster import Cluster

if TYPE_CHECKING:
    from topoplan.engines.account import MemoryAccount, TimeAccount
    from topoplan.engines.timeline import Timeline

MAX_MICRO_BATCH_SIZE = 32
"""Sequences. Larger micro-batches are searched only if pinned, because they only enlarge the pipeline bubble."""


def divisors(number: int, limit: int) -> list[int]:
    """Return the divisors of a number up to a limit, ascending."""
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]


def chosen(pin: Mapping[str, Any], key: str, values: list[Any]) -> list[Any]:
    """Return the values to try for a key: its pin if it has one, else `values`."""
    return [pin[key]] if key in pin else values


Family = tuple[Layout, ...]
"""Layouts that differ only in what the engine chooses itself; of each family, the fastest layout that fits is
ranked."""

Refusal = Callable[[Layout], Broken | None]
"""Returns why no trainer can run a layout, or None if one can."""

Limit = Callable[[], float]
"""Returns the step time in seconds, at the current state of the search, above which layouts are not evaluated
further."""


class Refused(NamedTuple):
    """Layouts that all break the same rule."""

    layouts: tuple[Layout, ...]
    broken: Broken
    times: int = 1
    """How many candidates each of the layouts stands for."""


class Fastest(NamedTuple):
    """The fastest of some candidates that fits."""

    layout: Layout
    memory: Memory
    step_s: float
    candidates: int
    """Number of candidates, this one included."""


class TooLarge(NamedTuple):
    """Candidates of which none fits."""

    layouts: tuple[Layout, ...]
    """The candidates worth naming."""
    candidates: int
    """Number of candidates, including `layouts`."""
    memory: Callable[[Layout], Memory]
    """Returns the memory of one of `layouts`; may stop at a lower bound once that exceeds the card."""


class TooSlow(NamedTuple):
    """Candidates that are certain to be slower than the limit."""

    candidates: int


Outcome = Refused | Fastest | TooLarge | TooSlow


class Engine(ABC):
    """A way to train a layout. Engines have no state: everything they know about a job is in the case."""

    backends: ClassVar[tuple[str, ...]]
    """The names by which users ask for layouts of this engine."""
    rules: ClassVar[tuple[Rule, ...]]
    """The rules of a legal layout."""
    search_rules: ClassVar[tuple[Rule, ...]]
    """The rules of a searched layout, in the order in which they are checked: `rules`, and those that exclude slow
    layouts."""
    last_rules: ClassVar[frozenset[str]] = frozenset()
    """Names of the rules that are checked last: a layout that breaks only one of these is the nearest to a legal
    one."""
    choices: ClassVar[tuple[tuple[str, str], ...]]
    """The degrees and switches that people weigh up: (display name, attribute of the layout)."""
    miss_keys: ClassVar[tuple[str, ...]]
    """Keys of the layout that distinguish layouts which do not fit; of those with equal keys, only one is named."""

    ids_name_backend: ClassVar[bool] = True
    """Whether the ids of its layouts name their backend."""
    package: ClassVar[str]
    """Name of the package with the modules `memory_account`, `time_account` and `timeline`."""

    @abstractmethod
    def families(self, case: Case, backend: str) -> Iterator[tuple[Family, Broken | None]]:
        """Yield every family of a backend, with the rule that it breaks, or None if it is legal."""

    @abstractmethod
    def outcomes(self, case: Case, family: Family, refusal: Refusal, limit: Limit, *, every: bool) -> Iterator[Outcome]:
        """Yield the outcomes of a legal family; candidates that are certain to exceed the limit are only counted.

        With `every`, all layouts that do not fit are named; otherwise one may stand for others.
        """

    def search_priority(self, case: Case, family: Family) -> float:
        """Return the sort key of a family in a search for the best plan alone: the least value comes first."""
        return 0.0

    def verdict(self, case: Case, layout: Layout, *, searched: bool = False) -> Broken | None:
        """Return the first rule that a layout breaks, or None; with `searched`, the rules of a search are included."""
        return broken_rule(case, layout, self.search_rules if searched else self.rules)

    @abstractmethod
    def memory(self, case: Case, layout: Layout, *, all_stages: bool = False) -> Memory:
        """Return the memory of the worst GPU of a legal layout.

        `all_stages` lists every stage with its peak candidates.
        """

    @abstractmethod
    def time(self, case: Case, layout: Layout) -> Time:
        """Return the seconds of one optimizer step of a legal layout."""

    @abstractmethod
    def changes(self, layout: Layout) -> Iterator[tuple[str, Layout]]:
        """Yield single changes that save memory, with the layouts that they make, mildest first."""

    def memory_account(self, case: Case, layout: Layout, memory: Memory) -> MemoryAccount:
        """Return where `memory` goes, term by term; `memory` must list every stage with its peak candidates."""
        found: MemoryAccount = self._call_lazy("memory_account", case, layout, memory)
        return found

    def time_account(self, case: Case, layout: Layout, time: Time) -> TimeAccount:
        """Return where `time` goes, term by term."""
        found: TimeAccount = self._call_lazy("time_account", case, layout, time)
        return found

    def timeline(self, case: Case, layout: Layout, time: Time) -> Timeline:
        """Return the step as events in time."""
        found: Timeline = self._call_lazy("timeline", case, layout, time)
        return found

    def _call_lazy(self, name: str, *prediction: Any) -> Any:
        return getattr(import_module(f"{self.package}.{name}"), name)(*prediction)

    @abstractmethod
    def groups(self, layout: Layout, cluster: Cluster) -> dict[str, Group]:
        """Return the shapes of the groups of ranks that communicate, by name; a group may have a single member."""

    @abstractmethod
    def group_keys(self, layout: Layout) -> tuple[str, ...]:
        """Return the keys of the layout that determine `groups`, plus `backend` if the ids of layouts name it."""

    @abstractmethod
    def place(self, stage: StageMemory) -> str:
        """Return how a sentence refers to the GPUs of a stage: `stage 3`, `a GPU`."""

    @abstractmethod
    def bands(self, case: Case) -> tuple[str, str]:
        """Return the names, in a profile, of the error bands of memory and of time."""

    def graded_bands(self, case: Case) -> tuple[str, str]:
        """Return the `bands` that measured runs of this case can grade; an empty string for one that they cannot."""
        return self.bands(case)

    @abstractmethod
    def warnings(self, case: Case, layout: Layout) -> list[str]:
        """Return what a user should know before choosing a layout."""

    def assumptions(self, case: Case, layout: Layout) -> list[str]:
        """Return the assumptions behind the prediction of a layout."""
        return []

    def defaults_not_in_ids(self, case: Case, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that a search would choose for keys that ids do not mention."""
        return {}
