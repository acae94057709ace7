"""Trials of plans: run one after another on the hosts of their spec, each launched, measured and learned from.

Trials may also have run as Slurm jobs (`bundle/trials_job.py`), each job in a directory of its own.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from topoplan.bundle.bundle import files_of, usual_directory
from topoplan.bundle.plan_file import RecordedPlan, read_plan_file
from topoplan.bundle.trials_job import JOB_OVER, RESULT, RESULTS, QueuedTrial, trial_draft
from topoplan.bundle.write import write_bundle
from topoplan.errors import TopoplanError
from topoplan.planner.logged import open_end
from topoplan.planner.plan import Plan
from topoplan.planner.tuning import Tried, Tuning, expected, hang_after_s
from topoplan.planner.view import spec_to_dict
from topoplan.remote.identities import Access
from topoplan.remote.ssh_config import Target
from topoplan.run import record as records
from topoplan.run.attempts import RETRYABLE_KINDS, RetryingLaunch
from topoplan.run.bundle_reader import Bundle, read_bundle
from topoplan.run.diagnose import diagnose
from topoplan.run.events import Event, Tell
from topoplan.run.launch import Preflight
from topoplan.run.measurement import ended_in, ended_of, ends_of, lesson_in, lesson_of, path_of_file, planned
from topoplan.run.reachability import duration_text
from topoplan.run.record import RunRecord
from topoplan.run.session import Outcome
from topoplan.run.settings import Settings
from topoplan.run.watch import Watch
from topoplan.specs.spec import Spec
from topoplan.trainers.trainer import PLAN_FILE

Why = Literal["clear", "enough", "none left", "interrupted", "refused", "held", "queued", "awaited"]
"""Why no more trials are run.

`clear`: the best plan is clear. `enough`: the requested number was run. `none left`: no other plan is left.
`interrupted`: the user wants to end. `refused`: the hosts refuse. `held`: something of a trial may still be running on
a host. `queued`: the trials are a Slurm job that is to be submitted. `awaited`: a Slurm job has not run all of them.
"""
_TOO_FEW = "too few steps completed before it was stopped"
_NOT_THE_PLANS = RETRYABLE_KINDS - {"hang"}
"""Kinds of failures that another trial of the same plan may not meet."""
_LOST_AFTER_S = 120.0
"""A host that was out of sight for this long ends a trial. A real run would wait, because it has more to lose."""
_JOB = "job-"
_END_BYTES = 1 << 20
"""Size of the end of a log that is read to find out why it ended."""
_WHY = {
    "time": _TOO_FEW,
    "steps": _TOO_FEW,
    "hang": "nothing was logged any more: it was hanging",
}


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
        why = tried.why if step_s is None else None
        data = {"plan": tried.plan.id, "step_s": step_s, "why": why, "run": tried.run or None}
        self.tell(Event(kind="trial", text=text, data=data))


def _went_wrong(outcome: Outcome) -> dict[str, Any]:
    """Return why a trial gave no step time, if it did not, and whether its plan is to blame."""
    failure = outcome.failure
    if failure is None:
        return {"why": _TOO_FEW}
    if failure.diagnosis is None:
        return {"why": failure.reason}
    said = failure.diagnosis
    return {"why": f"{failure.reason}: {said.cause}", "is_lost": said.kind in _NOT_THE_PLANS}


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
        elif found := tried_in_slurm(replace(one, recorded=recorded)):
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
    """Return an output directory that is new, because trainers append to an existing log."""
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


class TrialSession(RetryingLaunch):
    """A session that ends its run before the trainer finishes, when it would save the model."""

    WAIT_REASON: ClassVar[str] = "the next trial waits until nothing of this one can be left"

    def __init__(self, *launch: Any, steps: int, at_most_s: float, **options: Any) -> None:
        """`launch` and `options` are those of a launch; the trial may take `at_most_s` from its start on the hosts."""
        super().__init__(*launch, **options)
        self._wanted_steps, self._at_most_s = steps, at_most_s
        self._started_s: float | None = None
        self._watched: Watch | None = None
        self.took_s = 0.0
        """Seconds for which the trial occupied the hosts."""

    def go(self) -> Outcome:
        """Perform the session and return its outcome."""
        try:
            return super().go()
        finally:
            self.took_s = self._age_s

    @property
    def _age_s(self) -> float:
        return 0.0 if self._started_s is None else time.monotonic() - self._started_s

    @property
    def _ends_at(self) -> int | None:
        return self._wanted_steps

    def _start_all(self) -> Outcome | None:
        self._started_s = time.monotonic()
        return super()._start_all()

    def _may_detach(self, watch: Watch) -> bool:
        self._watched = watch
        return watch.status.step >= self._wanted_steps or self._age_s >= self._at_most_s

    def _detached(self) -> Outcome:
        """Stop the run instead of leaving it running: it has enough steps, or has taken too long."""
        watch = self._watched
        step, nodes = (watch.status.step, watch.nodes) if watch is not None else (0, ())
        enough = step >= self._wanted_steps
        reason = f"{step} steps are enough" if enough else f"{step} steps after {duration_text(self._at_most_s)}"
        self._step("stop", f"{reason}: ending the trial")
        left = self._stop_all(watch)
        if not left:
            self._update_record("stopped", 0, reason=f"topoplan tune: {reason}", nodes=nodes)
        return Outcome(end="stopped", code=0, run=self._run, errors=left, running=tuple(left))

    def _watch(self) -> Outcome:
        """Watch the run; if a host was lost, wait until nothing of this trial is left there."""
        outcome = super()._watch()
        if outcome.end not in ("failed", "stopped") or not outcome.errors:
            return outcome
        return self._wait_until_nothing_is_left(outcome) or replace(outcome, errors={}, running=())


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmTrial:
    """The result of a trial in a Slurm job."""

    directory: Path
    """Directory of the trial's bundle."""
    recorded: RecordedPlan
    result: Mapping[str, Any]
    """What the job's script wrote when the trial was over; empty before."""
    is_pending: bool
    """Whether the trial is not over, and its job may still run or finish it."""


