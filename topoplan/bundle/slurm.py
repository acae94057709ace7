"""The Slurm job script: one task per node, which runs the script of that node.

Options follow Slurm's manual where the defaults would hurt: `--exclusive` allocates all CPUs but not all memory; the
login node's limits are propagated to the job; a step continues when one of its tasks has failed; the output of a job
whose directory does not exist is lost (sbatch and srun, Options).
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import topoplan
from topoplan.bundle.draft import Draft
from topoplan.errors import SpecError
from topoplan.reading.slurm import request_of
from topoplan.specs.cluster import Cluster
from topoplan.specs.passed_on import check_option
from topoplan.trainers.templating import digits, render
from topoplan.trainers.trainer import PLAN_FILE

JOB_SCRIPT = "job.sbatch"
"""File name of the job script."""

_OUTPUT = "slurm-%j.out"
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PLAIN = re.compile(r"[A-Za-z0-9_.,:;=+@%/\[\]-]+")
_SPARE_HOURS = 1  # for tokenizing the data first, and for storage slower than assumed

# User options that conflict with one of topoplan's: sbatch refuses the two together, or combines them.
_TAKES_PLACE_OF: Mapping[str, str] = {
    "requeue": "no-requeue",
    "no-requeue": "requeue",
    "mem-per-cpu": "mem",
    "mem-per-gpu": "mem",
    "gpus": "gpus-per-node",
    "gpus-per-task": "gpus-per-node",
}


@dataclass(frozen=True, slots=True)
class SbatchOption:
    """One `#SBATCH` line."""

    name: str
    value: str | bool
    """True means an option without a value."""
    reason: str = ""

    @property
    def text(self) -> str:
        """The option as sbatch parses it: quotes work as in a shell, and `#` outside of them starts a comment."""
        if isinstance(self.value, bool):
            return f"--{self.name}"
        word = self.value if _PLAIN.fullmatch(self.value) else f"'{self.value}'"
        return f"--{self.name}={word}"


def job_script(draft: Draft) -> str:
    """Return the script for sbatch. Raises SpecError for hosts unknown to Slurm, and for options that are invalid."""
    cluster, hours = draft.spec.cluster, draft.hours
    context = {
        **allocation(draft, JOB_SCRIPT, PLAN_FILE),
        "options": options_of(cluster, draft.trainer.run_name, can_resume=draft.run.checkpoints.resumable),
        "hours": None if "time" in cluster.slurm or hours is None else [digits(value) for value in hours],
        "time_limit": None if hours is None else f"{math.ceil(hours[-1] + _SPARE_HOURS)}:00:00",
    }
    return render("job.sbatch.j2", context)


def allocation(draft: Draft, script: str, plan_file: str) -> dict[str, Any]:
    """Return the template values about a script's job: its machines, and the file that identifies its directory. Raises
    SpecError for hosts unknown to Slurm."""
    cluster = draft.spec.cluster
    _check_hosts(cluster)
    _check_export(cluster)
    return {
        "version": topoplan.__version__,
        "script": script,
        "run": draft.trainer.run_name,
        "plan_file": plan_file,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "secrets": cluster.secrets,
        "hosts": [host.address for host in cluster.hosts],
        "master_addr": draft.master_address,
    }


def slurm_warnings(draft: Draft) -> tuple[str, ...]:
    """Warn of a time limit that would end the job too early."""
    limit_s, hours = stated_limit_s(draft.spec.cluster), draft.hours
    if limit_s is None or hours is None or limit_s >= hours[-1] * 3600:
        return ()
    limit = draft.spec.cluster.slurm["time"]
    return (
        f"time {limit} under slurm in the spec limits the job to {digits(limit_s / 3600)} hours, but it may take"
        f" {digits(hours[-1])}: Slurm would kill it",
    )


def stated_limit_s(cluster: Cluster) -> float | None:
    """Return the spec's own time limit in seconds, or None."""
    limit = cluster.slurm.get("time")
    return time_limit_s(limit) if isinstance(limit, str) else None


def time_limit_s(text: str) -> float | None:
    """Parse a time limit as sbatch does (minutes, m:s, h:m:s, d-h, d-h:m or d-h:m:s), in seconds. None for no limit (0,
    UNLIMITED), and for text that sbatch refuses."""
    match = re.fullmatch(r"(?:([0-9]{1,6})-)?([0-9]{1,9})(?::([0-9]{1,6}))?(?::([0-9]{1,6}))?", text)
    if match is None:
        return None
    days, *parts = (int(part) if part is not None else None for part in match.groups())
    first, second, third = parts[0] or 0, parts[1] or 0, parts[2] or 0
    if days is not None or parts[2] is not None:
        seconds = ((days or 0) * 24 + first) * 3600 + second * 60 + third
    else:
        seconds = first * 60 + second
    return float(seconds) or None


