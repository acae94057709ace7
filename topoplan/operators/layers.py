"""The operators of a layer, by what the layer consists of.

A new kind of attention, or mixer, is one more entry of `mixer_of`: a function that adds its operators, or two functions
if the Hugging Face model differs from megatron-core's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from topoplan.operators import latent_attention, linear_attention, mlp, moe, softmax_attention, token_prediction
from topoplan.operators.builder import Builder
from topoplan.operators.core_attention import CoreAttention
from topoplan.operators.eager import EagerBuilder, LayerUse
from topoplan.operators.op import BF16, Op, Weight
from topoplan.operators.shard import Shard
from topoplan.operators.te import TeBuilder
from topoplan.specs.model import Attention, LatentAttention, Layer, LinearAttention, Mlp, Model


class Mixer(NamedTuple):
    """The functions that add the operators of one kind of attention, including its norm."""

    te: Callable[[TeBuilder, Any], None]
    """Adds the operators as megatron-core builds them from Transformer Engine."""
    eager: Callable[[EagerBuilder, Any], None]
    """Adds the operators as Hugging Face models run them."""


mixer_of: dict[type, Mixer] = {
    Attention: Mixer(softmax_attention.te, softmax_attention.eager),
    LatentAttention: Mixer(latent_attention.te, latent_attention.eager),
    LinearAttention: Mixer(linear_attention.te, linear_attention.eager),
}
"""The mixer for each type of a layer's attention."""


@lru_cache(maxsize=64)
def mtp_layer(model: Model) -> Layer:
    """Return the multi-token-prediction layer of a model, whose block is like the last layer of the decoder.

    Source: `core/models/gpt/gpt_layer_specs.py::get_gpt_mtp_block_spec_for_backend`.
    """
    return replace(model.layers[-1], predicts_next=True)


@lru_cache(maxsize=1 << 8)
def te_ops(model: Model, layer: Layer, shard: Shard) -> tuple[Op, ...]:
    """Return the operators of a layer on one rank, as megatron-core builds it from Transformer Engine."""
    build = TeBuilder(model, shard)
    if layer.predicts_next:
        token_prediction.te(build)
    mixer_of[type(layer.attention)].te(build, layer.attention)
    if isinstance(layer.ffn, Mlp):
        mlp.te(build, layer.ffn)
    else:
        moe.te(build, layer.ffn)
    _residual(build)
    return tuple(build.ops)


@lru_cache(maxsize=1 << 8)
def eager_ops(model: Model, layer: Layer, use: LayerUse, shard: Shard) -> tuple[Op, ...]:
    """Return the operators of a layer on one GPU, as Hugging Face models run it."""
    build = EagerBuilder(model, use, shard)
    mixer_of[type(layer.attention)].eager(build, layer.attention)
    build.norm("post_attention_layernorm")
    if isinstance(layer.ffn, Mlp):
        mlp.eager(build, layer.ffn)
    else:
        moe.eager(build, layer.ffn, adapts_gates=not isinstance(layer.attention, Attention))
    _residual(build)
    return tuple(build.ops)


def _residual(build: Builder) -> None:
    """Add the two residual additions, each with dropout before it if the model has dropout.

    An addition reads twice and writes once; backward moves as much.
    """
    elements = build.local * build.hidden
    moved = 2 * 3 * BF16 * elements
    build.moved("residual additions", moved, moved, kernels=2)
    if build.model.hidden_dropout:
        # One byte of mask per element after attention and after the MLP (`core/fusions/fused_bias_dropout.py`).
        build.keep("dropout masks", 2 * elements)


WHOLE = Shard(tokens=1, seq_len=1, tp=1, cp=1, ep=1, etp=1, sequence_parallel=False, precision="bf16")
"""One token on a rank with nothing split."""
USE = LayerUse(tokens=1, seq_len=1, trains_weights=True, adapted=frozenset(), fused=False)
"""One token through a layer whose weights are trained."""


@lru_cache(maxsize=4096)
def whole_ops(model: Model, layer: Layer) -> tuple[Op, ...]:
    """Return the operators of a layer with all its weights on one rank, for one token."""
    return te_ops(model, layer, WHOLE)


@lru_cache(maxsize=4096)
def layer_tensors(model: Model, layer: Layer) -> tuple[Weight, ...]:
    """Return all weights of one layer, including its norms."""
    return tuple(weight for op in whole_ops(model, layer) for weight in op.weights)


@lru_cache(maxsize=64)
def divided(model: Model) -> tuple[tuple[str, int], ...]:
    """Return the (name, size) pairs that the operators of all layers divide.

    Every pair appears once; the pairs of one layer are in alphabetical order. Expert tensor parallelism divides `expert
    width`, tensor parallelism all the others.
    """
    found: dict[tuple[str, int], None] = {}
    for layer in {id(layer): layer for layer in model.layers}.values():
        own = [one for op in whole_ops(model, layer) for one in op.divided]
        found |= dict.fromkeys(sorted(own, key=lambda one: one[0].casefold()))
    return tuple(found)


@lru_cache(maxsize=256)
def sizes_divided(model: Model, name: str) -> tuple[int, ...]:
    """Return all sizes that have this name: `heads`, `KV heads`, `MLP width`, `expert width`."""
    return tuple(sorted(size for one, size in divided(model) if one == name))


def attention_heads(model: Model, layer: Layer) -> tuple[int, int] | None:
    """Return the heads and KV heads of a layer's softmax attention, or None if it has another kind of mixer."""
    cores = (op.work for op in whole_ops(model, layer) if isinstance(op.work, CoreAttention))
    core = next(cores, None)
    return (int(core.heads), int(core.kv_heads)) if core else None
