"""One optimizer step of a plan as events in time."""

from __future__ import annotations

from topoplan.engines.data_parallel import timeline as sharded
from topoplan.engines.megatron import timeline as megatron
from topoplan.engines.timeline import Timeline
from topoplan.planner.case import case_of
from topoplan.planner.plan import Plan
from topoplan.specs.spec import Spec


def timeline(spec: Spec, plan: Plan) -> Timeline:
    """Simulate the step of a plan."""
    simulate = megatron.timeline if plan.layout.is_megatron else sharded.timeline
    return simulate(case_of(spec, plan.layout.backend), plan.layout, plan.time)
