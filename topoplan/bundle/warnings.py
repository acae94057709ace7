"""Warnings about a bundle, before and after it is written."""

from __future__ import annotations

from topoplan.bundle.draft import Draft, draft_of
from topoplan.bundle.slurm import slurm_warnings
from topoplan.errors import InputError
from topoplan.planner.plan import Plan
from topoplan.planner.predict import plan_under
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import writer_of


def warnings_of(draft: Draft) -> tuple[str, ...]:
    """Return the warnings in the README, which are also shown on the terminal."""
    found = tuple(dict.fromkeys((*draft.plan.warnings, *draft.trainer.warnings)))
    return found if draft.scheduler is None else (*found, *slurm_warnings(draft))


def warnings_and_refusal(spec: Spec, plan: Plan) -> tuple[tuple[str, ...], str]:
    """Return the warnings of a plan's bundle, and why it cannot be written (empty if it can)."""
    try:
        under = plan_under(spec, plan, writer_of(spec, plan.layout, spec.trainer)[0].name)
        return warnings_of(draft_of(spec, under, trainer=spec.trainer)), ""
    except InputError as error:
        return tuple(dict.fromkeys((*plan.warnings, *plan.caveats))), str(error)
