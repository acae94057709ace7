"""Trials of several plans as one job of Slurm: one after another inside one allocation, each by its own scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from topoplan.bundle.bundle import files_of
from topoplan.bundle.draft import Draft
from topoplan.bundle.slurm import SbatchOption, allocation, options_of, stated_limit_s
from topoplan.specs.cluster import Cluster
from topoplan.trainers.log import ANSI, CUT
from topoplan.trainers.templating import render
from topoplan.units import file_name

TRIALS_SCRIPT = "trials.sbatch"
RESULTS = "trial"
"""Directory in a trial's bundle, with the log of each node and the result."""
RESULT = "result.json"
RESULT_SCHEMA = "topoplan.trial/1"
JOB_OVER = "over"
"""A file beside the bundles once the job has ended."""
_WATCHER = "watch.py"
_GRACE_S = 60
"""After SIGTERM, before SIGKILL."""
_BETWEEN_S = 180.0
"""From the end of one trial's time to the next: grace, and Slurm's KillWait on the other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedTrial:
    """One of the job."""

    draft: Draft
    steps: int
    at_most_s: float
    """After so long it is ended."""
    quiet_s: float
    """And where its log says nothing for so long."""


def trials_files(trials: Sequence[QueuedTrial], go_on: str) -> tuple[Mapping[str, Mapping[str, str]], dict[str, str]]:
    """(plan id -> its bundle, the job's own files); `go_on` is the command that reads what came of them.

    The bundles lie in directories beside the files. Raises what `job_script` raises.
    """
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
        "cut": rf"\n|{CUT.pattern}",
        "forms": [
            *([log.steps.pattern] if log.steps else []),
            *([f"^(?:{log.bar.pattern})"] if log.bar else []),
        ],
    }
    own = {TRIALS_SCRIPT: render("trials.sbatch.j2", context), _WATCHER: render("watch.py.j2", context)}
    return {one.draft.plan.id: files_of(one.draft) for one in trials}, own


def shared_paths(draft: Draft) -> list[str]:
    """What a trial looks for by a relative path, such as `models`: it is linked from two directories above its bundle.

    Else each trial would want a model of its own below its bundle, where relative paths start without a workdir.
    """
    run, hosts = draft.run, draft.spec.cluster.hosts
    if hosts and hosts[0].workdir:
        return []
    paths = (run.model_dir, *([run.dataset_dir] if run.dataset_dir else []), *run.dataset_files)
    own = {PurePosixPath(name).parts[0] for name in draft.trainer.files}
    return sorted({PurePosixPath(path).parts[0] for path in paths if path and path[0] not in "/$"} - own)


def trials_limit_s(trials: Sequence[QueuedTrial]) -> float:
    """What all of them take at most."""
    return sum(one.at_most_s + _BETWEEN_S for one in trials)


def _options(cluster: Cluster, trials: Sequence[QueuedTrial]) -> list[SbatchOption]:
    """Those of a job, which is never begun again, with the time of all trials where the spec has no shorter one."""
    left_out = {"requeue", "no-requeue"}
    stated_s, most_s = stated_limit_s(cluster), trials_limit_s(trials)
    ours = [SbatchOption(name="time", value=f"{math.ceil(most_s / 60)}", reason="minutes that all trials take at most")]
    if stated_s is None or stated_s > most_s:
        left_out.add("time")
    else:
        ours = []
    slurm = {name: value for name, value in cluster.slurm.items() if name not in left_out}
    name = f"{file_name(cluster.name, 'cluster')}-trials"
    return [*options_of(replace(cluster, slurm=slurm), name, can_resume=False), *ours]
