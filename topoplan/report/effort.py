"""How long a whole job takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from topoplan.planner.plan import Plan
from topoplan.planner.view import rounded
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import steps_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The whole job under one plan."""

    steps: int
    hours: float
    gpu_hours: float


def job_steps(spec: Spec, plan: Plan) -> int | None:
    """Optimizer steps of the job under one plan, or None when the spec does not say how many samples there are."""
    return steps_of(spec.job, plan.layout.backend, plan.trainer)


def job_effort(spec: Spec, plan: Plan) -> Effort | None:
    """Steps, hours and GPU-hours of the job, without start-up, evaluation and checkpoints."""
    steps = job_steps(spec, plan)
    return None if steps is None else effort_of(steps, plan)


def effort_of(steps: int, plan: Plan) -> Effort:
    """Hours and GPU-hours of so many steps."""
    hours = steps * plan.time.step_s / 3600
    return Effort(steps=steps, hours=hours, gpu_hours=hours * plan.layout.world_size)


def effort_to_dict(effort: Effort | None) -> dict[str, Any]:
    """`job_time` as an entry of a plan's JSON form; nothing when it is not known."""
    if effort is None:
        return {}
    return {
        "job_time": {
            "steps": effort.steps,
            "hours": rounded(effort.hours),
            "gpu_hours": rounded(effort.gpu_hours),
        }
    }
