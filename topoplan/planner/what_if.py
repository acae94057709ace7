"""How the best plan of a spec changes when the spec changes, and how many nodes a job needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from topoplan.engines.registry import engine_of
from topoplan.errors import LayoutError
from topoplan.layout.forms import layout_from_dict, layout_to_dict
from topoplan.layout.layout import Layout
from topoplan.planner.effort import Effort, effort_of
from topoplan.planner.explain import memory_rejection
from topoplan.planner.plan import Counts, Plan, Ranking
from topoplan.planner.predict import memory_of, plan_of
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.trainers.registry import unpredicted

Search = Callable[[Spec], Ranking]
"""`planner.search.rank`, or a wrapper of it."""

_DERIVED = ("dp", "gradient_accumulation_steps")
"""Layout keys that follow from the other keys and the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search of one spec found."""

    spec: Spec | None
    """None if the spec has a pin that it cannot satisfy."""
    best: Plan | None = None
    counts: Counts = field(default_factory=Counts)
    reason: str = ""
    """Why there is no best plan."""
    is_legal: bool = True
    """Whether some layout is legal, even if none fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of a plan under other conditions. Its dp is derived from the number of GPUs."""

    layout: Layout | None
    """None if its degrees no longer divide the GPUs or the batch."""
    plan: Plan | None = None
    """None if it is illegal or does not fit."""
    rank: int | None = None
    """None if the plan is not ranked, or if a search leaves it out."""
    slower: float = 0.0
    """Fraction of the best plan's throughput that it loses."""
    rule: str = ""
    """`memory`, `job` if its backend cannot run the job, `layout`, or the rule that it breaks."""
    reason: str = ""
    """Why it is not ranked."""
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One set of changes, and what they lead to."""

    changes: Mapping[str, str]
    """Key -> value as it was written."""
    found: Found
    fate: Fate | None
    """What becomes of the previous best plan; None if there was none, or nothing to compare it with."""


def found_by(spec: Spec, search: Search) -> tuple[Found, Ranking | None]:
    """Return the best plan of a spec, or why there is none. Raises SpecError or ModelError like `search.rank`."""
    try:
        ranking = search(spec)
    except LayoutError as error:
        return Found(spec=spec, reason=str(error), is_legal=False), None
    if ranking.plans:
        return Found(spec=spec, best=ranking.plans[0], counts=ranking.counts), ranking
    misses = [out for out in ranking.rejected if out.rule == "memory"]
    nearest = f"; the nearest, {misses[0].layout.id}: {misses[0].reason}" if misses else ""
    nearest += f"; {misses[0].fix}" if misses and misses[0].fix else ""
    return Found(spec=spec, counts=ranking.counts, reason=f"no layout fits{nearest}"), ranking


def outcome(changes: Mapping[str, str], spec: Spec, before: Plan | None, search: Search) -> Outcome:
    """Return the best plan of a changed spec, and what becomes of the previous best plan."""
    found, ranking = found_by(spec, search)
    fate = None if before is None else fate_of(spec, before, ranking)
    return Outcome(changes=changes, found=found, fate=fate)


def fate_of(spec: Spec, plan: Plan, ranking: Ranking | None) -> Fate:
    """Return what becomes of another spec's plan in this one, whose ranking is known (None if no layout is legal)."""
    form = {key: value for key, value in layout_to_dict(plan.layout).items() if key not in _DERIVED}
    try:
        layout = layout_from_dict(form, spec.cluster, spec.model, spec.job)
    except LayoutError as error:
        return Fate(layout=None, rule="layout", reason=error.what, fix=error.remedy)
    for refusal in unpredicted(spec, layout.backend):
        return Fate(layout=layout, rule="job", reason=refusal.what, fix=refusal.remedy)
    case = case_of(spec, layout.backend)
    if broken := engine_of(layout.backend).verdict(case, layout, searched=True):
        return Fate(layout=layout, rule=broken.rule, reason=broken.equation, fix=broken.fix)
    memory = memory_of(case, layout)
    if not memory.fits:
        out = memory_rejection(spec, layout)
        return Fate(layout=layout, rule=out.rule, reason=out.reason, fix=out.fix)
    same = plan_of(spec, case, layout, memory)
    if ranking is None or not ranking.plans:
        return Fate(layout=layout, plan=same)
    rank = next((rank for rank, other in enumerate(ranking.plans.layouts, start=1) if other == layout), None)
    slower = 1.0 - same.tokens_per_s_per_gpu / ranking.plans[0].tokens_per_s_per_gpu
    return Fate(layout=layout, plan=same, rank=rank, slower=slower)


GRAIN = 1024
"""Tokens in which the longest sequences are searched."""
MOST_TOKENS = 2**20
"""The longest sequences tried for a model that states no context of its own."""


def longest(spec_of: Callable[[int], Spec], search: Search) -> int:
    """Return the longest sequences with which a layout fits, in multiples of GRAIN tokens; GRAIN if none fits.

    They are doubled until nothing fits or the model's own context is reached, then bisected, as memory grows with them.
    `spec_of` returns the spec for a number of tokens. Raises what it raises, except for a pin that it cannot satisfy.
    """

    def fits(grains: int) -> bool:
        try:
            return found_by(spec_of(grains * GRAIN), search)[0].best is not None
        except LayoutError:
            return False

    most = max(1, (spec_of(GRAIN).model.max_position_embeddings or MOST_TOKENS) // GRAIN)
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(low, 1) * GRAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """The result for one number of nodes."""

    nodes: int
    found: Found
    effort: Effort | None
    """Effort of the best plan; None if nothing fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The results for every number of nodes that was searched, from one up without a gap."""

    steps: int
    """Optimizer steps of the job."""
    limit_s: float
    is_sure: bool
    """Whether the limit applies to the upper end of the band, instead of to the prediction itself."""
    rows: tuple[SizeRow, ...]

    @property
    def answer(self) -> SizeRow | None:
        """The fewest nodes with which the job finishes in time."""
        return next((row for row in self.rows if self.hours(row) <= self.limit_s / 3600), None)

    @property
    def smallest(self) -> SizeRow | None:
        """The fewest nodes on which the job fits at all."""
        return next((row for row in self.rows if row.found.best), None)

    def hours(self, row: SizeRow) -> float:
        """Return the hours of the job that are compared with the limit; infinite if nothing fits."""
        if row.effort is None:
            return math.inf
        return row.effort.band_hours[1] if self.is_sure else row.effort.hours


def size(
    spec_of: Callable[[int], Spec], search: Search, *, steps: int, limit_s: float, max_nodes: int, is_sure: bool
) -> Sizing:
    """Search 1, 2, 3, ... nodes and stop at the first number that finishes in time, or at `max_nodes`.

    No number is skipped: more nodes are not always faster, because the batch and the layers must be divisible.
    `spec_of` returns the spec for a number of nodes. Raises what `spec_of` raises, except for a pin that a number
    cannot satisfy.
    """
    rows: list[SizeRow] = []
    for nodes in range(1, max_nodes + 1):
        try:
            found, _ = found_by(spec_of(nodes), search)
        except LayoutError as error:
            found = Found(spec=None, reason=str(error), is_legal=False)
        effort = effort_of(found.spec, found.best, steps) if found.spec and found.best else None
        rows.append(SizeRow(nodes=nodes, found=found, effort=effort))
        sizing = Sizing(steps=steps, limit_s=limit_s, is_sure=is_sure, rows=tuple(rows))
        if sizing.answer:
            break
    return sizing
