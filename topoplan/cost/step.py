"""Seconds of one optimizer step: micro batches through the pipeline, then gradients, optimizer and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from topoplan.backends.megatron import Traits
from topoplan.cost.activations import BF16, FP32
from topoplan.cost.collectives import all_gather_s, all_reduce_s, point_to_point_s
from topoplan.cost.compute import PARTS, elementwise_s, gemm_s, layer_time
from topoplan.cost.memory import chunk_layers, rank_kinds, stage_parameters
from topoplan.cost.params import padded_vocab_size
from topoplan.cost.pipeline import schedule_s
from topoplan.cost.profile import Profile
from topoplan.cost.shard import Shard, shard_of
from topoplan.cost.vision import patches_per_image, patches_per_microbatch
from topoplan.layout.layout import Layout, Recompute
from topoplan.layout.placement import Group, group
from topoplan.layout.rules import facts_of
from topoplan.layout.stages import Chunk, split_stages
from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.model import Model, VisionTower

ADAM_STEP_BYTES = 34
"""Moved per optimizer element: gradient, fp32 weight and two moments read, three written, the bf16 weight written
(30 bytes, TE FusedAdam), and the gradient once more for its norm."""
HOST_ADAM_BYTES_PER_S = 100e9
"""Host memory traffic that a CPU Adam sustains per node, two sockets of DDR5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """One optimizer step."""

    step_s: float
    band_s: tuple[float, float]
    """Interval that the step time is expected in."""
    parts_s: Mapping[str, float]
    """What the step is spent on; adds up to step_s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """One pipeline rank and one micro batch; all in seconds."""

    forward_s: tuple[float, ...]
    """By model chunk, with what stands before and behind its layers: embedding, vision tower, output layer, loss."""
    backward_s: tuple[float, ...]
    """By model chunk, with what it repeats of the forward."""
    recompute_s: tuple[float, ...]
    """By model chunk: what backward repeats."""
    parts_s: tuple[float, ...]
    """Layers, forward and backward together without recomputation, by part in the order of PARTS."""
    ends_s: float
    """Embedding, output layer, loss and vision tower, forward and backward."""

    @property
    def total_s(self) -> float:
        """Forward, backward and what backward repeats."""
        return sum(self.forward_s) + sum(self.backward_s)


@lru_cache(maxsize=1 << 15)
def _chunk_time(
    model: Model, chunk: Chunk, shard: Shard, cluster: Cluster, profile: Profile, recompute: Recompute
) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """(forward by part, backward by part, recomputation) of one micro batch through a chunk's layers, in seconds."""
    forward, backward, repeated = [0.0] * len(PARTS), [0.0] * len(PARTS), 0.0
    recomputed_layers = chunk.num_layers
    if recompute.granularity == "full" and recompute.method == "block":
        recomputed_layers = min(recompute.num_layers or 0, chunk.num_layers)
    for layer, count in chunk_layers(model, chunk):
        one = layer_time(model, layer, shard, cluster, profile, recompute)
        for part in range(len(PARTS)):
            forward[part] += count * one.forward_s[part]
            backward[part] += count * one.backward_s[part]
        repeated += count * one.recompute_s * recomputed_layers / chunk.num_layers
    return tuple(forward), tuple(backward), repeated


def _unquantised(precision: str) -> str:
    """Precision of what stays out of fp8: the output layer and the vision tower."""
    return "fp16" if precision == "fp16" else "bf16"


