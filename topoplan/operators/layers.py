"""The operators of a layer, by what it is made of.

A new kind of attention, or of mixer, is one more entry of `mixer_of`: a function that writes down its operators, or two
where Hugging Face's model differs from megatron-core's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from topoplan.operators import latent_attention, linear_attention, mlp, moe, softmax_attention, token_prediction
from topoplan.operators.builder import Builder
from topoplan.operators.eager import EagerBuilder, LayerUse
from topoplan.operators.op import BF16, Op, Weight
from topoplan.operators.shard import Shard
from topoplan.operators.te import TeBuilder
from topoplan.specs.model import Attention, LatentAttention, Layer, LinearAttention, Mlp, Model


@dataclass(frozen=True, slots=True)
class Mixer:
    """What writes down the operators of one kind of attention, its norm included."""

    te: Callable[[TeBuilder, Any], None]
    """As megatron-core builds it of Transformer Engine."""
    eager: Callable[[EagerBuilder, Any], None]
    """As Hugging Face's models run it."""


mixer_of: dict[type, Mixer] = {
    Attention: Mixer(softmax_attention.te, softmax_attention.eager),
    LatentAttention: Mixer(latent_attention.te, latent_attention.eager),
    LinearAttention: Mixer(linear_attention.te, linear_attention.eager),
}
"""By the type of a layer's attention."""


@lru_cache(maxsize=64)
def mtp_layer(model: Model) -> Layer:
    """A multi-token-prediction layer of a model: its block is as the last one of the decoder.

    Source: `core/models/gpt/gpt_layer_specs.py::get_gpt_mtp_block_spec_for_backend`.
    """
    return replace(model.layers[-1], predicts_next=True)


@lru_cache(maxsize=1 << 8)
def te_ops(model: Model, layer: Layer, shard: Shard) -> tuple[Op, ...]:
    """A layer on one rank, as megatron-core builds it of Transformer Engine."""
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
    """A layer on one GPU, as Hugging Face's models run it."""
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
    """Two additions: two reads and a write each, and as much backward; before each, dropout where the model has it."""
    elements = build.local * build.hidden
    moved = 2 * 3 * BF16 * elements
    build.moved("residual additions", moved, moved, kernels=2)
    if build.model.hidden_dropout:
        # One byte an element behind attention and one behind the MLP (`core/fusions/fused_bias_dropout.py`).
        build.keep("dropout masks", 2 * elements)


WHOLE = Shard(tokens=1, seq_len=1, tp=1, cp=1, ep=1, etp=1, sequence_parallel=False, precision="bf16")
"""One token on a rank that nothing is split over."""
USE = LayerUse(tokens=1, seq_len=1, trains_weights=True, adapted=frozenset(), fused=False)
"""One token through a layer that is trained."""


@lru_cache(maxsize=4096)
def whole_ops(model: Model, layer: Layer) -> tuple[Op, ...]:
    """A layer with all its weights on one rank, for one token."""
    return te_ops(model, layer, WHOLE)


@lru_cache(maxsize=4096)
def layer_tensors(model: Model, layer: Layer) -> tuple[Weight, ...]:
    """All weights of one layer, its norms included."""
    return tuple(weight for op in whole_ops(model, layer) for weight in op.weights)
