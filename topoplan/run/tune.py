"""Run trials of plans one after another on the hosts of their spec; each is launched, measured and learned from."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from topoplan.bundle.bundle import files_of, usual_directory
from topoplan.bundle.trials_job import QueuedTrial, trial_draft
from topoplan.bundle.write import write_bundle
from topoplan.errors import TopoplanError
from topoplan.planner.plan import Plan
from topoplan.planner.tuning import Tried, Tuning, expected, hang_after_s
from topoplan.planner.view import spec_to_dict
from topoplan.remote.identities import Access
from topoplan.remote.ssh_config import Target
from topoplan.run import record as records
from topoplan.run.attempts import RETRYABLE_KINDS
from topoplan.run.bundle_reader import Bundle, read_bundle
from topoplan.run.events import Event, Tell
from topoplan.run.launch import Preflight
from topoplan.run.measurement import ended_of, lesson_of, planned
from topoplan.run.record import RunRecord
from topoplan.run.session import Outcome
from topoplan.run.settings import Settings
from topoplan.run.slurm_trials import slurm_trials, tried_in_slurm
from topoplan.run.trial import TrialSession
from topoplan.specs.spec import Spec

Why = Literal["clear", "enough", "none left", "interrupted", "refused", "held", "queued", "awaited"]
"""Why no more trials are run.

`clear`: the best plan is clear. `enough`: the requested number was run. `none left`: no other plan is left.
`interrupted`: the user wants to end. `refused`: the hosts refuse. `held`: something of a trial may still be running on
a host. `queued`: the trials are a Slurm job that is to be submitted. `awaited`: a Slurm job has not run all of them.
"""
_LOST_AFTER_S = 120.0
"""A host that was out of sight for this long ends a trial. A real run would wait, because it has more to lose."""


def trials_directory(spec: Spec) -> Path:
    """Return the directory for the bundles of a spec's trials."""
    usual = usual_directory(spec)
    return usual.with_name(f"{usual.name}-trials")


