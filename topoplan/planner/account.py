"""The accounts of a plan: where its memory and its time go, and its step as events."""

from __future__ import annotations

from topoplan.engines.account import MemoryAccount, TimeAccount
from topoplan.engines.registry import engine_of
from topoplan.engines.timeline import Timeline
from topoplan.planner.plan import Plan
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of


def memory_account(spec: Spec, plan: Plan) -> MemoryAccount:
    """Return the terms of `plan.memory`, which must list every stage (`planner.predict.predict`)."""
    layout = plan.layout
    return engine_of(layout.backend).memory_account(case_of(spec, layout.backend), layout, plan.memory)


def time_account(spec: Spec, plan: Plan) -> TimeAccount:
    """Return the terms of `plan.time`."""
    layout = plan.layout
    return engine_of(layout.backend).time_account(case_of(spec, layout.backend), layout, plan.time)


def timeline(spec: Spec, plan: Plan) -> Timeline:
    """Return the simulated step of a plan."""
    layout = plan.layout
    return engine_of(layout.backend).timeline(case_of(spec, layout.backend), layout, plan.time)
