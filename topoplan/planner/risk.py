"""What may go wrong with a plan, in one word each, and which plan to choose for low risk."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from topoplan.planner.plan import Plan, Ranked, Ranking

TIGHT_SHARE = 0.02
"""A plan is tight if less than this fraction of the card is left beyond plan and margin: 1.6 GiB of 80. A second
process on the card, or a longer sample than planned for, takes as much."""
SAFE_SHARE = 0.10
"""Fraction of the card that a safe plan leaves beyond its margin: by this much margins are wider for models that nobody
has measured."""
WIDE_BAND = 0.40
"""How much longer than predicted a step may take before its time counts as unproven. Bands earned by measured runs of
the same kind are narrower; wider ones are derived from other entries, or from runs that scatter as much."""

LOOKED_AT = 400
"""Number of plans of a search among which one with room is looked for."""

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


def needs_ways_out(ranking: Ranking) -> bool:
    """Return whether a complete search has no plan, or a tight best plan and none that leaves room."""
    if ranking.searched < 1.0 or not ranking.plans:
        return ranking.searched == 1.0
    return spare_share(ranking.plans[0]) < TIGHT_SHARE and not any(map(has_room, islice(ranking.plans, LOOKED_AT)))


def tags_of(plan: Plan) -> tuple[str, ...]:
    """Return the risks of a plan, as keys of TAGS."""
    applies = {
        "tight": spare_share(plan) < TIGHT_SHARE,
        "caveat": bool(plan.caveats),
        "unproven": plan.time.band_s[1] / plan.time.step_s - 1.0 >= WIDE_BAND,
    }
    return tuple(tag for tag in TAGS if applies[tag])


def first_safe(order: Iterable[Ranked]) -> int | None:
    """Return the index, from 0, of the first plan that has no caveat and memory to spare, or None."""
    safe = (place for place, plan in enumerate(order) if not plan.caveats and has_room(plan))
    return next(safe, None)
