"""One plan with what its trainer gives for it: all that the files of a bundle are made from, worked out once."""

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
from topoplan.trainers.trainer import Trainer, TrainerFiles, TrainerRun, Way

Scheduler = Literal["slurm"]
"""What starts the node scripts, where nobody does it over SSH or by hand."""
NO_SCHEDULER = "none"
"""Asks for none, whatever the spec has."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What a bundle is made from."""

    spec: Spec
    plan: Plan
    """As the trainer computes it."""
    scheduler: Scheduler | None
    writer: Trainer
    way: Way
    """How the writer trains the layout."""
    trainer: TrainerFiles
    run: TrainerRun

    @cached_property
    def view(self) -> Mapping[str, Any]:
        """The plan as plan.json has it: all files take their numbers from here, to be the same when written again."""
        return plan_to_dict(self.plan)

    @property
    def master_address(self) -> str | None:
        """Where all nodes meet; None where the spec does not say it."""
        return master_address(self.spec)

    @property
    def master_port(self) -> int:
        """The same port for all nodes."""
        return master_port(self.spec, self.trainer)

    @property
    def hours(self) -> tuple[float, float, float] | None:
        """Of the whole job, and the ends of their band; None when the spec does not say how many samples there are."""
        if self.run.steps is None:
            return None
        effort = effort_of(self.spec, self.plan, self.run.steps)
        return effort.hours, *effort.band_hours


def draft_of(spec: Spec, plan: Plan, scheduler: str | None = None, trainer: str | None = None) -> Draft:
    """Of a plan as the trainer computes it; the rest as `generate` has it."""
    starter = scheduler_of(spec, scheduler)
    writer, way = writer_of(spec, plan.layout, trainer)
    _check_hosts(spec)
    _check_printable(spec)
    files = way.written(spec, plan.layout)
    return Draft(
        spec=spec,
        plan=plan,
        scheduler=starter,
        writer=writer,
        way=way,
        trainer=files,
        run=way.run(spec, plan.layout, files.values),
    )


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
