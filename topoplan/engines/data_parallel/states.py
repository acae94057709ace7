"""What a data-parallel trainer keeps of a model on each GPU and its host, and what the GPU holds temporarily."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from topoplan.engines.data_parallel.parameter_bytes import (
    ParameterBytes,
    autocasts,
    moment_bytes,
    parameter_bytes,
    shards_of,
)
from topoplan.engines.data_parallel.sharding import sharding_of
from topoplan.layout.layout import Layout
from topoplan.operators.finetuning import Elements, elements_of, layer_linears
from topoplan.operators.op import BF16, FP32
from topoplan.operators.params import embedding_tensors, head_tensors, layer_parameters
from topoplan.specs.case import Case
from topoplan.specs.job import Job
from topoplan.specs.model import Model

LIVE_PARAMETERS = 10**9
"""Default of stage3_max_live_parameters and stage3_max_reuse_distance: the number of parameters that stay gathered at
the turn from forward to backward (`runtime/zero/partitioned_param_coordinator.py::release_sub_module`)."""
SUB_GROUP = 10**9
"""sub_group_size of stage 3 in LLaMA-Factory's and ms-swift's files: elements that the optimizer processes at a
time."""
BUCKET = 5 * 10**8
"""reduce_bucket_size of stages 1 and 2 in these files, in elements; with overlap_comm there are two buckets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedStates:
    """Bytes on one GPU."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    host_bytes: float
    """Pinned host memory of one process."""
    gathered_bytes: float
    """Full-size weights at the turn from forward to backward: gathered, cast or unpacked."""
    cast_bytes: float
    """16-bit copies of fp32 weights at the end of forward; autocast frees them when its context ends, with the model's
    forward (PyTorch `aten/src/ATen/autocast_mode.cpp`, clear_cache)."""
    layer_gradients_bytes: float
    """Full-size gradients on their way to their shards, at the fullest moment of backward."""
    step_bytes: float
    """What the optimizer step needs in addition."""


def root_elements(case: Case) -> int:
    """Return the elements of FSDP's last unit, which stays gathered.

    It has the final norm and the output layer, and the embedding if tied. FSDP 1 has one unit for everything outside
    the layers, so it always includes the embedding (verl `utils/fsdp_utils.py`: get_fsdp_wrap_policy, apply_fsdp2).
    """
    model = case.model
    head = sum(tensor.elements for tensor in head_tensors(model))
    has_embedding = model.tie_word_embeddings or case.traits.fsdp_version == 1
    return head + (sum(t.elements for t in embedding_tensors(model)) if has_embedding else 0)


def largest_layer(model: Model) -> int:
    """Return the elements of the largest layer."""
    return max(layer_parameters(model, layer, 1, 1, 1).total for layer in {id(x): x for x in model.layers}.values())


def largest_linear(model: Model) -> int:
    """Return the elements of the largest linear layer."""
    return max((linear.elements for layer in model.layers for linear in layer_linears(model, layer)), default=0)


def kept_bytes(elements: Elements, each: ParameterBytes) -> float:
    """Return the bytes of all weights as they are stored, before sharding."""
    return each.trained * elements.trained + each.frozen * elements.frozen + each.quantised * elements.quantised


def wire_bytes(elements: Elements, each: ParameterBytes) -> float:
    """Return the bytes of all weights as they are gathered from shards: in 16 bits, packed weights as they are.

    bitsandbytes stores packed weights in 16-bit elements, so that they can be sharded (bnb_4bit_quant_storage).
    """
    return BF16 * (elements.total - elements.quantised) + each.quantised * elements.quantised


def _gathered(case: Case, layout: Layout, elements: Elements, each: ParameterBytes) -> float:
    model, job = case.model, case.job
    unpacked = float(BF16 * largest_linear(model)) if elements.quantised else 0.0
    how = sharding_of(layout)
    if how.unit == "submodule":
        return min(wire_bytes(elements, each), BF16 * LIVE_PARAMETERS) + unpacked
    if how.unit == "block":
        # The current layer, the prefetched one, and the last unit, which is not packed.
        blocks = float(BF16 * largest_layer(model))
        if elements.quantised:
            blocks *= wire_bytes(elements, each) / (BF16 * elements.total)
        return 2 * blocks + BF16 * root_elements(case) + unpacked
    if unpacked:
        return unpacked
    if autocasts(job, layout):
        # Autocast's 16-bit copies, which the products keep for backward; with full recomputation those of one layer at
        # a time.
        layers = largest_layer(model) + root_elements(case)
        return BF16 * (min(elements.trained, layers) if layout.recompute.granularity == "full" else elements.trained)
    return 0.0


def reduced_bytes(job: Job, layout: Layout) -> int:
    """Return the bytes per element of a gradient on its way to its shard."""
    in_fp32 = sharding_of(layout).unit == "block" and layout.grad_reduce_in_fp32 and not job.pure_bf16
    return FP32 if in_fp32 else BF16


def _layer_gradients(case: Case, layout: Layout, elements: Elements, each: ParameterBytes) -> float:
    """Return the bytes of one unit's gradients in 16 bits, and of the flat copies that are reduced.

    There are copies of this unit and of the previous one. FSDP2 frees the previous one before it makes the next
    (`_fsdp_param_group.py`, post_backward).
    """
    model, job = case.model, case.job
    unit = sharding_of(layout).unit
    if unit == "bucket":
        return _bucket_bytes(case, layout, elements)
    if layout.world_size == 1:
        return 0.0
    if unit == "gradients":
        # Buckets separate from the gradients themselves: gradient_as_bucket_view is off in the trainer.
        return float(each.gradient * elements.trained)
    share = elements.trained / elements.total
    size = max(largest_layer(model), root_elements(case)) * share
    if unit == "block":
        return (BF16 + reduced_bytes(job, layout)) * size
    return BF16 * 3 * size


def _bucket_bytes(case: Case, layout: Layout, elements: Elements) -> float:
    """Return the bytes of 16-bit gradients beside the kept ones while ZeRO's stages 1 and 2 run backward.

    DeepSpeed 0.18 `runtime/zero/stage_1_and_2.py`: the first gradient of a micro-batch makes a buffer of
    reduce_bucket_size elements, however few are trained (setup_buckets). Stage 1 fills it after backward. Stage 2 fills
    it gradient by gradient, and copies what it holds if it spans the parts of several ranks (allreduce_bucket). If
    gradients are accumulated, those of each further micro-batch are in a second partition before they are added
    (copy_grads_in_partition, independent_gradient_partition_epilogue).
    """
    if not sharding_of(layout).divides_gradients:
        return float(BF16 * BUCKET)
    share = elements.trained / elements.total
    parameter = max(largest_linear(case.model), root_elements(case)) * share
    again = layout.gradient_accumulation_steps > 1 and not layout.offload_optimizer
    own = elements.trained / shards_of(layout, case.cluster.gpus_per_node).gradients if again else 0.0
    copied = min(BUCKET, elements.trained) if layout.world_size > 1 else 0
    return BF16 * (parameter + BUCKET + copied + own)


def whole_gradients_bytes(layout: Layout, elements: Elements) -> float:
    """Return the bytes of gradients that FSDP2 sums over micro-batches on each GPU before it reduces them.

    They have the dtype of the products and stay on the GPU even with CPU offload. PyTorch
    `distributed/fsdp/_fully_shard/_fsdp_param_group.py::post_backward` without `reduce_grads`.
    """
    sums = not layout.sync_each_batch and layout.gradient_accumulation_steps > 1
    return float(BF16 * elements.trained) if sums else 0.0


@dataclass(frozen=True, slots=True)
class State:
    """One kind of state that is kept of some parameters during the whole step."""

    part: Literal["weights", "gradients", "optimizer"]
    name: str
    elements: int
    """Elements in the whole model."""
    element_bytes: float
    shards: int
    """Ranks that share the state."""
    on_host: bool
    """Whether the state is in pinned host memory instead of on the GPU."""

    @property
    def held_bytes(self) -> float:
        """Bytes on one GPU, or in the host process that drives it."""
        return self.element_bytes * self.elements / self.shards


def states_of(case: Case, layout: Layout) -> tuple[State, ...]:
    """Return what is kept of the parameters, on the GPU and on its host.

    A reference model is a second set of weights, unless only adapters are trained, which can be switched off
    (LLaMA-Factory `train/dpo/workflow.py`, create_ref_model; ms-swift `rlhf_trainers/rlhf_mixin.py`, ref_model). With
    the optimizer offloaded, DeepSpeed keeps fp32 gradients on the host, and stage 3 also gradients in the model's dtype
    (stage3.py, __init__ and initialize_optimizer_states).
    """
    model, job = case.model, case.job
    elements, each = elements_of(model, job), parameter_bytes(job, layout)
    shares, trained = shards_of(layout, case.cluster.gpus_per_node), elements.trained
    how = sharding_of(layout)
    is_stage_3 = how.has_16_bit_model and how.divides_weights
    weights_away = layout.offload or (layout.offload_param and is_stage_3)
    adam_away = layout.offload or layout.offload_optimizer
    own = "adapters" if elements.adapters else "trained"
    found = [
        State("weights", own, trained, each.trained, shares.weights, weights_away),
        State("weights", "frozen", elements.frozen, each.frozen, shares.weights, weights_away),
        State("weights", "packed", elements.quantised, each.quantised, shares.weights, weights_away),
    ]
    if job.keeps_reference:
        found.append(State("weights", "reference model", elements.total, BF16, shares.weights, weights_away))
    if whole_gradients_bytes(layout, elements):
        found.append(State("gradients", "whole gradients, summed over micro batches", trained, BF16, 1, False))
    if not layout.offload_optimizer:
        gradients = State("gradients", "gradients", trained, each.gradient, shares.gradients, layout.offload)
        found.append(replace(gradients, name="gradients for Adam on the host") if layout.offload else gradients)
    else:
        if not how.divides_gradients:
            found.append(State("gradients", "gradients", trained, BF16, 1, False))
        size = FP32 + (BF16 if is_stage_3 else 0)
        found.append(State("gradients", "gradients for Adam on the host", trained, size, shares.optimizer, True))
    moments = moment_bytes(job)
    copy = State("optimizer", "fp32 copy of the weights", trained, FP32, shares.optimizer, adam_away)
    found += [copy] if each.optimizer > moments else []
    found.append(State("optimizer", "Adam's moments", trained, moments, shares.optimizer, adam_away))
    return tuple(one for one in found if one.held_bytes)


def sharded_states(case: Case, layout: Layout) -> ShardedStates:
    """Return the states of a layout whose backend splits data only."""
    job = case.job
    elements, each = elements_of(case.model, job), parameter_bytes(job, layout)
    on_gpu = dict.fromkeys(("weights", "gradients", "optimizer"), 0.0)
    host = 0.0
    for one in states_of(case, layout):
        if one.on_host:
            host += one.held_bytes
        else:
            on_gpu[one.part] += one.held_bytes
    return ShardedStates(
        weights_bytes=on_gpu["weights"],
        gradients_bytes=on_gpu["gradients"],
        optimizer_bytes=on_gpu["optimizer"],
        host_bytes=host,
        gathered_bytes=_gathered(case, layout, elements, each),
        cast_bytes=BF16 * elements.trained if autocasts(job, layout) else 0.0,
        layer_gradients_bytes=_layer_gradients(case, layout, elements, each),
        step_bytes=_step_bytes(case, layout, elements),
    )


def _step_bytes(case: Case, layout: Layout, elements: Elements) -> float:
    """Return what the optimizer's step adds to the kept states on the GPU.

    DeepSpeed's Adam reads fp32 gradients. They are made from a flat 16-bit copy, beside the gradients themselves: of
    the rank's own part, with stage 3 of one sub-group at a time (`stage_1_and_2.py::step`,
    `stage3.py::_prepare_fp32_grad_for_sub_group`). Stage 1 has freed the other ranks' parts by then; before, it has
    reduced all gradients through a bucket and copied its own part out of it (copy_grads_in_partition).
    """
    if layout.offload or layout.offload_optimizer:
        return 0.0
    shares = shards_of(layout, case.cluster.gpus_per_node)
    own, how = elements.trained / shares.optimizer, sharding_of(layout)
    if not how.has_16_bit_model:
        return case.traits.adam_bytes * own
    if how.divides_weights:
        return (BF16 + FP32) * min(own, SUB_GROUP)
    freed = BF16 * (elements.trained / shares.gradients - own)
    reduced = 0.0 if how.divides_gradients else BF16 * (BUCKET + min(BUCKET, elements.trained) + own)
    return max((BF16 + FP32) * own - freed, reduced)
