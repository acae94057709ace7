"""Trials of plans: the bundle of one, limited to a few steps that save nothing; and several as one Slurm job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from topoplan.bundle.bundle import files_of
from topoplan.bundle.draft import NO_SCHEDULER, Draft, draft_of
from topoplan.bundle.slurm import SbatchOption, allocation, options_of, stated_limit_s
from topoplan.errors import InputError
from topoplan.planner.plan import Plan
from topoplan.specs.cluster import Cluster
from topoplan.specs.spec import Spec
from topoplan.trainers.log import ANSI, SEPARATORS
from topoplan.trainers.registry import writer_of
from topoplan.trainers.templating import render
from topoplan.trainers.trials import GENERATED, refuse_images
from topoplan.units import file_name

TRIALS_SCRIPT = "trials.sbatch"
RESULTS = "trial"
"""Directory in a trial's bundle that holds the log of each node and the result."""
RESULT = "result.json"
RESULT_SCHEMA = "topoplan.trial/1"
JOB_OVER = "over"
"""File next to the bundles that marks the end of the job."""
_WATCHER = "watch.py"
_GRACE_S = 60
"""Seconds from SIGTERM to SIGKILL."""
_BETWEEN_S = 180.0
"""Seconds allowed between trials, for the grace period and Slurm's KillWait on the other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedTrial:
    """One trial of the job."""

    draft: Draft
    steps: int
    at_most_s: float
    """Time limit of the trial."""
    quiet_s: float
    """Limit on the time without log output."""


def trials_files(trials: Sequence[QueuedTrial], go_on: str) -> tuple[Mapping[str, Mapping[str, str]], dict[str, str]]:
    """Return (plan id -> its bundle, the job's own files); `go_on` is the command that reads the results. The bundles
    are directories next to the job's files. Raises what `job_script` raises."""
    first = trials[0].draft
    cluster, log = first.spec.cluster, first.writer.log
    venv = cluster.hosts[0].venv if cluster.hosts else None
    context = {
        **allocation(first, TRIALS_SCRIPT, f"{first.plan.id}/plan.json"),
        "options": _options(cluster, trials),
        "trials": [
            {
                "plan": one.draft.plan.id,
                "steps": one.steps,
                "at_most_s": math.ceil(one.at_most_s),
                "quiet_s": math.ceil(one.quiet_s),
            }
            for one in trials
        ],
        "shared": shared_paths(first),
        "python": f"{venv}/bin/python" if venv else "python3",
        "watcher": _WATCHER,
        "results": RESULTS,
        "result": RESULT,
        "over": JOB_OVER,
        "schema": RESULT_SCHEMA,
        "go_on": go_on,
        "title": first.writer.title,
        "grace_s": _GRACE_S,
        "ansi": ANSI.pattern,
        "cut": rf"\n|{SEPARATORS.pattern}",
        "forms": [
            *([log.steps.pattern] if log.steps else []),
            *([f"^(?:{log.bar.pattern})"] if log.bar else []),
        ],
    }
    own = {TRIALS_SCRIPT: render("trials.sbatch.j2", context), _WATCHER: render("watch.py.j2", context)}
    return {one.draft.plan.id: files_of(one.draft) for one in trials}, own


def shared_paths(draft: Draft) -> list[str]:
    """Return the first parts of a trial's relative paths, such as `models`, to link from two directories up. Without a
    workdir, relative paths start in the bundle, so each trial would otherwise need a model of its own."""
    run, hosts = draft.run, draft.spec.cluster.hosts
    if hosts and hosts[0].workdir:
        return []
    paths = (run.model_dir, *([run.dataset_dir] if run.dataset_dir else []), *run.dataset_files)
    own = {PurePosixPath(name).parts[0] for name in draft.trainer.files}
    return sorted({PurePosixPath(path).parts[0] for path in paths if path and path[0] not in "/$"} - own)


def trials_limit_s(trials: Sequence[QueuedTrial]) -> float:
    """Return the maximum time of all trials together."""
    return sum(one.at_most_s + _BETWEEN_S for one in trials)


def _options(cluster: Cluster, trials: Sequence[QueuedTrial]) -> list[SbatchOption]:
    """Return the options of a job without requeue, with the time of all trials unless the spec's limit is shorter."""
    left_out = {"requeue", "no-requeue"}
    stated_s, most_s = stated_limit_s(cluster), trials_limit_s(trials)
    ours = [
        SbatchOption(name="time", value=f"{math.ceil(most_s / 60)}", reason="minutes, the limit of all trials together")
    ]
    if stated_s is None or stated_s > most_s:
        left_out.add("time")
    else:
        ours = []
    slurm = {name: value for name, value in cluster.slurm.items() if name not in left_out}
    name = f"{file_name(cluster.name, 'cluster')}-trials"
    return [*options_of(replace(cluster, slurm=slurm), name, can_resume=False), *ours]


def trial_draft(spec: Spec, plan: Plan, steps: int, output: str, *, made_up: bool) -> Draft:
    """Return the draft of a trial, with an output directory of its own. Raises SpecError if samples cannot be
    generated, InputError for a trainer without trials, and what `draft_of` raises."""
    if made_up:
        refuse_images(spec)
        spec = replace(spec, job=replace(spec.job, dataset=GENERATED, dataset_dir=None))
    writer, way = writer_of(spec, plan.layout, plan.trainer)
    if way.trial is None:
        raise InputError(f"no trials are known of {writer.title}", where=f"plan {plan.id}")
    return draft_of(replace(spec, job=way.trial.job(spec, steps, output)), plan, NO_SCHEDULER, writer.name)
