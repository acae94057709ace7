"""The order of plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from topoplan.planner.plan import Ranked
from topoplan.units import GIB

TIE = 0.01
"""Plans whose throughput differs by less are equally fast: predictions do not see further."""


_Plan = TypeVar("_Plan", bound=Ranked)


def ranked(plans: Sequence[_Plan]) -> list[_Plan]:
    """Fastest first. Within 1% of the fastest that is left: more memory to spare (in whole GiB), then the simpler."""
    by_speed = sorted(plans, key=lambda plan: (-plan.tokens_per_s_per_gpu, plan.id))
    order: list[_Plan] = []
    start = 0
    while start < len(by_speed):
        limit = by_speed[start].tokens_per_s_per_gpu * (1.0 - TIE)
        end = start
        while end < len(by_speed) and by_speed[end].tokens_per_s_per_gpu >= limit:
            end += 1
        order += sorted(
            by_speed[start:end],
            key=lambda plan: (
                plan.memory.device_bytes // GIB,
                plan.layout.complexity,
                -plan.tokens_per_s_per_gpu,
                plan.id,
                plan.memory.device_bytes,
            ),
        )
        start = end
    return order
