"""How long a whole job takes: its steps, and what interrupts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from topoplan.errors import InputError
from topoplan.operators.params import parameter_count
from topoplan.planner.plan import Plan
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import steps_of, writer_of
from topoplan.trainers.trainer import TrainerRun

STARTS_S = 60.0
"""Seconds, assumed, from the start of the processes to the first step (imports, NCCL's setup, first kernels), in
addition to reading the model. Tokenizing data before training is not included."""
_WEIGHT_BYTES = 2
"""Bytes per parameter in the model's files."""


class Pauses(NamedTuple):
    """Seconds of a job without training steps; all but the start are 0 if the trainer's files cannot be written."""

    start_up_s: float
    checkpoints_s: float = 0.0
    evaluation_s: float = 0.0


_OFTEN = 0.25
"""Part of the training time that checkpoints before the last one may take without a word."""


class Saving(NamedTuple):
    """Checkpoints that take much of a job, and the setting with which only one is saved."""

    saves: int
    setting: str
    saved_s: float
    """Seconds by which the job is shorter with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Duration and cost of the whole job under one plan."""

    steps: int
    training_s: float
    training_band_s: tuple[float, float]
    pauses: Pauses
    gpus: int
    saving: Saving | None = None
    """Set if checkpoints take long compared with training."""

    @property
    def hours(self) -> float:
        """Hours from start to end."""
        return (self.training_s + sum(self.pauses)) / 3600

    @property
    def band_hours(self) -> tuple[float, float]:
        """Interval in which the hours are expected."""
        low, high = ((seconds + sum(self.pauses)) / 3600 for seconds in self.training_band_s)
        return low, high

    @property
    def gpu_hours(self) -> float:
        """Hours of all GPUs together."""
        return self.hours * self.gpus


def job_steps(spec: Spec, plan: Plan) -> int | None:
    """Return the optimizer steps of the job under a plan, or None if the spec does not state the number of samples."""
    return steps_of(spec.job, plan.layout.backend, plan.trainer)


def job_effort(spec: Spec, plan: Plan) -> Effort | None:
    """Return the effort of the spec's job, or None if the spec does not state the number of samples."""
    steps = job_steps(spec, plan)
    return None if steps is None else effort_of(spec, plan, steps)


def effort_of(spec: Spec, plan: Plan, steps: int) -> Effort:
    """Return the effort of a number of steps."""
    (low, high), training_s = plan.time.band_s, steps * plan.time.step_s
    pauses, saving = _pauses(spec, plan, steps)
    return Effort(
        steps=steps,
        training_s=training_s,
        training_band_s=(steps * low, steps * high),
        pauses=pauses,
        gpus=plan.layout.world_size,
        saving=saving if saving and saving.saved_s > _OFTEN * training_s else None,
    )


def start_up_s(spec: Spec) -> float:
    """Return the seconds until the first step; every node reads the whole model."""
    return STARTS_S + _WEIGHT_BYTES * parameter_count(spec.model) / spec.cluster.storage_bytes_per_s


def _pauses(spec: Spec, plan: Plan, steps: int) -> tuple[Pauses, Saving | None]:
    """Return the pauses of a job, and what saving once instead of several times would save.

    One node writes weights in Hugging Face's format; Megatron's weights and the optimizer states are spread over all
    nodes. A forward pass takes a third of a step's work, or a fourth if it is run again in backward (Narayanan et al.
    2021, section 3.2 and appendix).
    """
    starts_s, run = start_up_s(spec), _run(spec, plan)
    if run is None:
        return Pauses(starts_s), None
    size, pauses, rate = run.checkpoint, run.pauses, spec.cluster.storage_bytes_per_s
    together = rate * spec.cluster.nodes
    final_s = size.megatron_bytes / together + size.hf_bytes / rate if size.final_bytes else 0.0
    each_s = (size.megatron_bytes + size.optimizer_bytes) / together + size.hf_bytes / rate
    forward = plan.time.step_s / (4 if plan.layout.recompute.granularity == "full" else 3)
    evaluation_s = forward * pauses.evaluated_sequences / spec.job.global_batch_size
    saves = pauses.saves(steps)
    saving = Saving(saves, f"trainer.{pauses.save_key}={steps}", each_s * (saves - 1)) if saves > 1 else None
    return Pauses(starts_s, final_s + each_s * saves, evaluation_s * pauses.evaluations(steps)), saving


def _run(spec: Spec, plan: Plan) -> TrainerRun | None:
    """Return what the trainer writes, or None if its files cannot be written."""
    try:
        _, way = writer_of(spec, plan.layout, plan.trainer)
        return way.run(spec, plan.layout, way.written(spec, plan.layout).values)
    except InputError:
        return None