def _check_hosts(cluster: Cluster) -> None:
    """Check that the spec's hosts are Slurm node names, each listed once, because every node has its own script."""
    if not cluster.hosts:
        return
    leave_out = "leave hosts out to let Slurm choose the machines, or write names as `sinfo -N` lists them"
    for node, host in enumerate(cluster.hosts):
        if _is_address(host.address) or not _NODE_NAME.fullmatch(host.address):
            what = f"{host.address!r} is not a Slurm node name"
            raise SpecError(what, where=f"hosts[{node}].address", remedy=leave_out)
        if any(other.address == host.address for other in cluster.hosts[:node]):
            raise SpecError(f"{host.address!r} is listed twice", where=f"hosts[{node}].address")
    if "nodelist" in cluster.slurm:
        raise SpecError(
            "nodelist conflicts with hosts, which name the machines", where="slurm", remedy="leave one of them out"
        )


def _check_export(cluster: Cluster) -> None:
    """Check that `export` keeps the secrets, which reach the job through the environment of sbatch."""
    export = cluster.slurm.get("export")
    kept = {"ALL", *cluster.secrets} if export is None else set(str(export).split(","))
    if "ALL" not in kept and (lost := [name for name in cluster.secrets if name not in kept]):
        what = f"export {export} does not pass {lost[0]} to the job, which is listed under secrets"
        raise SpecError(what, where="slurm.export", remedy="leave it out, or write ALL")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def options_of(cluster: Cluster, job_name: str, *, can_resume: bool) -> list[SbatchOption]:
    """Return topoplan's options, replaced and extended by the user's. Raises SpecError for invalid ones."""
    user: dict[str, str | bool] = {}
    for name, value in cluster.slurm.items():
        try:
            option, checked = check_option(name, value)
        except SpecError as error:
            where = f"slurm.{name}"
            raise SpecError(error.what, where=where, expected=error.expected, remedy=error.remedy) from None
        user[option] = checked
    replaced = {_TAKES_PLACE_OF[name] for name, value in user.items() if name in _TAKES_PLACE_OF and value is not False}
    if "gpu" in str(user.get("gres", "")):
        replaced.add("gpus-per-node")
    ours = [
        option
        for option in _own_options(cluster, job_name, can_resume=can_resume)
        if option.name not in user.keys() | replaced
    ]
    given = [pair for pair in user.items() if pair[1] is not False]
    _check_gpus(cluster, given)
    theirs = [SbatchOption(*one, "" if index else "from slurm in the cluster spec") for index, one in enumerate(given)]
    return [*ours, *theirs]


_OF_GPUS = ("gpus-per-node", "gres", "gpus", "gpus-per-task")


def _check_gpus(cluster: Cluster, given: list[tuple[str, str | bool]]) -> None:
    """Raise SpecError for fewer GPUs than a node's script starts processes, which the script would find out there."""
    for name, value in given:
        if name not in _OF_GPUS:
            continue
        request = request_of([f"--nodes={cluster.nodes}", f"--{name}={value}"])
        each = request.gpus_per_task if name == "gpus-per-task" else request.gpus_per_node
        total = request.gpus or cluster.world_size
        if (each is not None and each < cluster.gpus_per_node) or total < cluster.world_size:
            asked = f"{total} GPUs for {cluster.nodes} nodes" if name == "gpus" else f"{each} GPUs in a node"
            raise SpecError(
                f"{name} {value} asks for {asked}, and the plan has {cluster.gpus_per_node} in each",
                where=f"slurm.{name}",
                remedy="set the spec's `gpus_per_node`, or leave it out",
            )


def _own_options(cluster: Cluster, job_name: str, *, can_resume: bool) -> Iterator[SbatchOption]:
    yield SbatchOption("job-name", job_name)
    yield SbatchOption("nodes", str(cluster.nodes))
    yield SbatchOption("ntasks-per-node", "1", "one task starts the processes of all GPUs of its node")
    yield SbatchOption("gpus-per-node", str(cluster.gpus_per_node))
    yield SbatchOption("exclusive", True, "whole machines: all cores, and no other job on the same ports")
    yield SbatchOption("mem", "0", "all memory too, which --exclusive does not include")
    yield SbatchOption("propagate", "NONE", "without the limits of the login node: RDMA needs locked memory")
    if can_resume and cluster.slurm.get("requeue") is not False:
        again = "a job that loses a node is restarted, and resumes from its last complete checkpoint"
        yield SbatchOption("requeue", True, again)
        yield SbatchOption("open-mode", "append", "after the output of the earlier start")
    else:
        yield SbatchOption("no-requeue", True, "a job that loses a node is not restarted")
    yield SbatchOption("output", _OUTPUT, "in the directory where sbatch is called")
    if cluster.hosts:
        yield SbatchOption("nodelist", ",".join(host.address for host in cluster.hosts), "hosts in the cluster spec")
