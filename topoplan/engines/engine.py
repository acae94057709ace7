"""What an engine is: a way to train a layout, with its layouts, rules, memory, time and words.

Megatron-core is one, the data-parallel family (DDP, DeepSpeed's ZeRO, FSDP2) another. What asks an engine does not need
to know which one it has; `engines/registry.py` lists them. Accounts and timelines are imported when somebody looks at
one: a search does without.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from topoplan.engines.prediction import Memory, StageMemory, Time
from topoplan.engines.rule import Broken, Rule, broken_rule
from topoplan.layout.layout import Layout
from topoplan.network.placement import Group
from topoplan.specs.case import Case
from topoplan.specs.cluster import Cluster

if TYPE_CHECKING:
    from topoplan.engines.account import MemoryAccount, TimeAccount
    from topoplan.engines.timeline import Timeline

Family = tuple[Layout, ...]
"""Layouts that differ in nothing but what the engine chooses for them: of a family, the fastest that fits is ranked."""

Refusal = Callable[[Layout], Broken | None]
"""Why no trainer can run a layout; None where one can."""

Limit = Callable[[], float]
"""Seconds of a step above which a layout is not asked about, as the search stands."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Layouts that break one and the same rule."""

    layouts: tuple[Layout, ...]
    broken: Broken
    times: int = 1
    """How many candidates each of them stands for."""


@dataclass(frozen=True, slots=True)
class Fastest:
    """The fastest that fits of some candidates."""

    layout: Layout
    memory: Memory
    step_s: float
    count: int
    """Candidates, itself included."""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """Candidates of which none fits."""

    layouts: tuple[Layout, ...]
    """Those that are worth naming."""
    count: int
    """Candidates, these included."""
    memory: Callable[[Layout], Memory]
    """What one of `layouts` needs; at least that, once it is over the card."""


@dataclass(frozen=True, slots=True)
class Behind:
    """Candidates that are sure to be above the limit."""

    count: int


Outcome = Refused | Fastest | TooLarge | Behind


class Engine(ABC):
    """A way to train a layout. Engines have no state: all they know of a job is in the case."""

    backends: ClassVar[tuple[str, ...]]
    """The names under which layouts of this engine are asked for."""
    rules: ClassVar[tuple[Rule, ...]]
    """What every layout has to keep."""
    search_rules: ClassVar[tuple[Rule, ...]]
    """What a search keeps, in the order in which it meets them: `rules`, and what it leaves out as slow."""
    last_rules: ClassVar[frozenset[str]] = frozenset()
    """Names of those that are met last: what breaks one of these is the nearest to a legal layout."""
    choices: ClassVar[tuple[tuple[str, str], ...]]
    """The degrees and switches that people weigh up: (what it is called, attribute of the layout)."""
    misses_by: ClassVar[tuple[str, ...]]
    """Keys of the layout by which what does not fit is told apart; of equal ones, one is named."""

    ids_name_backend: ClassVar[bool] = True
    """Its layouts' ids say which backend they are of."""
    package: ClassVar[str]
    """Has its modules `memory_account`, `time_account` and `timeline`."""

    @abstractmethod
    def families(self, case: Case, backend: str) -> Iterator[tuple[Family, Broken | None]]:
        """Every family of a backend: the legal ones, and the others with the rule that they break."""

    @abstractmethod
    def outcomes(self, case: Case, family: Family, refusal: Refusal, limit: Limit, *, every: bool) -> Iterator[Outcome]:
        """What becomes of a legal family; what is sure to be above the limit is only counted. `every` names all layouts
        that do not fit, else one may stand for others."""

    def promise(self, case: Case, family: Family) -> float:
        """By what the families of a search are sorted that looks for the best plan alone: the least comes first."""
        return 0.0

    def verdict(self, case: Case, layout: Layout, *, searched: bool = False) -> Broken | None:
        """The first rule that a layout breaks; `searched`: of those that a search keeps too."""
        return broken_rule(case, layout, self.search_rules if searched else self.rules)

    @abstractmethod
    def memory(self, case: Case, layout: Layout, *, all_stages: bool = False) -> Memory:
        """Memory of the worst GPU of a legal layout; `all_stages` lists every stage with its moments."""

    @abstractmethod
    def time(self, case: Case, layout: Layout) -> Time:
        """Seconds of one optimizer step of a legal layout."""

    @abstractmethod
    def changes(self, layout: Layout) -> Iterator[tuple[str, Layout]]:
        """Single changes that save memory, the mildest first."""

    def memory_account(self, case: Case, layout: Layout, memory: Memory) -> MemoryAccount:
        """Where `memory` goes, term by term; it has to list every stage with its moments."""
        found: MemoryAccount = self._looked_at("memory_account", case, layout, memory)
        return found

    def time_account(self, case: Case, layout: Layout, time: Time) -> TimeAccount:
        """Where `time` goes, term by term."""
        found: TimeAccount = self._looked_at("time_account", case, layout, time)
        return found

    def timeline(self, case: Case, layout: Layout, time: Time) -> Timeline:
        """The step as events in time."""
        found: Timeline = self._looked_at("timeline", case, layout, time)
        return found

    def _looked_at(self, name: str, *prediction: Any) -> Any:
        return getattr(import_module(f"{self.package}.{name}"), name)(*prediction)

    @abstractmethod
    def groups(self, layout: Layout, cluster: Cluster) -> dict[str, Group]:
        """Shapes of the groups of ranks that talk to each other, by name; some may have one member."""

    @abstractmethod
    def group_keys(self, layout: Layout) -> tuple[str, ...]:
        """Keys of the layout that decide on `groups`; with `backend` where the ids of layouts name it."""

    @abstractmethod
    def place(self, stage: StageMemory) -> str:
        """What a sentence calls the GPUs that hold a stage: `stage 3`, `a GPU`."""

    @abstractmethod
    def bands(self, case: Case) -> tuple[str, str]:
        """The error bands of memory and of time, by their names in a profile."""

    def graded_bands(self, case: Case) -> tuple[str, str]:
        """Those of `bands` that a measured run grades; empty for one that it does not."""
        return self.bands(case)

    @abstractmethod
    def warnings(self, case: Case, layout: Layout) -> list[str]:
        """What a user should know before choosing a layout."""

    def assumptions(self, case: Case, layout: Layout) -> list[str]:
        """What the prediction of a layout takes for granted."""
        return []

    def unsaid(self, case: Case, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Values that a search would give to keys that no id says."""
        return {}
