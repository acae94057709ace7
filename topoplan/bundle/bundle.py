"""The files of one plan. Pure: the same spec and plan give the same text, byte for byte; nothing is written here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Literal, get_args

import topoplan
from topoplan.bundle.fabric import fabric_needs, lossless_note
from topoplan.bundle.slurm import JOB_SCRIPT, job_script, slurm_warnings
from topoplan.catalog.packages import PYTHON, in_words
from topoplan.errors import InputError, SpecError, listed
from topoplan.planner.plan import Plan
from topoplan.planner.predict import plan_under
from topoplan.planner.view import plan_to_dict, spec_to_dict
from topoplan.specs.cluster import Host
from topoplan.specs.spec import Spec
from topoplan.trainers.checkpoint_size import CheckpointSize
from topoplan.trainers.llamafactory.mca_facts import is_hub_id
from topoplan.trainers.registry import TrainerName
from topoplan.trainers.templating import code_span, gigabytes, render
from topoplan.trainers.torchrun import master_address, master_port, node_script, script_name
from topoplan.trainers.trainer import DATASET_TO_FILL_IN, PLAN_FILE, TrainerFiles, TrainerRun, Writer
from topoplan.trainers.writers import default_trainer, writer_of

PLAN_SCHEMA = "topoplan.plan/1"
HOSTS_SCHEMA = "topoplan.hosts/1"

Scheduler = Literal["slurm"]
"""What starts the node scripts, where nobody does it over SSH or by hand."""
NO_SCHEDULER = "none"
"""Asks for none, whatever the spec has."""

_MOST_COMMANDS = 8  # in the README; hosts.json has them all


def scheduler_of(spec: Spec, wanted: str | None = None, *, where: str = "") -> Scheduler | None:
    """What starts the scripts of a bundle: as `wanted`, or else as the spec has it, where a `slurm` block stands for
    one reason.

    Raises InputError, with the place given, for a word that is no scheduler.
    """
    if wanted is None:
        return "slurm" if spec.cluster.slurm else None
    names = (*get_args(Scheduler), NO_SCHEDULER)
    if wanted not in names:
        raise InputError(f"{wanted!r} is not a scheduler", where=where, expected=f"expected {' or '.join(names)}")
    return None if wanted == NO_SCHEDULER else "slurm"


def generate(
    spec: Spec, plan: Plan, scheduler: str | None = None, trainer: TrainerName | None = None
) -> dict[str, str]:
    """Relative path -> text: the trainer's files, one script a node, hosts.json, plan.json and README.md.

    `scheduler` is slurm, for the script of its queue too, or none; left out, as the spec says (`scheduler_of`). Without
    a trainer, the files of the first one that can run the layout. An error says what the trainer cannot do, which key
    of the user contradicts the plan, or which name cannot be written into a script.
    """
    starter = scheduler_of(spec, scheduler)
    writer = writer_of(spec, plan.layout, trainer)
    _check_hosts(spec)
    _check_printable(spec)
    plan = plan_under(spec, plan, writer.trainer)
    own = writer.files(spec, plan)
    run = writer.run(spec, plan.layout, own.values)
    files = dict(own.files)
    files |= {
        script_name(node): node_script(spec, plan.layout, writer, own, run, node) for node in range(spec.cluster.nodes)
    }
    if starter is not None:
        files[JOB_SCRIPT] = job_script(spec, plan, own, run)
    files["hosts.json"] = _json(_hosts(spec, own))
    files[PLAN_FILE] = _json(_plan(spec, plan, writer, own, run, starter))
    files["README.md"] = _readme(spec, plan, writer, own, run, starter)
    return files


def bundle_warnings(
    spec: Spec, plan: Plan, scheduler: str | None = None, trainer: TrainerName | None = None
) -> tuple[str, ...]:
    """What the README of the bundle warns of, for a terminal; asked as `generate` is."""
    writer = writer_of(spec, plan.layout, trainer)
    own = writer.files(spec, plan)
    return _warnings(spec, plan, own, writer.run(spec, plan.layout, own.values), scheduler_of(spec, scheduler))


def _warnings(
    spec: Spec, plan: Plan, own: TrainerFiles, run: TrainerRun, scheduler: Scheduler | None
) -> tuple[str, ...]:
    return own.warnings if scheduler is None else (*own.warnings, *slurm_warnings(spec, plan, run))


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


# Input ---------------------------------------------------------------------------------------------------------------


def _check_hosts(spec: Spec) -> None:
    nodes, hosts = spec.cluster.nodes, len(spec.cluster.hosts)
    if hosts not in (0, nodes):
        raise SpecError(f"{hosts} hosts for {nodes} nodes", where="hosts", expected=f"expected {nodes}, or none at all")


def _check_printable(spec: Spec) -> None:
    """Line breaks and control characters in a name would break a comment, a log line or a terminal: none is right."""
    for where, text in _names(spec):
        if not text.isprintable():
            raise SpecError(f"{text!r} holds a line break or another control character", where=where)


def _names(spec: Spec) -> Iterator[tuple[str, str]]:
    cluster, model, job = spec.cluster, spec.model, spec.job
    yield from (
        ("name", cluster.name),
        ("gpu", cluster.gpu.name),
        ("model", model.name),
        ("model", model.config_path or ""),
    )
    yield from (("job.dataset", job.dataset or ""), ("job.dataset_dir", job.dataset_dir or ""))
    yield ("job.template", job.template or "")
    for node, host in enumerate(cluster.hosts):
        for field in ("address", "user", "workdir", "venv", "socket_interface"):
            yield (f"hosts[{node}].{field}", getattr(host, field) or "")
    for key in ("model_name_or_path", "model", "dataset", "dataset_dir", "output_dir"):
        value = job.trainer.get(key)
        if isinstance(value, str):
            yield (f"job.trainer.{key}", value)


# hosts.json, plan.json -----------------------------------------------------------------------------------------------


def _hosts(spec: Spec, trainer: TrainerFiles) -> dict[str, Any]:
    hosts: tuple[Host | None, ...] = spec.cluster.hosts or (None,) * spec.cluster.nodes
    return {
        "schema": HOSTS_SCHEMA,
        "run": trainer.run_name,
        "master": {"address": master_address(spec), "port": master_port(spec, trainer)},
        "nodes": [
            {
                "node": node,
                "address": host.address if host else None,
                "user": host.user if host else None,
                "port": host.port if host else None,
                "workdir": host.workdir if host else None,
                "venv": host.venv if host else None,
                "script": script_name(node),
            }
            for node, host in enumerate(hosts)
        ],
    }


def _plan(
    spec: Spec, plan: Plan, writer: Writer, trainer: TrainerFiles, run: TrainerRun, scheduler: Scheduler | None
) -> dict[str, Any]:
    prediction = plan_to_dict(plan)
    layout = prediction.pop("layout")
    document = {
        "schema": PLAN_SCHEMA,
        "version": topoplan.__version__,
        "id": prediction.pop("id"),
        "run": trainer.run_name,
        "inputs": spec_to_dict(spec, whole=True),
        "layout": layout,
        "prediction": prediction,
        "trainer_versions": {
            **writer.versions(),
            **{one.package.name.replace("-", "_"): one.versions for one in run.requirements if one.avoids},
        },
    }
    if writer.trainer != default_trainer(plan.layout.backend):
        document["trainer"] = writer.trainer
    return document if scheduler is None else document | {"scheduler": scheduler}


# README.md -----------------------------------------------------------------------------------------------------------


def _readme(
    spec: Spec, plan: Plan, writer: Writer, trainer: TrainerFiles, run: TrainerRun, scheduler: Scheduler | None
) -> str:
    cluster, model = spec.cluster, spec.model
    # Numbers are taken as plan.json has them, so that the README can be written again from plan.json.
    view = plan_to_dict(plan)
    hours = None if run.steps is None else run.steps * view["time"]["step_s"] / 3600
    from_hub = model.config_path is None and is_hub_id(model.name)
    layout = plan.layout
    context: dict[str, Any] = {
        "version": topoplan.__version__,
        "words": run.readme,
        "python": next((in_words(one.versions) for one in run.requirements if one.package.name == PYTHON), ""),
        "model": model.name,
        "cluster": cluster.name,
        "gpu": cluster.gpu.name,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "plan": view,
        "batch": layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp,
        "seq_len": spec.job.seq_len,
        "vision": model.vision is not None,
        "total_tokens_per_s": view["tokens_per_s_per_gpu"] * layout.world_size,
        "steps": run.steps,
        "hours": hours,
        "gpu_hours": None if hours is None else hours * layout.world_size,
        "warnings": _warnings(spec, plan, trainer, run, scheduler),
        "job_script": None if scheduler is None else JOB_SCRIPT,
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
        "model_dir": run.model_dir,
        "download": shlex.join(["hf", "download", model.name, "--local-dir", run.model_dir]) if from_hub else None,
        "dataset": run.dataset,
        "dataset_missing": run.dataset == DATASET_TO_FILL_IN,
        "to_fill_in": (run.to_fill_in or "").strip(),
        "dataset_dir": run.dataset_dir,
        "output_dir": run.output_dir,
        "checkpoint": run.checkpoint,
        "checkpoint_parts": _checkpoint_parts(run.checkpoint),
        "resumable": run.resumable,
        "secrets": listed([code_span(name) for name in cluster.secrets]),
        "commands": [] if scheduler is not None else _commands(spec, trainer),
        "master_known": master_address(spec) is not None,
        "master_port": master_port(spec, trainer),
        "log_dir": f"logs/{trainer.run_name}",
        "network_needs": [need.what for need in fabric_needs(cluster)],
        "lossless_note": lossless_note(cluster),
    }
    return render("README.md.j2", context)


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
    return "the working directory of the host in the spec" if any(directories) else "this directory on the node"


def _commands(spec: Spec, trainer: TrainerFiles) -> list[str]:
    """Copy and start, host by host: what a person would type. None without hosts that say where to put the files."""
    hosts = spec.cluster.hosts
    if not hosts or any(host.workdir is None for host in hosts):
        return []
    commands = []
    for node, host in enumerate(hosts[:_MOST_COMMANDS]):
        there = str(PurePosixPath(host.workdir or "/", "bundles", trainer.run_name))
        target = f"{host.user}@{host.address}" if host.user else host.address
        port = [] if host.port is None else ["-p", str(host.port)]
        # Each command goes through two shells, this one and the host's: quoted once for each.
        ssh = ["ssh", *port, "--", target] if target.startswith("-") else ["ssh", *port, target]
        copy = f"mkdir -p {shlex.quote(there)} && tar -xf - -C {shlex.quote(there)}"
        commands.append(f"tar -cf - --exclude=logs . | {shlex.join([*ssh, copy])}")
        start = shlex.join(["bash", f"{there}/{script_name(node)}"])
        commands.append(shlex.join([*ssh[:1], "-t", *ssh[1:], start]))
    if len(hosts) > _MOST_COMMANDS:
        commands.append(f"# and so on for the other {len(hosts) - _MOST_COMMANDS}: see hosts.json")
    return commands
