"""What configurations are held against, and what was worked out for it: nothing is worked out twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from topoplan.planner.plan import Ranking
from topoplan.planner.search import rank
from topoplan.planner.what_if import Search
from topoplan.specs.cluster import Cluster
from topoplan.specs.profile import OwnProfile
from topoplan.specs.spec import Spec
from topoplan.trainers.data_parallel import USUAL_SEQ_LEN

Value = TypeVar("Value")


def _best(spec: Spec) -> Ranking:
    return rank(spec, best_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """What configurations are held against. `--fix` asks the same one again for what it has not changed."""

    cluster: Cluster | None = None
    """None: large cards, as many as the command says."""
    model: str | None = None
    """Takes the place of the one that configurations name."""
    seq_len: int = USUAL_SEQ_LEN
    """Tokens of a sequence for those that do not say how long theirs are."""
    profile: OwnProfile | None = None
    search: Search = _best
    """Finds the best plan of a spec."""
    _known: list[tuple[Any, Any]] = field(default_factory=list, init=False, repr=False, compare=False)

    def ranking(self, spec: Spec) -> Ranking:
        """What a search finds: several configurations are layouts of one job."""
        return self.once(replace(spec, path=None), lambda: self.search(spec))

    def once(self, key: object, work: Callable[[], Value]) -> Value:
        """What `work` gives, which depends on the key alone."""
        for other, value in self._known:
            if other == key:
                known: Value = value
                return known
        new = work()
        self._known.append((key, new))
        return new
