"""README.md of a bundle: what it is, what the nodes need, and how it is started."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import topoplan
from topoplan.bundle.draft import Draft
from topoplan.bundle.fabric import fabric_needs, network_notes
from topoplan.bundle.node_script import script_name
from topoplan.bundle.slurm import JOB_SCRIPT
from topoplan.bundle.warnings import warnings_of
from topoplan.catalog.packages import PYTHON, in_words
from topoplan.errors import listed
from topoplan.specs.cluster import Cluster, Host
from topoplan.trainers.checkpoint_size import CheckpointSize
from topoplan.trainers.environment import DRIVER_FOR_RTX_40, asks_for_driver, lacking_for_older_driver
from topoplan.trainers.models import is_hub_id
from topoplan.trainers.templating import code_span, gigabytes, render
from topoplan.trainers.trainer import DATASET_TO_FILL_IN

_MOST_COMMANDS = 8
"""Limit on the commands shown; hosts.json has all hosts."""


def readme(draft: Draft) -> str:
    """Return the README.md of a bundle."""
    spec, run, layout = draft.spec, draft.run, draft.plan.layout
    cluster, model = spec.cluster, spec.model
    from_hub = model.config_path is None and is_hub_id(model.name)
    context: dict[str, Any] = {
        "version": topoplan.__version__,
        "draft": draft,
        "spec": spec,
        "cluster": cluster,
        "run": run,
        "layout": layout,
        "plan": draft.view,
        "python": next((in_words(one.versions) for one in run.requirements if one.package.name == PYTHON), ""),
        "batch": layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp,
        "hours": draft.hours[0] if draft.hours is not None else None,
        "warnings": warnings_of(draft),
        "job_script": None if draft.scheduler is None else JOB_SCRIPT,
        "scripts": [
            {
                "node": node,
                "name": script_name(node),
                "address": cluster.hosts[node].address if cluster.hosts else None,
            }
            for node in range(cluster.nodes)
        ],
        "workdir_words": _workdir_words(cluster.hosts),
        "venv": cluster.hosts[0].venv if cluster.hosts else None,
        "download": shlex.join(["hf", "download", model.name, "--local-dir", run.model_dir]) if from_hub else None,
        "dataset_missing": run.dataset == DATASET_TO_FILL_IN,
        "to_fill_in": (run.to_fill_in or "").strip(),
        "checkpoint_parts": _checkpoint_parts(run.checkpoint),
        "secrets": listed([code_span(name) for name in cluster.secrets]),
        "commands": [] if draft.scheduler is not None else _commands(cluster, draft.trainer.run_name),
        "log_dir": f"logs/{draft.trainer.run_name}",
        "further_needs": [need.what for need in fabric_needs(cluster)] + _driver_needs(cluster),
        "network_notes": network_notes(cluster),
        "larger_margin": _larger_margin(draft.view["memory"]),
    }
    return render("README.md.j2", context)


def _driver_needs(cluster: Cluster) -> list[str]:
    """Return the requirement on the NVIDIA driver, if there is one besides PyTorch's."""
    lacking = lacking_for_older_driver(cluster, 0)
    if not lacking or not asks_for_driver(cluster.gpu.name, cluster):
        return []
    said = listed([f"`{name}: '{value}'`" for name, value in lacking.items()])
    refuses = "trainers that use accelerate refuse to start on several RTX 40 cards"
    older = f"With an older one, {refuses}, unless the spec has {said} under `env`"
    return [f"An NVIDIA driver {DRIVER_FOR_RTX_40} or newer. {older}"]


def _larger_margin(memory: Mapping[str, Any]) -> str:
    """Return the least margin, as `--margin` takes it, that this plan does not leave; empty if it uses less than half
    of the card, as no margin is larger than that."""
    percent = math.floor(100 * (1 - memory["device_gib"] / memory["capacity_gib"])) + 1
    return f"{percent}%" if percent < 50 else ""


def _checkpoint_parts(checkpoint: CheckpointSize) -> str:
    sizes = {
        f"{checkpoint.what} for Megatron": checkpoint.megatron_bytes,
        "for Hugging Face": checkpoint.hf_bytes,
        "optimizer state": checkpoint.optimizer_bytes,
    }
    return ", ".join(f"{words} {gigabytes(size)}" for words, size in sizes.items() if size)


def _workdir_words(hosts: tuple[Host, ...]) -> str:
    directories = {host.workdir for host in hosts}
    if len(directories) == 1 and (only := directories.pop()) is not None:
        return code_span(only)
    return "the host's `workdir` in the spec" if any(directories) else "this directory on the node"


def _commands(cluster: Cluster, run_name: str) -> list[str]:
    hosts = cluster.hosts
    if not hosts or any(host.workdir is None for host in hosts):
        return []
    commands = []
    for node, host in enumerate(hosts[:_MOST_COMMANDS]):
        there = str(PurePosixPath(host.workdir or "/", "bundles", run_name))
        target = f"{host.user}@{host.address}" if host.user else host.address
        port = [] if host.port is None else ["-p", str(host.port)]
        # Each command passes through two shells, the local one and the host's, and is quoted once for each.
        ssh = ["ssh", *port, "--", target] if target.startswith("-") else ["ssh", *port, target]
        copy = f"mkdir -p {shlex.quote(there)} && tar -xf - -C {shlex.quote(there)}"
        commands.append(f"tar -cf - --exclude=logs . | {shlex.join([*ssh, copy])}")
        start = shlex.join(["bash", f"{there}/{script_name(node)}"])
        commands.append(shlex.join([*ssh[:1], "-t", *ssh[1:], start]))
    if len(hosts) > _MOST_COMMANDS:
        commands.append(f"# and so on for the other {len(hosts) - _MOST_COMMANDS}: see hosts.json")
    return commands
