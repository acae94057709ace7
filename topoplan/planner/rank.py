"""The order of plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from topoplan.planner.plan import Ranked
from topoplan.units import GIB

TIE = 0.01
"""Plans whose throughput differs by less are equally fast: predictions do not see further."""

CAVEAT_COST = 0.03
"""What a plan with a caveat has to be faster by to lead. It is what a person may give for a run without known trouble,
and far less than a run costs that has to be done again."""

_DIGITS = 6
"""To which speeds are compared: sums differ in their last digits from one Python to another."""


_Plan = TypeVar("_Plan", bound=Ranked)


def ranked(plans: Sequence[_Plan]) -> list[_Plan]:
    """Fastest first, a plan with a caveat behind a plain one that is at most 3% slower.

    Within 1% of the fastest that is left: the plain ones, then more memory to spare (in whole GiB), then the simpler.
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
    """The speed that a plan is ordered by, in tokens/s a GPU."""
    return round(plan.tokens_per_s_per_gpu * (1.0 - CAVEAT_COST if plan.caveats else 1.0), _DIGITS)
