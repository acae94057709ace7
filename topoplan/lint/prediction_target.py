"""The reference that configurations are compared with, and a cache of its searches and predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from topoplan.planner.plan import Ranking
from topoplan.planner.search import rank
from topoplan.planner.what_if import Search
from topoplan.reading.processes import processes_for
from topoplan.reading.setup import Setup
from topoplan.specs.cluster import Cluster
from topoplan.specs.profile import OwnProfile
from topoplan.specs.spec import Spec
from topoplan.trainers.data_parallel import USUAL_SEQ_LEN

Value = TypeVar("Value")


def _best(spec: Spec) -> Ranking:
    return rank(spec, best_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionTarget:
    """What configurations are compared with; `--fix` passes the same object again to reuse its cache."""

    cluster: Cluster | None = None
    """The cluster to predict on; None for machines of large cards, as many as the command says."""
    cluster_of_nodes: Callable[[int], Cluster] | None = None
    """Returns the cluster with a number of nodes, if the user named its machines but not how many they are."""
    model: str | None = None
    """Replaces the model that configurations name."""
    seq_len: int = USUAL_SEQ_LEN
    """Sequence length in tokens for configurations that do not give one."""
    profile: OwnProfile | None = None
    search: Search = _best
    """Finds the best plan of a spec."""
    _known: list[tuple[Any, Any]] = field(default_factory=list, init=False, repr=False, compare=False)

    def sized_for(self, setup: Setup) -> PredictionTarget:
        """Return the target with as many nodes as the commands of a setup start, if the user left that open."""
        started = (processes_for(setup, one) for one in setup.complete_configurations)
        nodes = {one.nodes for one in started if one is not None and one.nodes}
        if self.cluster_of_nodes is None or len(nodes) != 1:
            return self
        return replace(self, cluster=self.cluster_of_nodes(nodes.pop()))

    def ranking(self, spec: Spec) -> Ranking:
        """Return the ranking of a spec's plans, cached because several configurations may be layouts of one job."""
        return self.once(replace(spec, path=None), lambda: self.search(spec))

    def once(self, key: object, work: Callable[[], Value]) -> Value:
        """Return the result of `work`, computed once per key. The result must depend on nothing but the key."""
        for other, value in self._known:
            if other == key:
                known: Value = value
                return known
        new = work()
        self._known.append((key, new))
        return new
