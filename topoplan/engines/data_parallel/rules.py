"""Legality of layouts whose backend splits data only. Each rule names its source."""

from __future__ import annotations

from topoplan.engines.rule import Rule
from topoplan.layout.layout import DEFAULTS, Layout, batch_remedy, keys_of, undivided
from topoplan.operators.layers import attention_heads
from topoplan.specs.case import Case
from topoplan.specs.model import Model


def _degrees(case: Case, layout: Layout) -> str | None:
    for key in ("tp", "pp", "vpp", "ep", "etp"):
        if getattr(layout, key) > 1:
            return f"{key} {getattr(layout, key)} with backend {layout.backend}"
    if layout.cp > 1 and layout.backend != "fsdp2":
        return f"cp {layout.cp} with backend {layout.backend}"
    return None


def _batch(case: Case, layout: Layout) -> str | None:
    return undivided(case.job.global_batch_size, layout.micro_batch_size, layout.dp)


def _batch_fix(case: Case, layout: Layout) -> str:
    return batch_remedy(case.job.global_batch_size, layout.micro_batch_size, layout.dp)


def _offload(case: Case, layout: Layout) -> str | None:
    away = layout.offload or layout.offload_optimizer
    if away and case.cluster.host_memory_bytes is None and not case.is_past:
        return "offload without host_memory in the spec"
    return None


def _states(case: Case, layout: Layout) -> str | None:
    for key in ("zero_stage", "sharding", "offload_optimizer", "offload_param", "offload", "sync_each_batch"):
        value = getattr(layout, key)
        if key not in keys_of(layout.backend) and value != DEFAULTS[key]:
            return f"{key} {str(value).lower()} with backend {layout.backend}"
    return None


def _zero_stage(case: Case, layout: Layout) -> str | None:
    if layout.backend == "deepspeed" and layout.zero_stage not in (1, 2, 3):
        return f"zero_stage {layout.zero_stage} with backend deepspeed"
    return None


def _offload_param(case: Case, layout: Layout) -> str | None:
    if layout.offload_param and layout.zero_stage != 3:
        return f"offload_param with zero_stage {layout.zero_stage}"
    if layout.offload_param and not layout.offload_optimizer:
        return "offload_param without offload_optimizer"
    return None


def _undivided_heads(model: Model, degree: int) -> str | None:
    """Each rank gets whole query heads; key and value heads are divided or repeated.

    Source: verl `models/transformers/monkey_patch.py::apply_monkey_patch`.
    """
    for layer in {id(layer): layer for layer in model.layers}.values():
        found = attention_heads(model, layer)
        if found is None:
            return f"ulysses {degree} with linear attention layers"
        heads, kv_heads = found
        if heads % degree:
            return f"{heads} heads % ulysses {degree} = {heads % degree}"
        if kv_heads % degree and degree % kv_heads:
            return f"{kv_heads} KV heads and ulysses {degree}: neither divides the other"
    return None


def ulysses_degrees(model: Model, gpus: int, node_gpus: int) -> list[int]:
    """Return the Ulysses degrees that divide the GPUs and the model's heads; a group stays inside a node."""
    return [
        degree
        for degree in range(1, min(gpus, node_gpus) + 1)
        if gpus % degree == 0 and (degree == 1 or _undivided_heads(model, degree) is None)
    ]


def _ulysses(case: Case, layout: Layout) -> str | None:
    degree = layout.ulysses
    if degree == 1:
        return None
    if layout.backend == "ddp":
        return f"ulysses {degree} with backend ddp"
    if problem := _undivided_heads(case.model, degree):
        return problem
    if (world := case.cluster.world_size) % degree:
        return f"world size {world} % ulysses {degree} = {world % degree}"
    if case.cluster.gpus_per_node % degree and degree % case.cluster.gpus_per_node:
        return f"{case.cluster.gpus_per_node} GPUs of a node % ulysses {degree}"
    if case.job.seq_len % degree:
        return f"seq_len {case.job.seq_len} % ulysses {degree} = {case.job.seq_len % degree}"
    return None


def _quantised(case: Case, layout: Layout) -> str | None:
    if case.job.finetuning != "qlora":
        return None
    # Only NF4 has a storage dtype that can be sharded (bnb_4bit_quant_storage).
    shards = "fsdp2" if layout.backend == "fsdp2" else "zero_stage 3" if layout.zero_stage == 3 else ""
    return f"{shards} with weights in 8 bits" if shards and case.job.quantization_bit == 8 else None


def _tuning(case: Case, layout: Layout) -> str | None:
    if case.job.pure_bf16 and layout.backend == "deepspeed":
        return "pure_bf16 with backend deepspeed, whose optimizer keeps fp32 weights"
    if case.job.mtp_num_layers:
        return f"mtp_num_layers {case.job.mtp_num_layers} with backend {layout.backend}"
    return None


def _hybrid(case: Case, layout: Layout) -> str | None:
    if layout.backend == "fsdp2" and layout.sharding == "hybrid" and case.cluster.nodes == 1:
        return "hybrid sharding in one node"
    return None


SHARDED_RULES = (
    Rule("degrees", "transformers Trainer", _degrees, "set it to 1, or take a backend on Megatron"),
    Rule("states", "the trainers' own keys", _states, "leave it out, or take a backend that has it"),
    Rule("zero-stage", "DeepSpeed runtime/zero/config.py", _zero_stage, "choose zero_stage 1, 2 or 3"),
    Rule(
        "offload-param",
        "DeepSpeed runtime/zero/config.py",
        _offload_param,
        "take zero_stage 3 with offload_optimizer, or leave it out",
    ),
    Rule("batch", "transformers Trainer", _batch, "change global_batch_size, or lower micro_batch_size", _batch_fix),
    Rule("host-memory", "what is offloaded has to fit there", _offload, "say host_memory in the spec"),
    Rule("hybrid-sharding", "torch distributed/fsdp: a mesh of two dimensions", _hybrid, "set sharding to full"),
    Rule(
        "ulysses",
        "DeepSpeed sequence/layer.py; verl utils/ulysses.py",
        _ulysses,
        "with deepspeed or fsdp2, choose a divisor of heads, GPUs of a node and seq_len",
    ),
    Rule("quantised", "LLaMA-Factory model/model_utils/quantization.py", _quantised, "take ddp or zero_stage 2"),
    Rule("tuning", "DeepSpeed runtime/bf16_optimizer.py; transformers models", _tuning, "leave it out"),
)
"""Rules on a layout of ddp, deepspeed or fsdp2."""
