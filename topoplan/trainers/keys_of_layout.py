"""A layout in its trainer's keys."""

from __future__ import annotations

from typing import Any

from topoplan.layout.layout import Layout
from topoplan.reading.setup import Trainer
from topoplan.trainers.usual import must_say_sync

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def trainer_keys(layout: Layout, *, is_moe: bool, trainer: Trainer = "llamafactory") -> dict[str, Any]:
    """The keys of a layout in its trainer's words; None where the key is best left out.

    For `mca` LLaMA-Factory's, for `megatron` those of ms-swift, and of either where data alone is split.
    """
    if not layout.is_megatron:
        return _sharded_keys(layout, trainer)
    recompute, is_mca = layout.recompute, layout.backend == "mca"
    full, selective = recompute.granularity == "full", recompute.granularity == "selective"
    batch = (
        {
            "per_device_train_batch_size": layout.micro_batch_size,
            "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        }
        if is_mca
        else {"micro_batch_size": layout.micro_batch_size}
    )
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "pipeline_model_parallel_layout": layout.pipeline_layout,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep if is_moe else None,
        "expert_tensor_parallel_size": layout.etp if is_moe else None,
        "sequence_parallel": layout.sequence_parallel,
        **batch,
        "recompute_granularity": recompute.granularity if full or selective else None if is_mca else "none",
        "recompute_method": recompute.method if full else None,
        "recompute_num_layers": recompute.num_layers if full else None,
        "recompute_modules": ",".join(recompute.modules) if selective else None,
        "use_distributed_optimizer": layout.distributed_optimizer,
        "overlap_grad_reduce": layout.overlap_grad_reduce,
        "overlap_param_gather": layout.overlap_param_gather,
        "optimizer_cpu_offload": layout.optimizer_offload_fraction > 0,
        "optimizer_offload_fraction": layout.optimizer_offload_fraction or None,
    }


def _sharded_keys(layout: Layout, trainer: Trainer) -> dict[str, Any]:
    is_swift, checkpoints = trainer == "swift", layout.recompute.granularity != "none"
    allocator = {ALLOCATOR: "expandable_segments:True" if layout.expandable_segments else None}
    if trainer == "deepspeed":
        return {
            "zero_optimization": _zero(layout),
            "train_micro_batch_size_per_gpu": layout.micro_batch_size,
            "gradient_accumulation_steps": layout.gradient_accumulation_steps,
            "gradient_checkpointing": checkpoints,
            **allocator,
        }
    recompute = (
        {"gradient_checkpointing": checkpoints} if is_swift else {"disable_gradient_checkpointing": not checkpoints}
    )
    return {
        "deepspeed": _deepspeed(layout, is_swift=is_swift) if layout.backend == "deepspeed" else None,
        "fsdp": _fsdp(layout, is_swift=is_swift) if layout.backend == "fsdp2" else None,
        "accelerator_config": "with sync_each_batch" if must_say_sync(layout) else None,
        "per_device_train_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        **recompute,
        **({"sequence_parallel_size": layout.ulysses} if is_swift else {}),
        "use_liger_kernel" if is_swift else "enable_liger_kernel": layout.fused_linear_cross_entropy,
        **allocator,
    }


def _zero(layout: Layout) -> str:
    offloads = [key for key in ("offload_optimizer", "offload_param") if getattr(layout, key)]
    return f"stage {layout.zero_stage}" + (f", {' and '.join(offloads)} on cpu" if offloads else "")


def _deepspeed(layout: Layout, *, is_swift: bool) -> str:
    """ms-swift's preset (swift/config/), LLaMA-Factory's example (examples/deepspeed/), or what a file has to say."""
    stage, offloads = layout.zero_stage, layout.offload_optimizer
    all_of_it = layout.offload_param or stage < 3
    if (is_swift or stage > 1) and (all_of_it or not offloads) and not (stage == 1 and offloads):
        name = f"zero{stage}" if is_swift else f"ds_z{stage}"
        return f"{name}{'_offload' if offloads else ''}{'' if is_swift else '_config.json'}"
    return f"a file with {_zero(layout)}"


def _fsdp(layout: Layout, *, is_swift: bool) -> str:
    if is_swift and not layout.offload and layout.recompute.granularity != "none":
        return "fsdp2"
    return f"FSDP2{' with fsdp_offload_params' if layout.offload else ''}"
