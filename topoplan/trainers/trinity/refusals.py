"""What Trinity-RFT's trainer cannot do, does otherwise than planned, or ignores.

Sources: Trinity-RFT 0.6.0, `common/config.py`, `common/config_validator.py`, `algorithm/algorithm.py`,
`trainer/verl_legacy/` (the backend that verl below 0.8 gets) and `trainer/verl/` (verl 0.8 and later); verl 0.7.1
`models/transformers/monkey_patch.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.engines.data_parallel.rules import ulysses_degrees
from topoplan.errors import LayoutError, ModelError, SpecError
from topoplan.layout.layout import Layout
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec

TRINITY, VERL = "0.6.0", "0.7.1"
"""The versions that are written for. verl 0.8 has a backend of its own in Trinity-RFT, which leaves rope_scaling out
of training (`trainer/verl/config.py`, _build_model_config)."""


def check_trinity(spec: Spec, layout: Layout) -> None:
    """Raise SpecError, LayoutError or ModelError for what cannot be written, with the rule."""
    _check_job(spec)
    _check_layout(spec, layout)
    check_model(spec.model)


def check_model(model: Model, where: str = "model") -> None:
    """Raise ModelError for one that no Trinity-RFT job is written for."""
    if model.vision is not None:
        raise ModelError(
            f"{model.name} has a vision tower, for which no Trinity-RFT job is written",
            where=where,
            remedy="take a model without" if where.startswith("-") else "take another trainer",
        )


def _check_job(spec: Spec) -> None:
    job = spec.job
    for key, reason, remedy in _job_problems(job):
        raise SpecError(reason, where=": ".join(filter(None, (spec.path, f"job.{key}"))), remedy=remedy)


def _job_problems(job: Job) -> Iterator[tuple[str, str, str]]:
    if job.stage != "sft":
        yield "stage", f"no Trinity-RFT job is written for stage {job.stage}", "set stage: sft, or take another trainer"
    if job.finetuning != "full":
        yield "finetuning", f"no Trinity-RFT job is written for {job.finetuning}", "set finetuning: full"
    if job.precision != "bf16" or job.pure_bf16:
        kind = "pure bf16" if job.pure_bf16 else job.precision
        yield "precision", f"the trainer computes in bf16 with fp32 weights, not in {kind}", "set precision: bf16"
    if job.optimizer != "adamw":
        yield "optimizer", f"the trainer has torch's AdamW and not {job.optimizer}", "set optimizer: adamw"
    if job.packing:
        reason = "the trainer packs no samples: it fills a micro batch with whole ones up to max_token_len_per_gpu"
        yield "packing", reason, "set packing: false"
    if job.samples is None and job.epochs % 1:
        reason = f"the trainer counts whole epochs, and {job.epochs:g} of an unknown number of samples are no steps"
        yield "epochs", reason, "name job.samples, or a whole number of epochs"


def _check_layout(spec: Spec, layout: Layout) -> None:
    problems = {
        "the trainer has no context parallelism beside Ulysses": layout.cp > 1,
        "no Trinity-RFT job is written for a fused loss": layout.fused_linear_cross_entropy,
        "the trainer reduces gradients after every micro batch, whatever sync_each_batch says": (
            not layout.sync_each_batch
        ),
    }
    for reason, is_so in problems.items():
        if is_so:
            raise LayoutError(reason, where=layout.id, remedy="take another layout, or another trainer")
    gpus, node_gpus = layout.world_size, spec.cluster.gpus_per_node
    degrees = ulysses_degrees(spec.model, gpus, node_gpus)
    if layout.ulysses not in degrees:
        raise LayoutError(
            f"ulysses {layout.ulysses} does not divide the GPUs and the attention heads of {spec.model.name}, or its"
            " group is larger than a node",
            where=layout.id,
            expected=f"expected one of {', '.join(map(str, degrees))} (verl asserts that heads divide)",
        )
    if spec.job.global_batch_size % layout.dp:
        raise LayoutError(
            f"{spec.job.global_batch_size} sequences do not divide by dp {layout.dp}",
            where=layout.id,
            remedy="change global_batch_size or ulysses",
        )
    if layout.offload and spec.cluster.host_memory_bytes is None:
        raise SpecError(
            "offload puts parameters, gradients and optimizer into host memory, and the spec does not say how much"
            " there is",
            where="host_memory",
            remedy="add host_memory: 2TiB, or what a node has",
        )
