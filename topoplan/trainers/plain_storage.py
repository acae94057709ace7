"""The sizes of a checkpoint without Megatron: what transformers, DeepSpeed, accelerate and PEFT save in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from topoplan.engines.megatron.states import stage_parameters
from topoplan.layout.layout import Layout
from topoplan.operators.params import parameter_count
from topoplan.specs.case import case_with
from topoplan.specs.model import Attention, LatentAttention, Layer, Mlp, Model
from topoplan.specs.spec import Spec
from topoplan.trainers.checkpoint_size import CheckpointSize
from topoplan.trainers.traits import MCA

_MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.0}
"""Bytes of Adam's two moments, a trained parameter."""


def plain_checkpoint_size(spec: Spec, layout: Layout, values: Mapping[str, Any]) -> CheckpointSize:
    """The checkpoints of a run with these trainer keys.

    transformers trainer.py, _save_checkpoint: weights for Hugging Face (of LoRA the adapters alone) in the type that
    they are trained in, and the optimizer's state. DeepSpeed saves an fp32 copy of what is trained and the weights of
    its engine with it (runtime/engine.py, save_checkpoint); accelerate the weights once more with FSDP
    (utils/fsdp_utils.py, save_fsdp_model), both in their own form.
    """
    job = spec.job
    trained = trained_parameters(spec)
    saved = trained if job.finetuning in ("lora", "qlora") else parameter_count(spec.model)
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


def trained_parameters(spec: Spec) -> int:
    """Parameters that get a gradient."""
    job, model = spec.job, spec.model
    if job.finetuning in ("lora", "qlora"):
        return sum(_adapter_parameters(layer, model, job.lora_rank or 8, job.lora_target) for layer in model.layers)
    if job.finetuning == "freeze":
        count = job.freeze_trainable_layers
        kept = model.layers[-count:] if count < 0 else model.layers[: len(model.layers) - count]
        return parameter_count(model) - parameter_count(replace(model, layers=kept))
    return megatron_trained_parameters(spec)


def megatron_trained_parameters(spec: Spec) -> int:
    """The same of Megatron's model: adapters are on its own linear layers, experts among them."""
    parameters = stage_parameters(case_with(spec, MCA), Layout(), 0)
    return parameters.dense + parameters.expert


def _adapter_parameters(layer: Layer, model: Model, rank: int, targets: tuple[str, ...]) -> int:
    """`rank` times the width that goes in and the one that comes out, of each linear layer that is meant."""
    return sum(
        rank * (inputs + outputs)
        for name, inputs, outputs in _linear_layers(layer, model.hidden_size)
        if "all" in targets or name in targets
    )


def _linear_layers(layer: Layer, hidden: int) -> Iterator[tuple[str, int, int]]:
    """Name in Hugging Face's model, inputs and outputs of each linear layer; not those of experts, which are no
    modules of their own in transformers 5."""
    attention, ffn = layer.attention, layer.ffn
    if isinstance(attention, Attention):
        query, key = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        yield "q_proj", hidden, query * (2 if attention.output_gate else 1)
        yield "k_proj", hidden, key
        yield "v_proj", hidden, key
        yield "o_proj", query, hidden
    elif isinstance(attention, LatentAttention):
        query = attention.heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
        key_value = attention.heads * (attention.qk_nope_head_dim + attention.v_head_dim)
        if attention.q_lora_rank:
            yield "q_a_proj", hidden, attention.q_lora_rank
            yield "q_b_proj", attention.q_lora_rank, query
        else:
            yield "q_proj", hidden, query
        yield "kv_a_proj_with_mqa", hidden, attention.kv_lora_rank + attention.qk_rope_head_dim
        yield "kv_b_proj", attention.kv_lora_rank, key_value
        yield "o_proj", attention.heads * attention.v_head_dim, hidden
    else:
        key = attention.key_heads * attention.key_head_dim
        value = attention.value_heads * attention.value_head_dim
        yield "in_proj_qkv", hidden, 2 * key + value
        yield "in_proj_z", hidden, value
        yield "out_proj", value, hidden
    width = ffn.intermediate_size if isinstance(ffn, Mlp) else ffn.shared_intermediate_size
    if width:
        if ffn.gated:
            yield "gate_proj", hidden, width
        yield "up_proj", hidden, width
        yield "down_proj", width, hidden
