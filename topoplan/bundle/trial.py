"""The bundle of a trial: a plan's own, limited to a few steps, saving nothing, with generated samples if needed."""

from __future__ import annotations

from dataclasses import replace

from topoplan.bundle.draft import NO_SCHEDULER, Draft, draft_of
from topoplan.errors import InputError
from topoplan.planner.plan import Plan
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import writer_of
from topoplan.trainers.trials import GENERATED, refuse_images


def trial_draft(spec: Spec, plan: Plan, steps: int, output: str, *, made_up: bool) -> Draft:
    """Return the draft of a trial, with an output directory of its own.

    Raises SpecError if samples cannot be generated, InputError for a trainer without trials, and what `draft_of`
    raises.
    """
    if made_up:
        refuse_images(spec)
        spec = replace(spec, job=replace(spec.job, dataset=GENERATED, dataset_dir=None))
    writer, way = writer_of(spec, plan.layout, plan.trainer)
    if way.trial is None:
        raise InputError(f"no trials are known of {writer.title}", where=f"plan {plan.id}")
    return draft_of(replace(spec, job=way.trial.job(spec, steps, output)), plan, NO_SCHEDULER, writer.name)
