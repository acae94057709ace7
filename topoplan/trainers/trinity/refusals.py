"""What Trinity-RFT's trainer refuses, does differently from the plan, or ignores.

Sources: Trinity-RFT 0.6.0, `common/config.py`, `common/config_validator.py`, `algorithm/algorithm.py`,
`trainer/verl_legacy/` (the backend for verl below 0.8) and `trainer/verl/` (verl 0.8 and later); verl 0.7.1
`models/transformers/monkey_patch.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.engines.data_parallel.rules import ulysses_degrees
from topoplan.errors import LayoutError, ModelError
from topoplan.layout.layout import Layout
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers.refusal import Refusal, offload

TRINITY, VERL = "0.6.0", "0.7.1"
"""The versions that files are written for. Trinity-RFT's separate backend for verl 0.8 ignores rope_scaling in training
(`trainer/verl/config.py`, _build_model_config)."""


def refusals(spec: Spec, layout: Layout) -> Iterator[Refusal]:
    """Refuse what no files can be written for."""
    yield from _job(spec.job, spec.path)
    yield from _layout(spec, layout)
    yield from model_refusals(spec.model)


def model_refusals(model: Model, where: str = "model") -> Iterator[Refusal]:
    """Refuse a model that no Trinity-RFT job is written for."""
    if model.vision is not None:
        yield Refusal(
            "vision",
            f"{model.name} has a vision tower, for which no Trinity-RFT job is written",
            where=where,
            remedy="take a model without" if where.startswith("-") else "take another trainer",
            kind=ModelError,
        )


def _job(job: Job, path: str | None) -> Iterator[Refusal]:
    def refusal(key: str, what: str, remedy: str) -> Refusal:
        return Refusal(key, what, where=": ".join(filter(None, (path, f"job.{key}"))), remedy=remedy)

    if job.stage != "sft":
        what = f"no Trinity-RFT job is written for stage {job.stage}"
        yield refusal("stage", what, "set stage: sft, or take another trainer")
    if job.finetuning != "full":
        yield refusal("finetuning", f"no Trinity-RFT job is written for {job.finetuning}", "set finetuning: full")
    if job.precision != "bf16" or job.pure_bf16:
        kind = "pure bf16" if job.pure_bf16 else job.precision
        what = f"the trainer computes in bf16 with fp32 weights, not in {kind}"
        yield refusal("precision", what, "set precision: bf16")
    if job.optimizer != "adamw":
        what = f"the trainer has torch's AdamW and not {job.optimizer}"
        yield refusal("optimizer", what, "set optimizer: adamw")
    if job.packing:
        what = "the trainer packs no samples: it fills a micro batch with whole ones up to max_token_len_per_gpu"
        yield refusal("packing", what, "set packing: false")
    if job.samples is None and job.epochs % 1:
        what = f"the trainer counts whole epochs, and {job.epochs:g} of an unknown number of samples are no steps"
        yield refusal("epochs", what, "name job.samples, or a whole number of epochs")


def _layout(spec: Spec, layout: Layout) -> Iterator[Refusal]:
    problems = {
        "context-parallel": ("the trainer has no context parallelism beside Ulysses", layout.cp > 1),
        "fused-loss": ("no Trinity-RFT job is written for a fused loss", layout.fused_linear_cross_entropy),
        "gradient-sync": (
            "the trainer reduces gradients after every micro batch, whatever sync_each_batch says",
            not layout.sync_each_batch,
        ),
    }
    for rule, (what, is_so) in problems.items():
        if is_so:
            remedy = "take another layout, or another trainer"
            yield Refusal(rule, what, where=layout.id, remedy=remedy, kind=LayoutError)
    degrees = ulysses_degrees(spec.model, layout.world_size, spec.cluster.gpus_per_node)
    if layout.ulysses not in degrees:
        yield Refusal(
            "ulysses",
            f"ulysses {layout.ulysses} does not divide the GPUs and the attention heads of {spec.model.name}, or"
            " its group is larger than a node",
            where=layout.id,
            expected=f"expected one of {', '.join(map(str, degrees))} (verl asserts that heads divide)",
            kind=LayoutError,
        )
    yield from offload(spec, layout)
