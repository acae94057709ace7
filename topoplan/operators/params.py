"""Parameters: every weight of a model as one table, and how Megatron-core cuts it over ranks.

The table gives the exact count of a model (tp = ep = 1) and of any rank. Which tensor is split how is read off
megatron-core 0.16: `core/transformer/attention.py` (SelfAttention), `multi_latent_attention.py` (q_down and kv_down
projections are duplicated, not split), `ssm/gated_delta_net.py`, `mlp.py`, `moe/experts.py` (TEGroupedMLP),
`moe/router.py`, `moe/shared_experts.py`, `multi_token_prediction.py`, `tensor_parallel/layers.py`
(VocabParallelEmbedding).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from topoplan.specs.model import AnyAttention, Attention, LatentAttention, Layer, Mlp, Model, Moe

Split = Literal["replicated", "tp", "expert", "expert_replicated"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One weight."""

    name: str
    elements: int
    split: Split
    """tp: over the tensor-parallel group, keys and values too when tp exceeds their heads (a rank then holds a part of
    a head and gathers the rest); expert: over the expert and expert-tensor groups; expert_replicated: over the expert
    group alone."""


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Elements that one rank holds, by the grid that shards their optimizer state."""

    dense: int = 0
    """In the dense grid: optimizer state is sharded over dp * cp."""
    expert: int = 0
    """In the expert grid: optimizer state is sharded over world / (etp * ep * pp)."""
    frozen: int = 0
    """Without gradient and optimizer state."""

    def __add__(self, other: RankParameters) -> RankParameters:
        return RankParameters(self.dense + other.dense, self.expert + other.expert, self.frozen + other.frozen)

    @property
    def total(self) -> int:
        """Every element on the rank."""
        return self.dense + self.expert + self.frozen


def _norm(model: Model, name: str) -> Tensor:
    return Tensor(name, model.hidden_size * (2 if model.norm_bias else 1), "replicated")


def _attention_tensors(model: Model, attention: AnyAttention) -> list[Tensor]:
    hidden = model.hidden_size
    if isinstance(attention, Attention):
        query = attention.heads * attention.head_dim * (2 if attention.output_gate else 1)
        mixed = query + 2 * attention.kv_heads * attention.head_dim
        tensors = [
            Tensor("linear_qkv", hidden * mixed, "tp"),
            Tensor("linear_proj", attention.heads * attention.head_dim * hidden, "tp"),
        ]
        if attention.qkv_bias:
            tensors.append(Tensor("linear_qkv.bias", mixed, "tp"))
        if attention.out_bias:
            tensors.append(Tensor("linear_proj.bias", hidden, "replicated"))
        if attention.qk_norm:
            tensors.append(Tensor("q_layernorm+k_layernorm", 2 * attention.head_dim, "replicated"))
        if attention.sinks:
            tensors.append(Tensor("softmax_offset", attention.heads, "tp"))
        return tensors
    if isinstance(attention, LatentAttention):
        query = attention.heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
        key_value = attention.heads * (attention.qk_nope_head_dim + attention.v_head_dim)
        if attention.q_lora_rank:
            tensors = [
                Tensor("linear_q_down_proj", hidden * attention.q_lora_rank, "replicated"),
                Tensor("q_layernorm", attention.q_lora_rank, "replicated"),
                Tensor("linear_q_up_proj", attention.q_lora_rank * query, "tp"),
            ]
        else:
            tensors = [Tensor("linear_q_proj", hidden * query, "tp")]
        return [
            *tensors,
            Tensor("linear_kv_down_proj", hidden * (attention.kv_lora_rank + attention.qk_rope_head_dim), "replicated"),
            Tensor("kv_layernorm", attention.kv_lora_rank, "replicated"),
            Tensor("linear_kv_up_proj", attention.kv_lora_rank * key_value, "tp"),
            Tensor("linear_proj", attention.heads * attention.v_head_dim * hidden, "tp"),
        ]
    key = attention.key_heads * attention.key_head_dim
    value = attention.value_heads * attention.value_head_dim
    return [
        Tensor("in_proj", hidden * (2 * key + 2 * value + 2 * attention.value_heads), "tp"),
        Tensor("conv1d", (2 * key + value) * attention.conv_kernel, "tp"),
        Tensor("dt_bias+A_log", 2 * attention.value_heads, "tp"),
        Tensor("out_norm", attention.value_head_dim, "replicated"),
        Tensor("out_proj", value * hidden, "tp"),
    ]


def _mlp_tensors(hidden: int, width: int, *, gated: bool, bias: bool, prefix: str = "") -> list[Tensor]:
    first = width * (2 if gated else 1)
    tensors = [Tensor(f"{prefix}linear_fc1", hidden * first, "tp"), Tensor(f"{prefix}linear_fc2", width * hidden, "tp")]
    if bias:
        tensors += [
            Tensor(f"{prefix}linear_fc1.bias", first, "tp"),
            Tensor(f"{prefix}linear_fc2.bias", hidden, "replicated"),
        ]
    return tensors


def _ffn_tensors(model: Model, ffn: Mlp | Moe) -> list[Tensor]:
    hidden = model.hidden_size
    if isinstance(ffn, Mlp):
        return _mlp_tensors(hidden, ffn.intermediate_size, gated=ffn.gated, bias=ffn.bias)
    first = ffn.intermediate_size * (2 if ffn.gated else 1)
    tensors = [
        Tensor("router", hidden * ffn.experts, "replicated"),
        Tensor("experts.linear_fc1", ffn.experts * hidden * first, "expert"),
        Tensor("experts.linear_fc2", ffn.experts * ffn.intermediate_size * hidden, "expert"),
    ]
    if ffn.router_bias:
        tensors.append(Tensor("router.bias", ffn.experts, "replicated"))
    if ffn.bias:
        tensors.append(Tensor("experts.linear_fc1.bias", ffn.experts * first, "expert"))
        tensors.append(Tensor("experts.linear_fc2.bias", ffn.experts * hidden, "expert_replicated"))
    if ffn.shared_intermediate_size:
        tensors += _mlp_tensors(
            hidden, ffn.shared_intermediate_size, gated=ffn.gated, bias=False, prefix="shared_experts."
        )
    if ffn.shared_gate:
        tensors.append(Tensor("shared_experts.gate", hidden, "replicated"))
    return tensors


@lru_cache(maxsize=64)
def mtp_layer(model: Model) -> Layer:
    """A multi-token-prediction layer of a model: its block is as the last one of the decoder.

    Source: `core/models/gpt/gpt_layer_specs.py::get_gpt_mtp_block_spec_for_backend`.
    """
    return replace(model.layers[-1], predicts_next=True)


def _mtp_tensors(model: Model) -> tuple[Tensor, ...]:
    """What a multi-token-prediction layer has beside its block (MultiTokenPredictionLayer)."""
    return (
        _norm(model, "enorm"),
        _norm(model, "hnorm"),
        Tensor("eh_proj", 2 * model.hidden_size * model.hidden_size, "tp"),
        _norm(model, "mtp final_layernorm"),
    )


@lru_cache(maxsize=4096)
def layer_tensors(model: Model, layer: Layer) -> tuple[Tensor, ...]:
    """All weights of one layer, its norms included."""
    return (
        *(_mtp_tensors(model) if layer.predicts_next else ()),
        _norm(model, "input_layernorm"),
        *_attention_tensors(model, layer.attention),
        _norm(model, "pre_mlp_layernorm"),
        *_ffn_tensors(model, layer.ffn),
    )


def embedding_tensors(model: Model) -> tuple[Tensor, ...]:
    """Word embedding and, for GPT-2, the position table."""
    tensors = [Tensor("word_embeddings", model.vocab_size * model.hidden_size, "tp")]
    if model.learned_positions:
        tensors.append(Tensor("position_embeddings", model.learned_positions * model.hidden_size, "replicated"))
    return tuple(tensors)


def head_tensors(model: Model) -> tuple[Tensor, ...]:
    """Final norm and, unless tied, the output layer."""
    norm = (_norm(model, "final_layernorm"),)
    if model.tie_word_embeddings:
        return norm
    return (*norm, Tensor("output_layer", model.vocab_size * model.hidden_size, "tp"))


def parameter_count(model: Model) -> int:
    """Exact number of parameters, as Hugging Face counts them: tied weights once, no multi-token-prediction layers."""
    total = sum(tensor.elements for tensor in (*embedding_tensors(model), *head_tensors(model)))
    for layer in model.layers:
        total += sum(tensor.elements for tensor in layer_tensors(model, layer))
    if model.vision:
        total += model.vision.parameters
    return total


def active_parameter_count(model: Model) -> int:
    """Parameters that one token passes through: of the experts only the chosen ones, the embedding not at all."""
    inactive = sum(tensor.elements for tensor in embedding_tensors(model))
    for layer in model.layers:
        if isinstance(layer.ffn, Moe):
            routed = sum(t.elements for t in layer_tensors(model, layer) if t.split in ("expert", "expert_replicated"))
            inactive += routed * (layer.ffn.experts - layer.ffn.experts_per_token) // layer.ffn.experts
    vision = model.vision.parameters if model.vision else 0
    tied = model.vocab_size * model.hidden_size if model.tie_word_embeddings else 0
    return parameter_count(model) - inactive - vision + tied


def cut(tensor: Tensor, tp: int, ep: int, etp: int) -> int:
    """Elements of a weight that one rank holds."""
    if tensor.split == "tp":
        return tensor.elements // tp
    if tensor.split == "expert":
        return tensor.elements // (ep * etp)
    if tensor.split == "expert_replicated":
        return tensor.elements // ep
    return tensor.elements


@lru_cache(maxsize=65536)
def layer_parameters(model: Model, layer: Layer, tp: int, ep: int, etp: int) -> RankParameters:
    """Elements of one block on one rank."""
    dense = expert = 0
    for tensor in layer_tensors(model, layer):
        elements = cut(tensor, tp, ep, etp)
        if tensor.split.startswith("expert"):
            expert += elements
        else:
            dense += elements
    return RankParameters(dense, expert)


def padded_vocab_size(model: Model, tp: int, multiple: int) -> int:
    """Rows of the embedding, padded to a multiple of `multiple` * tp (Megatron's make_vocab_size_divisible_by)."""
    unit = multiple * tp
    return -(-model.vocab_size // unit) * unit