@dataclass(frozen=True, kw_only=True)
class Trials:
    """How the trials of a spec are run."""

    spec: Spec
    """The spec before anything was learned."""
    directory: Path
    """Directory for the bundles of the trials."""
    steps: int
    made_up: bool
    """Whether the trials run on synthetic samples."""
    targets: Mapping[str, Target]
    """By node name."""
    access: Access
    settings: Settings = field(default_factory=Settings)
    preflight: Callable[[Bundle], Preflight] | None = None
    """Preflight of the first trial; the later ones find the hosts as that one left them."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    tell: Tell = lambda event: None
    interrupts: Callable[[], int] = lambda: 0
    ending: Callable[[], int] = lambda: 0

    def run(self, tuning: Tuning, most: int) -> Why:
        """Run at most `most` trials, and let the tuning learn from each."""
        for number in range(1, most + 1):
            standing = tuning.standing
            if standing is None or standing.next is None:
                return "none left"
            if standing.is_clear:
                return "clear"
            self._tell_begin(standing.next, number, most)
            outcome = self._trial(tuning, standing.next, number)
            if outcome.end == "interrupted" or self.interrupts() or self.ending():
                return "interrupted"
            if outcome.end == "refused":
                return "refused"
            if outcome.running:
                return "held"
        standing = tuning.standing
        return "clear" if standing is not None and standing.is_clear else "enough"

    def _trial(self, tuning: Tuning, plan: Plan, number: int) -> Outcome:
        takes = expected(self.spec, plan, self.steps)
        draft = trial_draft(tuning.ranking.spec, plan, takes.steps, _output(plan), made_up=self.made_up)
        write_bundle(files_of(draft), self.directory / plan.id)
        bundle = read_bundle(self.directory / plan.id)
        session = TrialSession(
            bundle,
            self.targets,
            self.access,
            settings=replace(
                self.settings,
                stop_on_exit=True,
                hang_after_s=self.settings.hang_after_s or hang_after_s(self.spec, plan),
                lost_after_s=_LOST_AFTER_S,
            ),
            preflight=self.preflight(bundle) if self.preflight and number == 1 else None,
            tell=self.tell,
            interrupts=self.interrupts,
            ending=self.ending,
            secrets=self.secrets,
            steps=takes.steps,
            at_most_s=takes.at_most_s,
        )
        outcome = session.go()
        if outcome.run:
            tried = tried_of(records.load(outcome.run), replace(draft.spec, profile=self.spec.profile), plan)
            tuning.add(replace(tried, took_s=session.took_s, **_went_wrong(outcome)))
            self._tell_end(tuning.tried[-1])
        return outcome

    def _tell_begin(self, plan: Plan, number: int, most: int) -> None:
        takes = expected(self.spec, plan, self.steps)
        text = (
            f"trial {number} of at most {most}: {plan.id}, {plan.time.step_s:.3g} s per step predicted; about"
            f" {takes.seconds / 60:.0f} min, ended after {takes.at_most_s / 60:.0f}"
        )
        self.tell(Event(kind="trial", text=text, data={"trial": number, "plan": plan.id}))

    def _tell_end(self, tried: Tried) -> None:
        step_s = tried.step_s
        text = f"{tried.plan.id}: {tried.why}" if step_s is None else f"{tried.plan.id}: {step_s:.3g} s per step"
        data = {
            "plan": tried.plan.id,
            "step_s": step_s,
            "why": tried.why if step_s is None else None,
            "run": tried.run or None,
        }
        self.tell(Event(kind="trial", text=text, data=data))


def _went_wrong(outcome: Outcome) -> dict[str, Any]:
    """Return why a trial gave no step time, if it did not, and whether its plan is to blame."""
    failure = outcome.failure
    if failure is None:
        return {"why": "too few steps completed before it was stopped"}
    if failure.diagnosis is None:
        return {"why": failure.reason}
    kind = failure.diagnosis.kind
    return {
        "why": f"{failure.reason}: {failure.diagnosis.cause}",
        "is_lost": kind in RETRYABLE_KINDS and kind != "hang",
    }


def tried_of(record: RunRecord, spec: Spec, plan: Plan) -> Tried:
    """Return what the run of a trial has left."""
    lesson, ended = lesson_of(record, spec, plan), ended_of(record, spec, plan)
    return Tried(plan=plan, lesson=lesson, ended=ended, run=record.run_id)


def tried_in_jobs(directory: Path, spec: Spec) -> tuple[list[Tried], list[Path]]:
    """Return results of trials of the same job that ran under Slurm, and the bundles of those that are not over."""
    tried, awaited = list[Tried](), list[Path]()
    for one in slurm_trials(directory):
        if _same_for_all_trials(one.recorded.spec) != _same_for_all_trials(spec):
            continue
        recorded = replace(one.recorded, spec=replace(one.recorded.spec, profile=spec.profile))
        if one.is_pending:
            awaited.append(one.directory)
        elif found := tried_in_slurm(one, recorded):
            tried.append(found)
    return tried, awaited


def queued_trials(tuning: Tuning, plans: Sequence[Plan], steps: int, *, made_up: bool) -> list[QueuedTrial]:
    """Return trials of these plans for a Slurm job. Raises what `trial_draft` raises."""
    found = []
    for plan in plans:
        takes = expected(tuning.ranking.spec, plan, steps)
        draft = trial_draft(tuning.ranking.spec, plan, takes.steps, _output(plan), made_up=made_up)
        quiet_s = hang_after_s(tuning.ranking.spec, plan)
        found.append(QueuedTrial(draft=draft, steps=takes.steps, at_most_s=takes.at_most_s, quiet_s=quiet_s))
    return found


def _output(plan: Plan) -> str:
    """Return a new output directory each time, because trainers append to an existing log."""
    return f"saves/trials/{plan.id}-{secrets.token_hex(4)}"


def tried_before(directory: Path, spec: Spec) -> Iterator[Tried]:
    """Yield the measurements of earlier trials of the same job with bundles in this directory, oldest first."""
    for record in records.runs():
        if not isinstance(record, RunRecord) or not record.is_over or Path(record.bundle).parent != directory.resolve():
            continue
        try:
            recorded = planned(record)
        except TopoplanError:
            continue
        if _same_for_all_trials(recorded.spec) == _same_for_all_trials(spec):
            found = tried_of(record, replace(recorded.spec, profile=spec.profile), recorded.plan)
            if found.lesson or found.ended:
                yield found


def _same_for_all_trials(spec: Spec) -> dict[str, Any]:
    """Return the part of a spec that no trial changes."""
    job = replace(spec.job, trainer={}, dataset=None, dataset_dir=None, epochs=1.0)
    return spec_to_dict(replace(spec, job=job, profile=None), whole=True)
