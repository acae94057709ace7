"""A layout in its trainer's keys."""

from __future__ import annotations

from typing import Any

from topoplan.layout.layout import Layout


def trainer_keys(layout: Layout, *, is_moe: bool) -> dict[str, Any]:
    """The keys of a layout in its trainer's words; None where the key is best left out.

    For `mca` LLaMA-Factory's, for `megatron` those of ms-swift.
    """
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
