"""Model FLOPs: what the mathematics of a step requires, without recomputation.

Counted like Megatron-LM's `training/training.py::num_floating_point_operations`: every matrix product, the causal half
of attention, the output layer over the unpadded vocabulary, backward twice forward, nothing elementwise. Frozen weights
have no weight gradients: two passes instead of three, as Megatron-Bridge's `training/utils/flop_utils.py` counts LoRA.
"""

from __future__ import annotations

from functools import lru_cache

from topoplan.operators.finetuning import trained_layers
from topoplan.operators.layers import layer_tensors, mtp_layer, whole_ops
from topoplan.operators.padding import content_of
from topoplan.operators.vision import patches_per_image
from topoplan.specs.job import Job
from topoplan.specs.model import Layer, Model, Moe, VisionTower


def _matrix_parameters(model: Model, layer: Layer) -> float:
    """Return the weights that one token is multiplied with; of the routed experts only the chosen ones."""
    ffn = layer.ffn
    routed = ffn.experts_per_token / ffn.experts if isinstance(ffn, Moe) else 1.0
    matrices = (weight for weight in layer_tensors(model, layer) if weight.is_matrix)
    return sum(weight.elements * (routed if weight.split == "expert" else 1.0) for weight in matrices)


def _layer_flops(model: Model, layer: Layer, extent: float) -> float:
    """Return the forward FLOPs of one layer for one token, in a sequence of length `extent`."""
    others = sum(op.work.flops(extent) for op in whole_ops(model, layer) if op.work is not None)
    return 2.0 * _matrix_parameters(model, layer) + others


@lru_cache(maxsize=256)
def flops_per_sequence(model: Model, tokens: float, extent: float | None = None, mtp_layers: int = 0) -> float:
    """Return the forward and backward FLOPs of the language model for one sequence of `tokens` tokens.

    Tokens attend within `extent` tokens, or within the whole sequence if it is None.
    """
    per_token = 2.0 * model.head_size * model.hidden_size * (1 + mtp_layers)
    for layer in (*model.layers, *(mtp_layers * (mtp_layer(model),) if mtp_layers else ())):
        per_token += _layer_flops(model, layer, extent or tokens)
    return 3.0 * per_token * tokens


@lru_cache(maxsize=256)
def _saved_by_frozen(model: Model, tokens: float, extent: float, trained: frozenset[int]) -> float:
    """Return the FLOPs that `flops_per_sequence` counts but a job that trains only some layers skips.

    Frozen weights have no gradients, and layers below all trained ones have no backward. If no layer is trained,
    adapters or a projector below the layers need the input gradients of all of them.
    """
    per_token = 2.0 * model.head_size * model.hidden_size
    lowest = min(trained, default=0)
    for place, layer in enumerate(model.layers):
        if place < lowest:
            per_token += 2.0 * _layer_flops(model, layer, extent)
        elif place not in trained:
            per_token += 2.0 * _matrix_parameters(model, layer)
    return per_token * tokens


def ends_in_layers(model: Model, job: Job) -> tuple[float, float]:
    """Return the work before the first layer and after the last one, in units of an average layer's work.

    Before: the vision tower; the embedding lookup is not a matrix product. After: the multi-token-prediction layers and
    the output layer, which each of them uses once more.
    """
    whole = flops_per_sequence(model, job.seq_len, mtp_layers=job.mtp_num_layers)
    layers = sum(_layer_flops(model, layer, job.seq_len) for layer in model.layers) * 3.0 * job.seq_len
    one = layers / model.num_layers
    return _vision_flops(model.vision, job) / one if model.vision else 0.0, (whole - layers) / one


def _vision_flops(tower: VisionTower, job: Job) -> float:
    """Return the FLOPs of the vision tower for the images of one sequence."""
    per_image = patches_per_image(tower, job.image_max_pixels)
    # Every patch attends to all patches of its image.
    per_patch = 2.0 * tower.encoder_parameters + 4.0 * tower.layers * per_image * tower.hidden_size
    # A frozen tower has no backward, whether or not its projector is trained: nothing before the tower is trained.
    passes = 1.0 if job.freeze_vision_tower else 3.0
    return passes * per_patch * per_image * job.images_per_sequence


def model_flops_per_step(model: Model, job: Job, *, keeps_samples_apart: bool = False) -> float:
    """Return the model FLOPs of one optimizer step, including the vision tower.

    Padding and the gradients of frozen weights are not counted. `keeps_samples_apart`: attention stays within the
    samples of a packed sequence.
    """
    content = content_of(job, keeps_samples_apart=keeps_samples_apart)
    total = flops_per_sequence(model, content.tokens, content.extent, job.mtp_num_layers)
    if job.finetuning != "full" or job.freeze_language_model:
        extent = content.extent or content.tokens
        total -= _saved_by_frozen(model, content.tokens, extent, trained_layers(model, job))
    if model.vision:
        total += _vision_flops(model.vision, job)
    return total * job.global_batch_size * job.sequences_per_sample