@lru_cache(maxsize=1 << 12)
def _head_s(
    model: Model, shard: Shard, cluster: Cluster, profile: Profile, vocabulary: int, *, fused: bool
) -> tuple[float, float]:
    """(forward, backward) seconds of final norm, output layer and loss for one micro batch."""
    gpu, hidden = cluster.gpu, model.hidden_size
    rows, columns = shard.tokens, vocabulary / shard.tp
    precision = _unquantised(shard.precision)
    forward = gemm_s(rows, columns, hidden, gpu, profile, precision)
    wgrad = gemm_s(columns, hidden, rows, gpu, profile, precision)
    gradients = gemm_s(rows, hidden, columns, gpu, profile, precision) + wgrad
    backward = gradients
    # Bytes a logit (`core/tensor_parallel/cross_entropy.py`): copy to fp32, maximum, subtraction, exponential, sum and
    # division, each a pass; backward scales and casts. The fused kernel reads twice and writes the gradient.
    forward += elementwise_s((6 if fused else 6 + 4 + 8 + 8 + 4 + 8) * rows * columns, gpu, profile, kernels=8)
    backward += elementwise_s((4 if fused else 8 + 6) * rows * columns, gpu, profile, kernels=3)
    if shard.tp > 1:
        # As around any column-parallel layer (`compute.py::_Builder.tensor_parallel`).
        tensor_group, whole = Group(shard.tp, 1), BF16 * shard.tokens * hidden
        if shard.sequence_parallel:
            gather = all_gather_s(tensor_group, whole, cluster, profile)
            forward += gather
            backward += 2 * gather - min(2 * gather, gradients) * profile.tp_overlap
        else:
            reduce = all_reduce_s(tensor_group, whole, cluster, profile)
            backward += reduce - min(reduce, wgrad) * profile.tp_overlap
    return forward, backward


def _embedding_s(
    model: Model, shard: Shard, cluster: Cluster, profile: Profile, vocabulary: int
) -> tuple[float, float]:
    """(forward, backward) seconds of the embedding: a lookup, and a dense gradient added to the fp32 buffer.

    Each rank looks up its part of the vocabulary; the parts are reduced (`VocabParallelEmbedding`), scattered over the
    sequence with sequence parallelism, whose gradient is then gathered.
    """
    rows = BF16 * shard.tokens * model.hidden_size
    forward = elementwise_s(3 * rows, cluster.gpu, profile, kernels=3)
    table = vocabulary / shard.tp * model.hidden_size
    backward = elementwise_s(rows + (BF16 + BF16 + 2 * FP32) * table, cluster.gpu, profile, kernels=3)
    if shard.sequence_parallel:
        gather = all_gather_s(Group(shard.tp, 1), rows, cluster, profile)
        return forward + gather, backward + gather
    return forward + all_reduce_s(Group(shard.tp, 1), rows, cluster, profile), backward


def _vision_s(
    tower: VisionTower, patches: int, job: Job, cluster: Cluster, profile: Profile, *, recompute: bool
) -> tuple[float, float]:
    """(forward, backward) seconds of the vision tower on one rank; it is not split by TP."""
    gpu, hidden, precision = cluster.gpu, tower.hidden_size, _unquantised(job.precision)
    first = tower.intermediate_size * (2 if tower.gated else 1)
    block = (
        gemm_s(patches, 3 * hidden, hidden, gpu, profile, precision)
        + gemm_s(patches, hidden, hidden, gpu, profile, precision)
        + gemm_s(patches, first, hidden, gpu, profile, precision)
        + gemm_s(patches, hidden, tower.intermediate_size, gpu, profile, precision)
    )
    # Every image attends to itself alone.
    per_image = min(patches, patches_per_image(tower, job.image_max_pixels))
    scores = 4.0 * patches * per_image * hidden / (gpu.fp16_flops * profile.attention_forward_efficiency)
    moved = BF16 * patches * (16 * hidden + 4 * first)
    forward = tower.layers * (block + scores + elementwise_s(moved, gpu, profile, kernels=14))
    # Nothing in front of a frozen tower is trained, so it has no backward, whatever becomes of its projector.
    backward = 0.0 if job.freeze_vision_tower else forward * (2.0 + recompute)
    return forward, backward


