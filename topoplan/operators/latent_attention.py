"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), and its norm."""

from __future__ import annotations

from topoplan.operators.core_attention import CoreAttention
from topoplan.operators.eager import EagerBuilder
from topoplan.operators.op import BF16, FP32, SavedTensor
from topoplan.operators.te import TeBuilder
from topoplan.specs.model import LatentAttention


def _widths(attention: LatentAttention) -> tuple[int, int, int]:
    """Return the widths over all heads of queries (and keys), of the up-projected keys and values, and of values."""
    heads, nope, value = attention.heads, attention.qk_nope_head_dim, attention.v_head_dim
    return heads * (nope + attention.qk_rope_head_dim), heads * (nope + value), heads * value


def _core(attention: LatentAttention, heads: float) -> CoreAttention:
    key_dim = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    return CoreAttention(heads, heads, key_dim, attention.v_head_dim)


def te(build: TeBuilder, attention: LatentAttention) -> None:
    """Add MLASelfAttention of megatron-core."""
    hidden, shard, tokens, local = build.hidden, build.shard, build.tokens, build.local
    q_rank, kv_rank, rope = attention.q_lora_rank, attention.kv_lora_rank, attention.qk_rope_head_dim
    (all_queries, all_key_values, all_values), up = _widths(attention), ("mla_up_proj",)
    core, key, value = _core(attention, attention.heads / shard.tp), all_queries / shard.tp, all_values / shard.tp
    width = "latent attention width"
    query_label: str | None
    build.norm("input_layernorm", freed_by=("layernorm",))
    build.keep("layernorm input", BF16 * local * hidden)
    build.keep("norm statistics", 3 * FP32 * local)
    query_name, query_in, query_label = "linear_q_proj", hidden, None
    if q_rank:
        # Its input is the input of the keys' and values' down projection, which saves it.
        build.linear("linear_q_down_proj", hidden, q_rank, "replicated", label=None)
        build.norm("q_layernorm", q_rank, freed_by=up)
        build.keep("q compressed", BF16 * local * q_rank)
        query_name, query_in, query_label = "linear_q_up_proj", q_rank, "q compressed, normed"
    normed = bool(q_rank)
    query = build.linear(
        query_name, query_in, all_queries, freed_by=up, label=query_label, is_normed=normed, divides=width
    )
    name, label, freed = "linear_kv_down_proj", "down projection input", ("layernorm",)
    build.linear(name, hidden, kv_rank + rope, "replicated", label=label, input_freed_by=freed)
    build.norm("kv_layernorm", kv_rank, freed_by=up)
    build.keep("kv compressed", BF16 * local * (kv_rank + rope))
    name, label = "linear_kv_up_proj", "kv compressed, normed"
    build.linear(name, kv_rank, all_key_values, freed_by=up, label=label, is_normed=True, divides=width)
    moved = 2 * BF16 * tokens * (2 * key + value)
    build.moved("rotate, assemble q k v", moved, 1.5 * moved, kernels=4, freed_by=up)
    for name, size in (("q", key), ("k", key), ("v", value)):
        build.keep(name, BF16 * tokens * size, up)
    build.core_attention(core, saved=build.attention_saved(core), divided=(("heads", attention.heads),))
    own_input = "" if shard.is_low_precision else None
    build.linear("linear_proj", all_values, hidden, "row", label=own_input, divides=width)
    # The down projections are not split over TP ranks: sequence parallelism gathers their outputs (and, if queries have
    # a single projection, the hidden state), each separately.
    build.tensor_parallel("attention collectives", query, inputs=(query_in, kv_rank, rope))


def eager(build: EagerBuilder, attention: LatentAttention) -> None:
    """Add DeepseekV3Attention of transformers; its products have the names of megatron-core's."""
    hidden, tokens, heads = build.hidden, build.tokens, attention.heads
    q_rank, kv_rank = attention.q_lora_rank, attention.kv_lora_rank
    (key, key_value, value), core = _widths(attention), _core(attention, heads)
    build.norm("input_layernorm")
    query_names = ("q_a_proj" if q_rank else "q_proj", "kv_a_proj_with_mqa")
    saved = build.inputs(query_names, hidden)
    if q_rank:
        build.linear("linear_q_down_proj", hidden, {"q_a_proj": q_rank}, saved=saved)
        build.norm("q_layernorm", q_rank, label="q_a_layernorm")
        build.linear("linear_q_up_proj", q_rank, {"q_b_proj": key})
    else:
        build.linear("linear_q_proj", hidden, {"q_proj": key}, saved=saved)
    outputs = {"kv_a_proj_with_mqa": kv_rank + attention.qk_rope_head_dim}
    build.linear("linear_kv_down_proj", hidden, outputs, saved=())
    build.norm("kv_layernorm", kv_rank, label="kv_a_layernorm")
    build.linear("linear_kv_up_proj", kv_rank, {"kv_b_proj": key_value})
    moved = 2 * BF16 * tokens * (2 * key + value)
    build.moved("rotate, assemble q k v", moved, 1.5 * moved, kernels=4)
    build.keep("q, k", 2 * BF16 * tokens * key)
    # v is a view of kv_b_proj's output, which stays alive together with the part that belongs to k.
    build.keep("v, kv_b_proj output", BF16 * tokens * key_value)
    saved = (
        SavedTensor("attention output", BF16 * tokens * value),
        SavedTensor("softmax statistics", FP32 * tokens * heads),
    )
    build.core_attention(core, saved=saved)
    saved = build.inputs(("o_proj",), value, is_kept_anyway=True)
    build.linear("linear_proj", value, {"o_proj": hidden}, saved=saved)
