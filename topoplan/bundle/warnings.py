"""What the reader of a bundle should mind, before and after it is written."""

from __future__ import annotations

from topoplan.bundle.draft import Draft, draft_of
from topoplan.bundle.slurm import slurm_warnings
from topoplan.errors import InputError
from topoplan.planner.plan import Plan
from topoplan.planner.predict import plan_under
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import writer_of


def warnings_of(draft: Draft) -> tuple[str, ...]:
    """What the README warns of; a terminal shows it too."""
    found = tuple(dict.fromkeys((*draft.plan.warnings, *draft.trainer.warnings)))
    return found if draft.scheduler is None else (*found, *slurm_warnings(draft))


def forewarned(spec: Spec, plan: Plan) -> tuple[tuple[str, ...], str]:
    """What a bundle of this plan would warn of, and why none can be written; empty where one can."""
    try:
        under = plan_under(spec, plan, writer_of(spec, plan.layout, spec.trainer)[0].name)
        return warnings_of(draft_of(spec, under, trainer=spec.trainer)), ""
    except InputError as error:
        return tuple(dict.fromkeys((*plan.warnings, *plan.caveats))), str(error)
