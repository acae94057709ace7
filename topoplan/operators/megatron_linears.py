"""The linear layers of a model as Megatron-core builds them, and which of them `megatron sft` of ms-swift adapts.

Names and ways to split: megatron-core 0.16 `core/models/gpt/gpt_layer_specs.py`, `transformer/attention.py`,
`multi_latent_attention.py`, `mlp.py`, `moe/experts.py` and `multi_token_prediction.py`. `all-linear` means every
`TELinear`, `TELayerNormColumnParallelLinear` and `TEGroupedLinear` but the output layer (ms-swift 4.6.0
`swift/megatron/utils/utils.py::find_all_linears`): attention, MLPs, shared and routed experts and a
multi-token-prediction layer's eh_proj. The router and a shared expert's gate are none of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from topoplan.errors import SpecError, nearest
from topoplan.specs.job import Job
from topoplan.specs.model import AnyAttention, Attention, LatentAttention, Layer, Mlp, Model

ROW_PARALLEL = ("linear_proj", "linear_fc2", "out_proj")
"""Split over their inputs; the others over their outputs, but for the next ones."""
REPLICATED = ("linear_q_down_proj", "linear_kv_down_proj")
"""Whole on every rank of a tensor-parallel group."""

Side = Literal["column", "row", "replicated"]


def target_of(name: str) -> str:
    """The name by which a layer is found for an adapter: `experts.linear_fc1` by linear_fc1, as PEFT does."""
    return name.rpartition(".")[2]


def side_of(name: str) -> Side:
    """Which side of its weight tensor parallel splits."""
    target = target_of(name)
    return "row" if target in ROW_PARALLEL else "replicated" if target in REPLICATED else "column"


@dataclass(frozen=True, slots=True)
class MegatronLinear:
    """One linear layer, or one in each of several experts; sides are those of the whole model."""

    name: str
    """As in `core/models`; those of experts begin with `experts.` and `shared_experts.`."""
    inputs: int
    outputs: int
    experts: int = 0
    """How many there are, each with its own weight; 0 outside of routed experts."""


def _attention_linears(hidden: int, attention: AnyAttention) -> Iterator[MegatronLinear]:
    if isinstance(attention, Attention):
        query = attention.heads * attention.head_dim
        mixed = query * (2 if attention.output_gate else 1) + 2 * attention.kv_heads * attention.head_dim
        yield MegatronLinear("linear_qkv", hidden, mixed)
        yield MegatronLinear("linear_proj", query, hidden)
    elif isinstance(attention, LatentAttention):
        query = attention.heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
        if attention.q_lora_rank:
            yield MegatronLinear("linear_q_down_proj", hidden, attention.q_lora_rank)
            yield MegatronLinear("linear_q_up_proj", attention.q_lora_rank, query)
        else:
            yield MegatronLinear("linear_q_proj", hidden, query)
        yield MegatronLinear("linear_kv_down_proj", hidden, attention.kv_lora_rank + attention.qk_rope_head_dim)
        key_value = attention.heads * (attention.qk_nope_head_dim + attention.v_head_dim)
        yield MegatronLinear("linear_kv_up_proj", attention.kv_lora_rank, key_value)
        yield MegatronLinear("linear_proj", attention.heads * attention.v_head_dim, hidden)
    else:
        key = attention.key_heads * attention.key_head_dim
        value = attention.value_heads * attention.value_head_dim
        yield MegatronLinear("in_proj", hidden, 2 * key + 2 * value + 2 * attention.value_heads)
        yield MegatronLinear("out_proj", value, hidden)


def _mlp_linears(
    hidden: int, width: int, *, gated: bool, prefix: str = "", experts: int = 0
) -> Iterator[MegatronLinear]:
    yield MegatronLinear(f"{prefix}linear_fc1", hidden, width * (2 if gated else 1), experts)
    yield MegatronLinear(f"{prefix}linear_fc2", width, hidden, experts)


@lru_cache(maxsize=4096)
def megatron_linears(model: Model, layer: Layer) -> tuple[MegatronLinear, ...]:
    """The linear layers of one block."""
    hidden, ffn = model.hidden_size, layer.ffn
    linears = [MegatronLinear("eh_proj", 2 * hidden, hidden)] if layer.predicts_next else []
    linears += _attention_linears(hidden, layer.attention)
    if isinstance(ffn, Mlp):
        linears += _mlp_linears(hidden, ffn.intermediate_size, gated=ffn.gated)
        return tuple(linears)
    linears += _mlp_linears(hidden, ffn.intermediate_size, gated=ffn.gated, prefix="experts.", experts=ffn.experts)
    if ffn.shared_intermediate_size:
        linears += _mlp_linears(hidden, ffn.shared_intermediate_size, gated=ffn.gated, prefix="shared_experts.")
    return tuple(linears)


def target_names(model: Model) -> tuple[str, ...]:
    """All names that adapters of its decoder may be asked for by."""
    linears = (linear for layer in model.layers for linear in megatron_linears(model, layer))
    return tuple(dict.fromkeys(target_of(linear.name) for linear in linears))


def check_targets(job: Job, model: Model) -> None:
    """Raise SpecError for adapters on layers that Megatron's model does not have."""
    known = (*target_names(model), *(["eh_proj"] if job.mtp_num_layers else []))
    for name in job.lora_target:
        if name not in ("all", *known):
            raise SpecError(
                f"{model.name} has no linear layer called {name} in Megatron-core",
                where="job.lora_target",
                expected=f"expected all, or some of {', '.join(known)}",
                remedy=nearest(name, known),
            )
