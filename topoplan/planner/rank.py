"""The order of plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from topoplan.planner.plan import Candidate, Plan, Ranked
from topoplan.units import GIB

TIE = 0.01
"""Plans whose throughput differs by less are considered equally fast; predictions are not more precise."""

CAVEAT_COST = 0.03
"""How much faster a plan with a caveat must be to lead. This is what a person may give up for a run without known
problems, and far less than a run costs that has to be repeated."""

_DIGITS = 6
"""Decimal digits at which speeds are compared: sums differ in their last digits between Python versions."""


_Plan = TypeVar("_Plan", Plan, Candidate)


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
            key=lambda plan: (
                bool(plan.caveats),
                plan.memory.device_bytes // GIB,
                plan.layout.complexity,
                -round(plan.tokens_per_s_per_gpu, _DIGITS),
                plan.id,
                plan.memory.device_bytes,
            ),
        )
        start = end
    return order


def worth(plan: Ranked) -> float:
    """Return the speed by which a plan is ordered, in tokens/s per GPU."""
    return round(plan.tokens_per_s_per_gpu * (1.0 - CAVEAT_COST if plan.caveats else 1.0), _DIGITS)
