"""Timelines of predicted plans, for tests of their drawings."""

from typing import Any

from tests.engines.samples import DENSE, spec_of
from tests.planner.sharded_cases import plan_of
from topoplan.engines.timeline import Timeline
from topoplan.planner.account import timeline
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.specs.spec import Spec


def line_of(*, model: str = DENSE, job: dict[str, Any] | None = None, **form: Any) -> tuple[Spec, Plan, Timeline]:
    """Return the timeline of a layout of the megatron backend on four H100 nodes."""
    spec = spec_of(model, **(job or {}))
    plan = predict(spec, {"backend": "megatron", "tp": 2, **form})
    return spec, plan, timeline(spec, plan)


def lanes_of(model: str, form: dict[str, Any], other: dict[str, Any]) -> tuple[Spec, Plan, Timeline]:
    """Return the timeline of a purely data-parallel plan."""
    spec, plan = plan_of(model, form, other)
    return spec, plan, timeline(spec, plan)
