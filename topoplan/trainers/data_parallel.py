"""What the trainers that split data alone have in common: the layout of a sharding, and what is not predicted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from topoplan.layout.layout import Layout, Recompute
from topoplan.reading.setup import Launch
from topoplan.reading.values import Keys
from topoplan.trainers.sharding import Sharding
from topoplan.trainers.usual import says_sync
from topoplan.units import shown

USUAL_SEQ_LEN = 2048
"""Tokens of a sequence where nothing says how many: LLaMA-Factory's default of cutoff_len."""
CHECKPOINTING = Recompute(granularity="full", method="uniform", num_layers=1)
"""Gradient checkpointing: each layer is recomputed."""
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw_8bit"),
}
"""Of transformers' names (`training_args.py::OptimizerNames`), those whose memory is known."""


def layout_of(
    sharding: Sharding,
    world: int,
    *,
    checkpoints: bool,
    fused: bool,
    expandable: bool,
    ulysses: int = 1,
    sync_each_batch: bool = True,
    micro_batch_size: int,
    gradient_accumulation_steps: int,
) -> Layout:
    """The layout of a sharding on `world` GPUs."""
    return Layout.of(
        backend=sharding.backend,
        dp=max(1, world // ulysses),
        ulysses=ulysses,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        distributed_optimizer=False,
        recompute=CHECKPOINTING if checkpoints else Recompute(),
        zero_stage=sharding.zero_stage,
        offload_optimizer=sharding.offload_optimizer,
        offload_param=sharding.offload_param,
        sharding=sharding.sharding,
        offload=sharding.offload,
        sync_each_batch=sharding.backend != "fsdp2" or sync_each_batch,
        grad_reduce_in_fp32=sharding.backend != "fsdp2",  # accelerate reduces in the type of the products
        fused_linear_cross_entropy=fused,
        expandable_segments=expandable,
    )


def syncs_each_batch(keys: Keys) -> bool:
    """Whether the trainer reduces gradients after every micro batch (transformers `trainer.py`, accelerate no_sync)."""
    config = keys.given("accelerator_config")
    if isinstance(config, str) and config.lstrip().startswith("{"):
        try:
            config = json.loads(config)
        except (ValueError, RecursionError):
            config = None
    return says_sync(config)


def optimizer_of(keys: Keys) -> str:
    """The job's optimizer. Raises NotPredictedError for one whose states are not known."""
    name = str(keys.value("optim"))
    if name not in _OPTIMIZERS:
        keys.not_predicted(("optim",))
    return _OPTIMIZERS[name]


def refuse(keys: Keys, off: Mapping[str, Sequence[Any]]) -> None:
    """Raise NotPredictedError, for all keys at once, that have a value other than those that leave them off."""
    on = [key for key, values in off.items() if keys.given(key) is not None and keys.given(key) not in values]
    if on:
        words = " and ".join(f"{key} {_word(keys.given(key))}" for key in on)
        keys.not_predicted(on, words)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else shown(value)


def expandable_segments(launch: Launch | None) -> bool | None:
    """Whether a command's allocator has expandable segments; None where it does not say."""
    found = [found for name in _ALLOCATOR if launch and (found := launch.variable(name))]
    return "expandable_segments:true" in found[-1].value.lower() if found else None
