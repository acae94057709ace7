"""The terms of a plan's time and memory, whichever way its backend splits the work."""

from __future__ import annotations

from topoplan.planner.breakdown import Breakdown, breakdown
from topoplan.planner.plan import Plan
from topoplan.planner.sharded_memory import ShardedBreakdown, sharded_breakdown
from topoplan.planner.sharded_time import ShardedTimeBreakdown, sharded_time_breakdown
from topoplan.planner.time_breakdown import TimeBreakdown, time_breakdown
from topoplan.specs.spec import Spec

MemoryAccount = Breakdown | ShardedBreakdown
TimeAccount = TimeBreakdown | ShardedTimeBreakdown


def memory_account(spec: Spec, plan: Plan) -> MemoryAccount:
    """The terms of `plan.memory`, which has to list every stage (`planner.predict.predict`)."""
    return breakdown(spec, plan) if plan.layout.is_megatron else sharded_breakdown(spec, plan)


def time_account(spec: Spec, plan: Plan) -> TimeAccount:
    """The terms of `plan.time`."""
    return time_breakdown(spec, plan) if plan.layout.is_megatron else sharded_time_breakdown(spec, plan)