def stage_time(
    model: Model, job: Job, layout: Layout, traits: Traits, cluster: Cluster, profile: Profile, rank: int
) -> StageTime:
    """Seconds of one micro batch on a pipeline rank, chunk by chunk."""
    shard = shard_of(layout, job, flash_attention=profile.flash_attention)
    parts, ends = [0.0] * len(PARTS), 0.0
    forward: list[float] = []
    backward: list[float] = []
    recompute: list[float] = []
    vocabulary = padded_vocab_size(model, layout.tp, traits.vocab_multiple)
    for chunk in split_stages(model.num_layers, layout.pp, layout.vpp, layout.pipeline_layout)[rank]:
        ahead, back, repeated = _chunk_time(model, chunk, shard, cluster, profile, layout.recompute)
        for part in range(len(PARTS)):
            parts[part] += ahead[part] + back[part]
        extra = []
        if chunk.embedding:
            extra.append(_embedding_s(model, shard, cluster, profile, vocabulary))
            if model.vision:
                patches = patches_per_microbatch(model.vision, job, layout)
                full = layout.recompute.granularity == "full"
                extra.append(_vision_s(model.vision, patches, job, cluster, profile, recompute=full))
        if chunk.head:
            fused = layout.cross_entropy_fusion
            extra.append(_head_s(model, shard, cluster, profile, vocabulary, fused=fused))
        forward.append(sum(ahead) + sum(ahead_s for ahead_s, _ in extra))
        backward.append(sum(back) + repeated + sum(back_s for _, back_s in extra))
        recompute.append(repeated)
        ends += sum(ahead_s + back_s for ahead_s, back_s in extra)
    return StageTime(
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        recompute_s=tuple(recompute),
        parts_s=tuple(parts),
        ends_s=ends,
    )


def pipeline_times(
    model: Model, job: Job, layout: Layout, traits: Traits, cluster: Cluster, profile: Profile
) -> tuple[StageTime, ...]:
    """Seconds of one micro batch on every pipeline rank; ranks that hold the same share one object."""
    kinds = rank_kinds(model, layout.pp, layout.vpp, layout.pipeline_layout)
    times = {rank: stage_time(model, job, layout, traits, cluster, profile, rank) for rank in dict.fromkeys(kinds)}
    return tuple(times[kind] for kind in kinds)


def message_s(model: Model, job: Job, layout: Layout, cluster: Cluster, profile: Profile) -> float:
    """Seconds of one message between neighbours of the pipeline: the hidden states of a micro batch, or their gradient.

    Where a pipeline leaves a node, all its messages are taken to be as slow as the one that does.
    """
    shard = shard_of(layout, job, flash_attention=profile.flash_attention)
    sent = BF16 * shard.local_tokens * model.hidden_size
    return point_to_point_s(group(layout, "pp"), sent, cluster, profile)


def data_parallel_s(
    model: Model,
    job: Job,
    layout: Layout,
    traits: Traits,
    cluster: Cluster,
    profile: Profile,
    stage: StageTime,
    rank: int,
) -> tuple[float, float]:
    """Seconds of (gradient reduction, weight gathering) that backward and forward of one micro batch do not hide."""
    parameters = stage_parameters(model, job, layout, traits, rank)
    gradient = FP32 if layout.grad_reduce_in_fp32 else BF16
    dense, expert = group(layout, "dp_cp"), group(layout, "edp")
    if not layout.distributed_optimizer:
        reduce = all_reduce_s(dense, gradient * parameters.dense, cluster, profile)
        reduce += all_reduce_s(expert, gradient * parameters.expert, cluster, profile)
        gather = 0.0
    else:
        reduce = all_gather_s(dense, gradient * parameters.dense, cluster, profile)
        reduce += all_gather_s(expert, gradient * parameters.expert, cluster, profile)
        gather = all_gather_s(dense, BF16 * parameters.dense, cluster, profile)
        gather += all_gather_s(expert, BF16 * parameters.expert, cluster, profile)
    # The last bucket has nothing left to hide behind: its share is that of one layer.
    chunks = split_stages(model.num_layers, layout.pp, layout.vpp, layout.pipeline_layout)[rank]
    layers = max(1, sum(chunk.num_layers for chunk in chunks))
    if layout.overlap_grad_reduce:
        reduce = max(reduce - sum(stage.backward_s), reduce / layers)
        if layout.overlap_param_gather:
            gather = max(gather - sum(stage.forward_s), gather / layers)
    return reduce + _tied_embedding_s(model, job, layout, traits, cluster, profile), gather


