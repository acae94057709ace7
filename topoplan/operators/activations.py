"""What a layer keeps for its backward pass, for one micro-batch on one rank."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from topoplan.layout.layout import Recompute
from topoplan.operators.eager import LayerUse
from topoplan.operators.layers import WHOLE, eager_ops, te_ops
from topoplan.operators.machine import Product
from topoplan.operators.op import BF16, Op, SavedTensor
from topoplan.operators.shard import Shard
from topoplan.specs.model import Layer, Model

ATTENTION_OUTPUTS = ("attention output", "softmax statistics")
"""Saved tensors that attention itself produces."""


class LayerActivations(NamedTuple):
    """Activation memory of one layer and one micro-batch, in bytes."""

    saved: tuple[SavedTensor, ...]
    saved_bytes: float
    """Sum of `saved`, without tensors that only a recompute module saves."""
    input_bytes: float
    """The layer's input, which is all that full recomputation keeps; a multi-token-prediction layer has two."""
    backward_bytes: float
    """Gradients alive at the worst moment of the layer's own backward, net of what has been freed by then."""
    weight_shapes: tuple[tuple[int, int], ...]
    """Shapes of this rank's trained weight matrices. When weight gradients are accumulated in place, Transformer Engine
    keeps one dummy gradient per distinct shape (`pytorch/module/base.py::get_dummy_wgrad`)."""


def _activations(ops: tuple[Op, ...], input_bytes: float) -> LayerActivations:
    saved = tuple(tensor for op in ops for tensor in op.saved)
    products = (op.work for op in ops if isinstance(op.work, Product))
    return LayerActivations(
        saved=saved,
        saved_bytes=sum(tensor.saved_bytes for tensor in saved if not tensor.saved_only_by),
        input_bytes=input_bytes,
        backward_bytes=sum(op.gradients_bytes for op in ops),
        weight_shapes=tuple((int(one.outputs), int(one.inputs)) for one in products if one.is_trained),
    )


@lru_cache(maxsize=1 << 16)
def layer_activations(model: Model, layer: Layer, shard: Shard) -> LayerActivations:
    """Return everything that a megatron-core layer keeps."""
    inputs = 2 if layer.predicts_next else 1
    return _activations(te_ops(model, layer, shard), inputs * BF16 * shard.local_tokens * model.hidden_size)


@lru_cache(maxsize=1 << 12)
def eager_activations(model: Model, layer: Layer, use: LayerUse) -> LayerActivations:
    """Return everything that a layer of a Hugging Face model keeps."""
    shard = WHOLE._replace(tokens=use.tokens, seq_len=use.seq_len, flash_attention=use.flash_attention)
    input_bytes = float(use.residual_bytes * use.tokens * model.hidden_size)
    return _activations(eager_ops(model, layer, use, shard), input_bytes)


class KeptActivations(NamedTuple):
    """Activation memory of one layer under a recompute mode, in bytes per micro-batch."""

    kept_bytes: float
    """Kept from forward to backward, by a layer to which the recompute mode applies."""
    plain_bytes: float
    """Kept from forward to backward by a layer that full recomputation skips (method block)."""
    recomputed_bytes: float
    """Recomputed for the layer's own backward."""
    backward_bytes: float
    """Gradients at the worst moment of the layer's backward, net of what has been freed by then."""

    @property
    def peak_bytes(self) -> float:
        """What the layer's own backward adds to `kept_bytes`."""
        return self.recomputed_bytes + self.backward_bytes


@lru_cache(maxsize=1 << 16)
def kept_activations(model: Model, layer: Layer, shard: Shard, recompute: Recompute) -> KeptActivations:
    """Return what a layer keeps and what its backward adds, with selective or full recomputation."""
    activations = layer_activations(model, layer, shard)
    everything, backward = activations.saved_bytes, activations.backward_bytes
    if recompute.granularity == "full":
        if layer.predicts_next and recompute.method == "block":
            # `MultiTokenPredictionLayer._checkpointed_forward` warns and recomputes nothing.
            return KeptActivations(everything, everything, 0.0, backward)
        # During its backward a recomputed layer holds all its activations again, beside the input that was kept.
        inputs = activations.input_bytes
        return KeptActivations(inputs, everything, everything - inputs, backward)
    modules = set(recompute.modules)
    dropped = sum(t.saved_bytes for t in activations.saved if modules & set(t.freed_by))
    kept = everything - dropped + sum(t.saved_bytes for t in activations.saved if modules & set(t.saved_only_by))
    return KeptActivations(kept, kept, dropped, backward)
