"""Model FLOPs: what the mathematics of a step needs, whatever is recomputed.

As Megatron-LM's `training/training.py::num_floating_point_operations` counts: every matrix product, attention with its
causal half, the output layer over the true vocabulary, backward twice forward; nothing elementwise. Of frozen weights
there are no gradients: two passes and not three, as Megatron-Bridge's `training/utils/flop_utils.py` counts LoRA.
"""

from __future__ import annotations

from functools import lru_cache

from topoplan.operators.eager_linears import trained_layers
from topoplan.operators.padding import content_of
from topoplan.operators.params import layer_tensors, mtp_layer
from topoplan.operators.vision import patches_per_image
from topoplan.specs.job import Job
from topoplan.specs.model import LatentAttention, Layer, LinearAttention, Model, Moe, VisionTower


def _matrix_parameters(model: Model, layer: Layer) -> float:
    """Weights that one token is multiplied with; of the routed experts only the chosen ones."""
    total = 0.0
    for tensor in layer_tensors(model, layer):
        if "norm" in tensor.name or "bias" in tensor.name or tensor.name in ("softmax_offset", "dt_bias+A_log"):
            continue
        share = 1.0
        if tensor.split == "expert" and isinstance(layer.ffn, Moe):
            share = layer.ffn.experts_per_token / layer.ffn.experts
        total += tensor.elements * share
    return total


def attended_tokens(seq_len: float, window: int) -> float:
    """Tokens that one token attends to, averaged over the sequence: half of it, or what a sliding window leaves."""
    if 0 < window < seq_len:
        return window * (1.0 - window / (2.0 * seq_len))
    return seq_len / 2


def _score_flops(layer: Layer, seq_len: float) -> float:
    """Forward FLOPs of attention's two products for one token, averaged over the sequence."""
    attention = layer.attention
    if isinstance(attention, LinearAttention):
        # KK^T, VK^T, S(a(I-bKK^T)) and SQ, as `num_floating_point_operations` counts the gated delta rule.
        return 8.0 * attention.value_heads * attention.key_head_dim * attention.value_head_dim
    if isinstance(attention, LatentAttention):
        widths = attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim
        return 2.0 * attended_tokens(seq_len, 0) * attention.heads * widths
    return 2.0 * attended_tokens(seq_len, attention.window) * attention.heads * 2 * attention.head_dim


def _layer_flops(model: Model, layer: Layer, extent: float) -> float:
    """Forward FLOPs of one layer for one token, in a sequence as long as `extent`."""
    return 2.0 * _matrix_parameters(model, layer) + _score_flops(layer, extent)


@lru_cache(maxsize=256)
def flops_per_sequence(model: Model, tokens: float, extent: float | None = None, mtp_layers: int = 0) -> float:
    """Forward and backward FLOPs of the language model for one sequence; its tokens attend within `extent`, or all."""
    per_token = 2.0 * model.vocab_size * model.hidden_size * (1 + mtp_layers)
    for layer in (*model.layers, *(mtp_layers * (mtp_layer(model),) if mtp_layers else ())):
        per_token += _layer_flops(model, layer, extent or tokens)
    return 3.0 * per_token * tokens


@lru_cache(maxsize=256)
def _saved_by_frozen(model: Model, tokens: float, extent: float, trained: frozenset[int]) -> float:
    """FLOPs of one sequence that `flops_per_sequence` counts and nobody computes, where only some layers are trained.

    Frozen weights have no gradients, and layers below all trained ones no backward. With none trained, adapters or a
    projector below want the gradients of all layers' inputs.
    """
    per_token = 2.0 * model.vocab_size * model.hidden_size
    lowest = min(trained, default=0)
    for place, layer in enumerate(model.layers):
        if place < lowest:
            per_token += 2.0 * _layer_flops(model, layer, extent)
        elif place not in trained:
            per_token += 2.0 * _matrix_parameters(model, layer)
    return per_token * tokens


def ends_in_layers(model: Model, job: Job) -> tuple[float, float]:
    """Work before the first layer and behind the last, counted in layers of average work.

    Before: the vision tower; the embedding's lookup is no matrix product. Behind: the multi-token-prediction layers and
    the output layer, which each of them uses once more.
    """
    whole = flops_per_sequence(model, job.seq_len, mtp_layers=job.mtp_num_layers)
    layers = sum(_layer_flops(model, layer, job.seq_len) for layer in model.layers) * 3.0 * job.seq_len
    one = layers / model.num_layers
    return _vision_flops(model.vision, job) / one if model.vision else 0.0, (whole - layers) / one


def _vision_flops(tower: VisionTower, job: Job) -> float:
    """FLOPs of the vision tower for the images of one sequence."""
    per_image = patches_per_image(tower, job.image_max_pixels)
    # Every patch attends to its whole image.
    per_patch = 2.0 * tower.encoder_parameters + 4.0 * tower.layers * per_image * tower.hidden_size
    # A frozen tower has no backward, whether its projector is trained or not: nothing before it is.
    passes = 1.0 if job.freeze_vision_tower else 3.0
    return passes * per_patch * per_image * job.images_per_sequence


def model_flops_per_step(model: Model, job: Job) -> float:
    """FLOPs of one optimizer step, vision tower included, padding and gradients of frozen weights not."""
    content = content_of(job)
    total = flops_per_sequence(model, content.tokens, content.extent, job.mtp_num_layers)
    if job.finetuning != "full" or job.freeze_language_model:
        extent = content.extent or content.tokens
        total -= _saved_by_frozen(model, content.tokens, extent, trained_layers(model, job))
    if model.vision:
        total += _vision_flops(model.vision, job)
    return total * job.global_batch_size * job.sequences_per_sample
