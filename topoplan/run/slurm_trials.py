"""The results of trials that ran as Slurm jobs (`bundle/trials_job.py`), each job in a directory of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from topoplan.bundle.plan_file import RecordedPlan, read_plan_file
from topoplan.bundle.trials_job import JOB_OVER, RESULT, RESULTS
from topoplan.errors import TopoplanError
from topoplan.planner.logged import open_end
from topoplan.planner.tuning import Tried
from topoplan.run.attempts import RETRYABLE_KINDS
from topoplan.run.diagnose import diagnose
from topoplan.run.measurement import ended_in, ends_of, lesson_in, path_of_file
from topoplan.trainers.trainer import PLAN_FILE

_JOB = "job-"
_END_BYTES = 1 << 20
"""Size of the end of a log that is read to find out why it ended."""
_WHY = {
    "time": "too few steps completed before it was stopped",
    "steps": "too few steps completed before it was stopped",
    "hang": "nothing was logged any more: it was hanging",
}


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
    """Return directory for the next job."""
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


def tried_in_slurm(trial: SlurmTrial, recorded: RecordedPlan) -> Tried | None:
    """Return the result of a trial, or None while nothing is known. `recorded` may have another profile."""
    spec, plan, logs = recorded.spec, recorded.plan, trial.directory / RESULTS
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
    return replace(found, **_went_wrong(trial, nodes, logs))


def _went_wrong(trial: SlurmTrial, nodes: list[Path], logs: Path) -> dict[str, Any]:
    """Return why a trial gave no step time, and whether its plan is to blame."""
    result = trial.result
    if why := _WHY.get(str(result.get("ended"))):
        return {"why": why}
    tails = {node: _end(path).split("\n") for node, path in enumerate(nodes)}
    ends = {node: _end(path.with_suffix(".code")).strip() for node, path in enumerate(nodes)}
    codes = {node: int(code) for node, code in ends.items() if code.isdecimal()}
    gpus = trial.recorded.spec.cluster.gpus_per_node
    if first := diagnose(tails, codes, ranks_per_node=gpus):
        why = f"node-{first.node:02d} ended with exit code {codes.get(first.node)}: {first.cause}"
        return {"why": why, "is_lost": first.kind in RETRYABLE_KINDS and first.kind != "hang"}
    said = [line for line in _end(logs / "srun.log").split("\n") if line.strip()]
    return {"why": said[-1] if said else f"ended with exit code {result.get('code')}, with no output", "is_lost": True}


def _end(path: Path) -> str:
    """Return the end of a file as text; empty if there is no file."""
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