def next_job_directory(directory: Path) -> Path:
    """Return the directory for the next job."""
    return directory / f"{_JOB}{max([0, *map(_number, _jobs(directory))]) + 1}"


def slurm_trials(directory: Path) -> Iterator[SlurmTrial]:
    """Yield the trials of all jobs in a directory, in the order in which they ran; unreadable bundles are skipped."""
    for job in sorted(_jobs(directory), key=_number):
        found = []
        for bundle in (path.parent for path in job.glob(f"*/{PLAN_FILE}")):
            try:
                recorded, result = read_plan_file(bundle), _result(bundle)
            except TopoplanError:
                continue
            is_pending = not result and not (job / JOB_OVER).exists()
            found.append(SlurmTrial(directory=bundle, recorded=recorded, result=result, is_pending=is_pending))
        yield from sorted(found, key=lambda one: (one.result.get("began", float("inf")), one.directory.name))


def tried_in_slurm(trial: SlurmTrial) -> Tried | None:
    """Return the result of a trial, or None while nothing is known."""
    spec, plan, logs = trial.recorded.spec, trial.recorded.plan, trial.directory / RESULTS
    nodes = [logs / f"node-{node:02d}.log" for node in range(spec.cluster.nodes)]
    file = path_of_file(trial.directory, str(trial.directory), spec, plan)
    texts = list(ends_of([*([Path(file)] if file else []), *nodes]))
    name = f"trial {trial.directory}"
    found = Tried(
        plan=plan,
        lesson=lesson_in(texts, name, spec, plan),
        ended=ended_in(texts, name, spec, plan),
        took_s=float(trial.result.get("seconds", 0.0)),
    )
    if found.lesson or found.ended or not trial.result:
        return found if found.lesson or found.ended else None
    return replace(found, **_went_wrong_in_slurm(trial, nodes, logs))


def _went_wrong_in_slurm(trial: SlurmTrial, nodes: list[Path], logs: Path) -> dict[str, Any]:
    result = trial.result
    if why := _WHY.get(str(result.get("ended"))):
        return {"why": why}
    tails = {node: _end(path).split("\n") for node, path in enumerate(nodes)}
    ends = {node: _end(path.with_suffix(".code")).strip() for node, path in enumerate(nodes)}
    codes = {node: int(code) for node, code in ends.items() if code.isdecimal()}
    gpus = trial.recorded.spec.cluster.gpus_per_node
    if first := diagnose(tails, codes, ranks_per_node=gpus):
        why = f"node-{first.node:02d} ended with exit code {codes.get(first.node)}: {first.cause}"
        return {"why": why, "is_lost": first.kind in _NOT_THE_PLANS}
    said = [line for line in _end(logs / "srun.log").split("\n") if line.strip()]
    return {"why": said[-1] if said else f"ended with exit code {result.get('code')}, with no output", "is_lost": True}


def _end(path: Path) -> str:
    try:
        with open_end(path, _END_BYTES) as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _result(bundle: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((bundle / RESULTS / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _jobs(directory: Path) -> list[Path]:
    return [path for path in directory.glob(f"{_JOB}*") if _number(path)]


def _number(job: Path) -> int:
    text = job.name.removeprefix(_JOB)
    return int(text) if text.isdecimal() else 0
