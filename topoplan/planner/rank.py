"""The order of plans, what may go wrong with a plan, in one word each, and which plan to choose for low risk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TypeVar

from topoplan.planner.plan import Candidate, Plan, Ranked, Ranking
from topoplan.specs.case import Case
from topoplan.units import GIB

TIE = 0.01
"""Plans whose throughput differs by less are considered equally fast; predictions are not more precise."""

CAVEAT_COST = 0.03
"""How much faster a plan with a caveat must be to lead. This is what a person may give up for a run without known
problems, and far less than a run costs that has to be repeated."""

_DIGITS = 6
"""Decimal digits at which speeds are compared: sums differ in their last digits between Python versions."""


_Plan = TypeVar("_Plan", Plan, Candidate)


_PREFERRED: tuple[tuple[str, Callable[[Ranked], float]], ...] = (
    ("has no known problem", lambda plan: bool(plan.caveats)),
    ("needs less memory", lambda plan: plan.memory.device_bytes // GIB),
    ("is simpler", lambda plan: plan.layout.complexity),
    ("is a little faster", lambda plan: -round(plan.tokens_per_s_per_gpu, _DIGITS)),
)
"""What decides between plans that are equally fast, the weightiest first: in words, and as a key of sorting."""


def ranked(plans: Sequence[_Plan]) -> list[_Plan]:
    """Return the plans fastest first, a plan with a caveat after a plain one that is at most 3% slower.

    Plans within 1% of the fastest remaining one are ordered by: no caveat, then less device memory (in whole GiB), then
    the simpler layout.
    """
    by_speed = sorted(plans, key=lambda plan: (-worth(plan), plan.id))
    order: list[_Plan] = []
    start = 0
    while start < len(by_speed):
        limit = worth(by_speed[start]) * (1.0 - TIE)
        end = start
        while end < len(by_speed) and worth(by_speed[end]) >= limit:
            end += 1
        order += sorted(
            by_speed[start:end],
            key=lambda plan: (*(key(plan) for _, key in _PREFERRED), plan.id, plan.memory.device_bytes),
        )
        start = end
    return order


def why_preferred(first: Ranked, second: Ranked) -> str:
    """Return in words why of two equally fast plans the first comes first."""
    return next((words for words, key in _PREFERRED if key(first) != key(second)), "comes first by its name")


def worth(plan: Ranked) -> float:
    """Return the speed by which a plan is ordered, in tokens/s per GPU."""
    return round(plan.tokens_per_s_per_gpu * (1.0 - CAVEAT_COST if plan.caveats else 1.0), _DIGITS)


def with_variant(order: Sequence[_Plan], variant: _Plan) -> list[_Plan]:
    """Return ranked plans with a slower variant of one of them, behind all that are at least as fast.

    It never leads, so that the best plan does not depend on whether variants were looked for.
    """
    place = max((place for place, plan in enumerate(order) if worth(plan) >= worth(variant)), default=0) + 1
    found = list(order)
    found.insert(place, variant)
    return found


TIGHT_SHARE = 0.02
"""A plan is tight if less than this fraction of the card is left beyond plan and margin: 1.6 GiB of 80. A second
process on the card, or a longer sample than planned for, takes as much."""
SAFE_SHARE = 0.10
"""Fraction of the card that a safe plan leaves beyond its margin: by this much margins are wider for models that nobody
has measured."""
WIDE_BAND = 0.40
"""How much longer than predicted a step may take before its time counts as unproven. Bands earned by measured runs of
the same kind are narrower; wider ones are derived from other entries, or from runs that scatter as much."""

_LOOKED_AT = 400
"""Number of plans of a search among which one with room is looked for, besides the safe plan."""

TAGS = {
    "tight": "little memory is left beyond the margin",
    "caveat": "a known problem applies",
    "unproven": "its speed rests on few or scattered measurements",
}
"""Each risk with its meaning."""


def spare_share(plan: Ranked) -> float:
    """Return the fraction of the card that is left beyond the plan and its margin."""
    return -plan.memory.excess_bytes / plan.memory.capacity_bytes


def has_room(plan: Ranked) -> bool:
    """Return whether a plan leaves as much of the card as a safe plan has to."""
    return spare_share(plan) >= SAFE_SHARE


def on_smaller_card(case: Case) -> Case:
    """Return the case on a smaller card, which fits exactly the layouts that leave room on the case's own card."""
    cluster = case.cluster
    card = replace(cluster.gpu, memory_bytes=int(cluster.gpu.memory_bytes * (1.0 - SAFE_SHARE)))
    margin = None if cluster.margin is None else cluster.margin / (1.0 - SAFE_SHARE)  # as many bytes as before
    return replace(case, cluster=replace(cluster, gpu=card, margin=margin))


def first_with_room(ranking: Ranking) -> Plan | None:
    """Return the first plan that leaves room, whatever its caveats, or None."""
    plans, safe = ranking.plans, ranking.safe
    last = () if safe is None else (plans[safe],)
    return next(filter(has_room, chain(islice(plans, _LOOKED_AT), last)), None)


def needs_ways_out(ranking: Ranking) -> bool:
    """Return whether a complete search has no plan, or a tight best plan and none that leaves room."""
    if ranking.searched < 1.0 or not ranking.plans:
        return ranking.searched == 1.0
    return spare_share(ranking.plans[0]) < TIGHT_SHARE and first_with_room(ranking) is None


def tags_of(plan: Plan) -> tuple[str, ...]:
    """Return the risks of a plan, as keys of TAGS."""
    applies = {
        "tight": spare_share(plan) < TIGHT_SHARE,
        "caveat": bool(plan.caveats),
        "unproven": plan.time.band_s[1] / plan.time.step_s - 1.0 >= WIDE_BAND,
    }
    return tuple(tag for tag in TAGS if applies[tag])


def is_safe(plan: Ranked) -> bool:
    """Return whether a plan has no caveat and memory to spare."""
    return not plan.caveats and has_room(plan)


def first_safe(order: Iterable[Ranked]) -> int | None:
    """Return the index, from 0, of the first safe plan, or None."""
    return next((place for place, plan in enumerate(order) if is_safe(plan)), None)
