"""Gated DeltaNet (Qwen3-Next): linear attention by a gated delta rule after a short convolution, and its norm."""

from __future__ import annotations

from topoplan.operators.core_attention import DeltaRule
from topoplan.operators.eager import EagerBuilder
from topoplan.operators.op import BF16, FP32, Weight
from topoplan.operators.te import TeBuilder
from topoplan.specs.model import LinearAttention


def _widths(attention: LinearAttention) -> tuple[int, int]:
    """Return the width of all keys, and the width of all values."""
    return attention.key_heads * attention.key_head_dim, attention.value_heads * attention.value_head_dim


def te(build: TeBuilder, attention: LinearAttention) -> None:
    """Add GatedDeltaNet of megatron-core; mcore_bridge uses the same module (`model/modules/gated_delta_net.py`)."""
    hidden, tp, tokens = build.hidden, build.shard.tp, build.tokens
    (all_keys, all_values), all_heads = _widths(attention), attention.value_heads
    key, value, heads = all_keys / tp, all_values / tp, all_heads / tp
    mixed = 2 * all_keys + 2 * all_values + 2 * all_heads
    build.norm("input_layernorm")
    build.keep("layernorm input", BF16 * build.local * hidden)
    into = build.linear("in_proj", hidden, mixed, is_normed=True, divides="linear attention projection")
    convolved = BF16 * tokens * (2 * key + value)
    weights = (
        Weight("conv1d", (2 * all_keys + all_values) * attention.conv_kernel, "tp", is_matrix=True),
        Weight("dt_bias+A_log", 2 * all_heads, "tp"),
        Weight("out_norm", attention.value_head_dim),
    )
    build.moved("convolution, gates, norms", 8 * convolved, 12 * convolved, kernels=8, weights=weights)
    build.keep("convolution input", convolved)
    build.keep("convolution output (q, k, v)", convolved)
    build.keep("decay and beta", 2 * FP32 * tokens * heads)
    build.keep("normed q, k", BF16 * tokens * 2 * key)
    rule = DeltaRule(heads, attention.key_head_dim, attention.value_head_dim)
    divided = (("heads", attention.key_heads), ("heads", all_heads))
    build.add("gated delta rule", "attention", rule, freed_by=("core_attn",), divided=divided)
    build.keep("chunk products", 2 * BF16 * tokens * value)
    build.keep("output and gate", 2 * BF16 * tokens * value)
    build.linear("out_proj", all_values, hidden, "row", divides="linear attention width")
    build.tensor_parallel("attention collectives", into)


def eager(build: EagerBuilder, attention: LinearAttention) -> None:
    """Add Qwen3NextGatedDeltaNet of transformers."""
    hidden, tokens, heads = build.hidden, build.tokens, attention.value_heads
    key, value = _widths(attention)
    build.norm("input_layernorm")
    build.linear("in_proj", hidden, {"in_proj_qkvz": 2 * key + 2 * value, "in_proj_ba": 2 * heads})
    convolved = BF16 * tokens * (2 * key + value)
    build.moved("convolution, gates, norms", 8 * convolved, 12 * convolved, kernels=8)
    build.keep("convolution's input and output", 2 * convolved)
    build.keep("normed q, k", BF16 * tokens * 2 * key)
    build.keep("decay and beta", 2 * FP32 * tokens * heads)
    rule = DeltaRule(heads, attention.key_head_dim, attention.value_head_dim)
    build.add("gated delta rule", "attention", rule, freed_by=("core_attn",))
    build.keep("chunk products, output and gate", 4 * BF16 * tokens * value)
    build.linear("out_proj", value, hidden)
