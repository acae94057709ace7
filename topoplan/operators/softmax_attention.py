"""Softmax attention with grouped queries, and its norm."""

from __future__ import annotations

from topoplan.operators.core_attention import CoreAttention
from topoplan.operators.eager import EagerBuilder
from topoplan.operators.op import BF16, FP32, SavedTensor, Weight
from topoplan.operators.te import TeBuilder
from topoplan.specs.model import Attention

ROTARY_BYTES = 19
"""Bytes per element that rotating q or k moves in eager PyTorch: two products, rotating half (negation and
concatenation), an addition."""
ROTARY_KERNELS = 6


def qkv_width(attention: Attention) -> int:
    """Return the output width of the fused projection to queries, gate, keys and values."""
    query_heads = attention.heads * (2 if attention.output_gate else 1)
    return (query_heads + 2 * attention.kv_heads) * attention.head_dim


def te(build: TeBuilder, attention: Attention) -> None:
    """Add SelfAttention of megatron-core, with one fused projection for queries, gate, keys and values."""
    hidden, shard, tokens, local = build.hidden, build.shard, build.tokens, build.local
    width, gates = attention.head_dim, 2 if attention.output_gate else 1
    # With more ranks than KV heads, each rank has one KV head.
    heads, kv_heads = attention.heads / shard.tp, max(attention.kv_heads / shard.tp, 1)
    query, key, all_queries = heads * width, kv_heads * width, attention.heads * width
    build.norm("input_layernorm")
    build.keep("layernorm input", BF16 * local * hidden)
    build.keep("layernorm statistics", FP32 * local)
    qkv = build.linear(
        "linear_qkv",
        hidden,
        qkv_width(attention),
        rank_outputs=gates * query + 2 * key,
        bias=attention.qkv_bias,
        is_normed=True,
        divides="QKV width",
    )
    # Splitting q out of the fused projection, and rotation; with a norm on q and k a third pass.
    moved, passes, weights = 2 * BF16 * tokens * (query + key), 3 if attention.qk_norm else 2, tuple[Weight, ...]()
    if attention.qk_norm:
        weights = (Weight("q_layernorm+k_layernorm", 2 * width),)
    name, kernels = "split, rotate, qk norm", 2 * passes
    build.moved(name, passes * moved, (passes + 0.5) * moved, kernels=kernels, weights=weights)
    if attention.qk_norm:
        build.keep("q, k before their norm", BF16 * tokens * (query + key))
        build.keep("q, k norm statistics", FP32 * tokens * (heads + kv_heads))
    if attention.output_gate:
        build.keep("output gate", 2 * BF16 * tokens * query)
    build.keep("q", BF16 * tokens * query)
    build.keep("k, v", 2 * BF16 * tokens * key)
    # A checkpoint of core attention saves v as it comes, a view of the fused product that also holds q and k;
    # attention's own copy is dropped (`core/transformer/attention.py::_checkpointed_attention_forward`).
    build.keep("q, k beside v", BF16 * tokens * (query + key), saved_only_by=("core_attn",))
    core = CoreAttention(heads, kv_heads, width, width, attention.window)
    build.core_attention(
        core,
        weights=(Weight("softmax_offset", attention.heads, "tp"),) if attention.sinks else (),
        saved=build.attention_saved(core),
        divided=(("heads", attention.heads), ("KV heads", attention.kv_heads)),
    )
    label, sides = "" if shard.is_low_precision else None, (all_queries, hidden)
    proj = build.linear("linear_proj", *sides, "row", bias=attention.out_bias, label=label, divides="attention width")
    build.tensor_parallel("attention collectives", qkv, row=proj)


def eager(build: EagerBuilder, attention: Attention) -> None:
    """Add the attention of `models/llama/modeling_llama.py`, with separate projections for queries, keys and values."""
    hidden, tokens, use, width = build.hidden, build.tokens, build.use, attention.head_dim
    heads, kv_heads = attention.heads, attention.kv_heads
    query, key = heads * width, kv_heads * width
    build.norm("input_layernorm")
    outputs = {"q_proj": query * (2 if attention.output_gate else 1), "k_proj": key, "v_proj": key}
    saved: tuple[SavedTensor, ...] = build.inputs(tuple(outputs), hidden)
    for name, wide in outputs.items():
        build.linear(name, hidden, wide, saved=saved)
        saved = ()
    if attention.qk_norm:
        build.norm("q_norm, k_norm", width, rows=tokens * (heads + kv_heads))
    rotated = tokens * (query + key)
    is_fused = use.fused or build.is_layernorm
    moved, kernels = (4 * rotated, 1) if is_fused else (ROTARY_BYTES * rotated, 2 * ROTARY_KERNELS)
    build.moved("rotary embedding", moved, moved, kernels=kernels)
    if attention.output_gate:
        build.keep("output gate", 2 * BF16 * tokens * query)
    build.keep("q", BF16 * tokens * query)
    build.keep("k, v", 2 * BF16 * tokens * key)
    build.ulysses(2 * query + 2 * key)
    saved = (
        SavedTensor("attention output", BF16 * tokens * query),
        SavedTensor("softmax statistics", FP32 * tokens * heads),
    )
    if not build.shard.flash_attention:
        saved += (SavedTensor("attention probabilities", BF16 * tokens * build.shard.seq_len * heads),)
    core = CoreAttention(heads, kv_heads, width, width, attention.window, launched=1)
    build.core_attention(core, saved=saved)
    build.linear("o_proj", query, hidden, saved=build.inputs(("o_proj",), query, is_kept_anyway=True))
