"""What may go wrong with a plan, in a word each, and which plan to take so that little may."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from topoplan.planner.plan import Plan, Ranked, Ranking

TIGHT_SHARE = 0.02
"""Part of the card that is left beyond plan and margin, below which a plan is tight: 1.6 GiB of 80. A second process on
the card, or a longer sample than was planned for, takes as much."""
SAFE_SHARE = 0.10
"""What a safe plan leaves beyond its margin: as much as the margins of models that nobody measured are wider."""
WIDE_BAND = 0.40
"""How much longer than predicted a step may take, from which on its time is unproven. Bands that measured runs of the
kind have earned are narrower; wider ones are borrowed, or of runs that scatter as much."""

LOOKED_AT = 400
"""Plans of a search among which one with room is looked for."""

TAGS = {
    "tight": "little memory is left beyond the margin",
    "caveat": "known trouble",
    "unproven": "few or scattered measurements stand behind its speed",
}
"""Each risk and what it means."""


def spare_share(plan: Ranked) -> float:
    """Part of the card that is left beyond the plan and its margin."""
    return -plan.memory.excess_bytes / plan.memory.capacity_bytes


def has_room(plan: Ranked) -> bool:
    """What a safe plan leaves of the card is left."""
    return spare_share(plan) >= SAFE_SHARE


def needs_ways_out(ranking: Ranking) -> bool:
    """A whole search has no plan, or its best one is tight and none leaves room."""
    if ranking.searched < 1.0 or not ranking.plans:
        return ranking.searched == 1.0
    return spare_share(ranking.plans[0]) < TIGHT_SHARE and not any(map(has_room, islice(ranking.plans, LOOKED_AT)))


def tags_of(plan: Plan) -> tuple[str, ...]:
    """The risks of a plan, of TAGS."""
    return tuple(_tags(plan))


def _tags(plan: Plan) -> Iterator[str]:
    if spare_share(plan) < TIGHT_SHARE:
        yield "tight"
    if plan.caveats:
        yield "caveat"
    if plan.time.band_s[1] / plan.time.step_s - 1.0 >= WIDE_BAND:
        yield "unproven"


def first_safe(order: Iterable[Ranked]) -> int | None:
    """The place, from 0, of the first of these plans that has no caveat and memory to spare."""
    safe = (place for place, plan in enumerate(order) if not plan.caveats and has_room(plan))
    return next(safe, None)