def _tied_embedding_s(
    model: Model, job: Job, layout: Layout, traits: Traits, cluster: Cluster, profile: Profile
) -> float:
    """Seconds in which the first and the last stage add up the gradients of their two copies of a tied embedding.

    The whole gradient buffer of the weight, after everything else
    (`core/distributed/finalize_model_grads.py::_allreduce_word_embedding_grads`).
    """
    if not model.tie_word_embeddings or layout.pp == 1 or job.freeze_language_model:
        return 0.0
    elements = padded_vocab_size(model, layout.tp, traits.vocab_multiple) // layout.tp * model.hidden_size
    gradient = FP32 if layout.grad_reduce_in_fp32 else BF16
    ends = Group(2, (layout.pp - 1) * group(layout, "pp").stride)
    return all_reduce_s(ends, gradient * elements, cluster, profile)


def _optimizer_s(
    model: Model, job: Job, layout: Layout, traits: Traits, cluster: Cluster, profile: Profile, rank: int
) -> float:
    """Seconds of gradient norm, Adam and zeroing the gradient buffer on one rank."""
    parameters = stage_parameters(model, job, layout, traits, rank)
    dense_shards, expert_shards = layout.optimizer_shards
    elements = parameters.dense / dense_shards + parameters.expert / expert_shards
    gradient = FP32 if layout.grad_reduce_in_fp32 else BF16
    on_card = elements * (1.0 - layout.optimizer_offload_fraction)
    moved = ADAM_STEP_BYTES * on_card + gradient * (parameters.dense + parameters.expert)
    seconds = elementwise_s(moved, cluster.gpu, profile, kernels=8)
    if layout.optimizer_offload_fraction:
        away = elements * layout.optimizer_offload_fraction
        seconds += away * (FP32 + BF16) / (cluster.pcie_bytes_per_s * profile.pcie_efficiency)
        seconds += away * ADAM_STEP_BYTES * cluster.gpus_per_node / HOST_ADAM_BYTES_PER_S
    return seconds + profile.step_overhead_s


def busiest_rank(stages: Sequence[StageTime]) -> int:
    """The pipeline rank with most to do in a micro batch, the first of equals."""
    return max(range(len(stages)), key=lambda rank: stages[rank].total_s)


def predict_time(model: Model, cluster: Cluster, job: Job, layout: Layout, traits: Traits, profile: Profile) -> Time:
    """Seconds of one optimizer step of a layout.

    The parts are those of the busiest pipeline rank; what it waits for the others is `pp_bubble`, and what the pipeline
    takes longer because messages take time is `pp_comm`.
    """
    stages = pipeline_times(model, job, layout, traits, cluster, profile)
    rank = busiest_rank(stages)
    worst, microbatches = stages[rank], layout.gradient_accumulation_steps
    forward = [stage.forward_s for stage in stages]
    backward = [stage.backward_s for stage in stages]
    without_messages = total = schedule_s(forward, backward, microbatches)
    if layout.pp > 1:
        total = schedule_s(forward, backward, microbatches, message_s(model, job, layout, cluster, profile))

    parts: dict[str, float] = {name: microbatches * part for name, part in zip(PARTS, worst.parts_s, strict=True)}
    parts["recompute"] = microbatches * sum(worst.recompute_s)
    parts["ends"] = microbatches * worst.ends_s
    parts["pp_bubble"] = without_messages - microbatches * worst.total_s
    if job.stage == "dpo":
        # The reference model sees all micro batches first, forward only (mcore_adapter `trainer/dpo_trainer.py`).
        each = [sum(times) for times in forward]
        parts["reference"] = microbatches * max(each) + (sum(each) - max(each)) / layout.vpp
    parts["pp_comm"] = total - without_messages
    parts["dp_comm"] = sum(data_parallel_s(model, job, layout, traits, cluster, profile, worst, rank))
    parts["optimizer"] = _optimizer_s(model, job, layout, traits, cluster, profile, rank)
    parts = {name: seconds for name, seconds in parts.items() if seconds > 0.0}
    step_s = sum(parts.values())
    band = profile.time_band
    if facts_of(model).is_moe:
        band = max(band, profile.moe_time_band)
    if shard_of(layout, job, flash_attention=profile.flash_attention).eight_bit:
        band = max(band, profile.eight_bit_time_band)
    return Time(
        step_s=step_s,
        band_s=(step_s * (1.0 - band), step_s * (1.0 + band)),
        parts_s=parts,
    )
