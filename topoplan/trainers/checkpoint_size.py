"""What a run writes to disk: the sizes of a checkpoint, and of those that transformers and its engines save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from topoplan.layout.layout import Layout
from topoplan.operators.finetuning import elements_of
from topoplan.operators.params import parameter_count
from topoplan.specs.job import ADAPTERS
from topoplan.specs.spec import Spec


class CheckpointSize(NamedTuple):
    """Bytes of one checkpoint over all its files, without logs and tokenizer, which are small."""

    megatron_bytes: int
    """Weights in Megatron's format; 0 if they are not saved."""
    hf_bytes: int
    """Weights in Hugging Face's format; 0 if they are not saved."""
    optimizer_bytes: int
    """Optimizer states; 0 if they are not saved."""
    at_once: int | None
    """Maximum number of checkpoints that exist at a time, counting an old one that is only removed once its successor
    is complete. None without a limit; 0 if only the final weights are saved."""

    what: str = "weights"
    """What a checkpoint holds besides optimizer states; with LoRA, adapters rather than weights."""

    saves_at_end: bool = True
    """Whether the weights are saved again at the end, in output_dir itself."""

    @property
    def final_bytes(self) -> int:
        """Bytes of the weights that are saved again at the end."""
        return self.megatron_bytes + self.hf_bytes if self.saves_at_end else 0

    @property
    def total_bytes(self) -> int:
        """Bytes of one checkpoint."""
        return self.megatron_bytes + self.hf_bytes + self.optimizer_bytes


_MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.0}
"""Bytes of Adam's two moments per trained parameter."""


def plain_checkpoint_size(spec: Spec, layout: Layout, values: Mapping[str, Any]) -> CheckpointSize:
    """Return the checkpoint sizes of a run with these trainer keys.

    transformers (trainer.py, _save_checkpoint) saves Hugging Face weights, with LoRA only the adapters, in the dtype of
    training, and optimizer states. DeepSpeed adds an fp32 copy of the trained parameters and its engine's weights
    (runtime/engine.py, save_checkpoint). accelerate with FSDP adds a second copy of the weights (utils/fsdp_utils.py,
    save_fsdp_model). Both use formats of their own.
    """
    job = spec.job
    trained = elements_of(spec.model, job).trained
    saved = trained if job.finetuning in ADAPTERS else parameter_count(spec.model)
    width = 2 if job.pure_bf16 or layout.backend == "deepspeed" else 4
    moments = 4.0 if job.pure_bf16 and job.optimizer == "adamw" else _MOMENTS[job.optimizer]
    copies = {"ddp": 0.0, "deepspeed": 4.0 * trained + 2.0 * saved, "fsdp2": float(width) * saved}
    state = 0.0 if values.get("save_only_model") else moments * trained + copies[layout.backend]
    limit = values.get("save_total_limit")
    return CheckpointSize(
        megatron_bytes=0,
        hf_bytes=width * saved,
        optimizer_bytes=round(state),
        at_once=0 if values.get("save_strategy") == "no" else None if limit is None else max(1, int(limit)) + 1,
    )
