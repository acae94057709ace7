"""A plan with its trainer's output: everything that the files of a bundle are made from, computed once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from topoplan.bundle.node_script import master_address, master_port
from topoplan.errors import InputError, SpecError
from topoplan.planner.effort import effort_of
from topoplan.planner.plan import Plan
from topoplan.planner.view import plan_to_dict
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import writer_of
from topoplan.trainers.trainer import Trainer, TrainerFiles, TrainerRun, TrainingPath

Scheduler = Literal["slurm"]
"""What starts the node scripts, if it is neither a person nor topoplan over SSH."""
NO_SCHEDULER = "none"
"""Requests no scheduler, whatever the spec says."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The content from which a bundle's files are made."""

    spec: Spec
    plan: Plan
    """The plan as predicted under the trainer."""
    scheduler: Scheduler | None
    writer: Trainer
    training_path: TrainingPath
    """How the writer trains the layout."""
    trainer: TrainerFiles
    run: TrainerRun

    @cached_property
    def view(self) -> Mapping[str, Any]:
        """The plan as in plan.json. All files take their numbers from it, so that rewriting gives the same text."""
        return plan_to_dict(self.plan)

    @property
    def master_address(self) -> str | None:
        """The rendezvous address of all nodes; None if the spec does not give it."""
        return master_address(self.spec)

    @property
    def master_port(self) -> int:
        """The rendezvous port of all nodes."""
        return master_port(self.spec, self.trainer)

    @property
    def hours(self) -> tuple[float, float, float] | None:
        """Hours of the whole job, with the lower and upper end of their band; None if the step count is unknown."""
        if self.run.steps is None:
            return None
        effort = effort_of(self.spec, self.plan, self.run.steps)
        return effort.hours, *effort.band_hours


def draft_of(spec: Spec, plan: Plan, scheduler: str | None = None, trainer: str | None = None) -> Draft:
    """Return the draft of a plan as predicted under its trainer; the other arguments are those of `generate`."""
    starter = scheduler_of(spec, scheduler)
    writer, way = writer_of(spec, plan.layout, trainer)
    _check(spec)
    files = way.written(spec, plan.layout)
    return Draft(
        spec=spec,
        plan=plan,
        scheduler=starter,
        writer=writer,
        training_path=way,
        trainer=files,
        run=way.run(spec, plan.layout, files.values),
    )


def scheduler_of(spec: Spec, wanted: str | None = None, *, where: str = "") -> Scheduler | None:
    """Return the scheduler `wanted`, or by default slurm if the spec has a `slurm` block. Raises InputError, with the
    location given, for an unknown word."""
    if wanted is None:
        return "slurm" if spec.cluster.slurm else None
    names = (*get_args(Scheduler), NO_SCHEDULER)
    if wanted not in names:
        raise InputError(f"{wanted!r} is not a scheduler", where=where, expected=f"expected {' or '.join(names)}")
    return None if wanted == NO_SCHEDULER else "slurm"


def _check(spec: Spec) -> None:
    """Refuse a wrong number of hosts, and line breaks and control characters in names, which would break a comment, a
    log line or a terminal."""
    nodes, hosts = spec.cluster.nodes, len(spec.cluster.hosts)
    if hosts not in (0, nodes):
        raise SpecError(f"{hosts} hosts for {nodes} nodes", where="hosts", expected=f"expected {nodes}, or none at all")
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
