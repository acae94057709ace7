"""Trainer keys responsible for each layout rule, as the Megatron and data-parallel trainers name them."""

from __future__ import annotations

from collections.abc import Mapping

from topoplan.reading.setup import Configuration
from topoplan.trainers.megatron_keys import (
    CP,
    DISPATCHER,
    EMBEDDING,
    EP,
    ETP,
    FIRST,
    LAST,
    LOSS,
    PP,
    SP,
    SPLIT,
    TP,
    VPP,
)

KEYS_OF_RULE: Mapping[str, tuple[str, ...]] = {
    "overlap": ("overlap_param_gather",),
    "adapter": ("optimizer_offload_fraction", "optimizer_cpu_offload"),
    "optimizer": (
        *("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype", "optimizer_offload_fraction"),
        *("optimizer_cpu_offload", "use_precision_aware_optimizer"),
    ),
    "user-buffers": ("tp_comm_overlap", TP),
    "world-size": (TP, PP, CP),
    "tp-in-nvlink-domain": (TP,),
    "heads": (TP,),
    "kv-heads": (TP,),
    "widths": (TP,),
    "vocabulary": (TP,),
    "context-parallel": (CP,),
    "experts": (EP, ETP),
    "expert-grid": (EP, ETP, PP),
    "dispatcher": (DISPATCHER,),
    "combined-passes": ("overlap_moe_expert_parallel_comm", VPP),
    "expert-widths": (ETP, TP),
    "expert-adapters": (ETP, "target_modules"),
    "fp8-widths": ("fp8", "fp8_format", TP),
    "pipeline-split": (SPLIT, FIRST, LAST, EMBEDDING, LOSS, VPP, PP),
    "mtp-stage": ("mtp_num_layers", PP),
    "vision-first-stage": (SPLIT, VPP, PP),
    "batch": ("max_samples", "global_batch_size", "per_device_train_batch_size"),
    "interleaving": ("gradient_accumulation_steps", "global_batch_size", VPP),
    "sequence-parallel": (SP, TP),
    "sequence-length": ("cutoff_len", "max_length", CP, TP),
    "recompute": ("recompute_modules", "recompute_num_layers", "recompute_granularity"),
    "degrees": ("sequence_parallel_size",),
    "states": ("deepspeed", "fsdp", "sequence_parallel_size"),
    "zero-stage": ("deepspeed", "zero_optimization"),
    "offload-param": ("deepspeed", "zero_optimization"),
    "host-memory": ("optimizer_offload_fraction", "optimizer_cpu_offload", "deepspeed", "fsdp", "zero_optimization"),
    "hybrid-sharding": ("fsdp",),
    "ulysses": ("sequence_parallel_size", "ulysses_sequence_parallel_size", "ulysses_size"),
    "quantised": ("quantization_bit", "quant_bits"),
    "tuning": ("pure_bf16", "mtp_num_layers"),
}
"""Layout rule -> the trainer keys that decide it; the first one present in a file is reported."""


def key_line(configuration: Configuration, keys: tuple[str, ...]) -> int | None:
    """Return the line of the first of these keys that the configuration has."""
    return next((configuration.line(key) for key in keys if key in configuration.source.data), None)
