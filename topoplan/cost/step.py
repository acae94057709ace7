"""Seconds of one optimizer step: micro batches through the pipeline, then gradients, optimizer and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from topoplan.backends.megatron import Traits
from topoplan.cost.activations import BF16, FP32
from topoplan.cost.collectives import all_gather_s, all_reduce_s, point_to_point_s
from topoplan.cost.compute import PARTS, Collective, elementwise_s, gemm_s, layer_time
from topoplan.cost.memory import chunk_layers, embedding_ranks, rank_kinds, stage_parameters
from topoplan.cost.params import padded_vocab_size
from topoplan.cost.pipeline import schedule_s
from topoplan.cost.profile import Profile
from topoplan.cost.shard import Shard, average_shard, shard_of
from topoplan.cost.vision import patches_per_image, patches_per_microbatch
from topoplan.layout.layout import Layout, Recompute, stages_of
from topoplan.layout.placement import Group, group
from topoplan.layout.rules import facts_of
from topoplan.layout.stages import Chunk
from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.model import Layer, Model, VisionTower

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


@dataclass(frozen=True, slots=True)
class DataParallel:
    """What data-parallel ranks tell each other in a step."""

    reduces: tuple[tuple[str, Collective], ...]
    """Of the gradients: of `dense` weights, and of `expert` ones."""
    gathers: tuple[tuple[str, Collective], ...]
    """Of the weights, with the distributed optimizer."""
    exposed_reduce_s: float
    """What the backward of one micro batch does not hide."""
    exposed_gather_s: float
    """What the forward of one micro batch does not hide."""
    tied: Collective | None
    """Gradients of a tied embedding that first and last stage add up."""

    @property
    def exposed_s(self) -> float:
        """All that adds to the step."""
        return self.exposed_reduce_s + self.exposed_gather_s + (self.tied.call_s if self.tied else 0.0)


def recomputed_share(chunk: Chunk, layer: Layer, recompute: Recompute) -> float:
    """Share of a chunk's layers of one kind that its recompute mode is about.

    Method block: the first ones, and no multi-token-prediction layer. Else all.
    """
    if recompute.granularity != "full" or recompute.method != "block":
        return 1.0
    if layer.predicts_next or not chunk.num_layers:
        return 0.0
    return min(recompute.num_layers or 0, chunk.num_layers) / chunk.num_layers


@lru_cache(maxsize=1 << 15)
def _chunk_time(
    model: Model, chunk: Chunk, shard: Shard, cluster: Cluster, profile: Profile, recompute: Recompute
) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """(forward by part, backward by part, recomputation) of one micro batch through a chunk's layers, in seconds."""
    forward, backward, repeated = [0.0] * len(PARTS), [0.0] * len(PARTS), 0.0
    for layer, count in chunk_layers(model, chunk):
        one = layer_time(model, layer, shard, cluster, profile, recompute)
        for part in range(len(PARTS)):
            forward[part] += count * one.forward_s[part]
            backward[part] += count * one.backward_s[part]
        repeated += count * one.recompute_s * recomputed_share(chunk, layer, recompute)
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


def chunk_ends(
    model: Model,
    job: Job,
    layout: Layout,
    traits: Traits,
    cluster: Cluster,
    profile: Profile,
    shard: Shard,
    chunk: Chunk,
) -> list[tuple[str, float, float]]:
    """(name, forward, backward) in seconds of what stands before and behind a chunk's layers, for one micro batch."""
    ends = []
    vocabulary = padded_vocab_size(model, layout.tp, traits.vocab_multiple)
    # Every multi-token-prediction layer looks up its tokens, and every depth has a loss.
    lookups, losses = chunk.embedding + chunk.mtp_layers, chunk.head * (1 + job.mtp_num_layers)
    if lookups:
        ahead, back = _embedding_s(model, shard, cluster, profile, vocabulary)
        ends.append(("embedding", lookups * ahead, lookups * back))
    if chunk.embedding and model.vision:
        patches = patches_per_microbatch(model.vision, job, layout)
        full = layout.recompute.granularity == "full"
        ends.append(("vision tower", *_vision_s(model.vision, patches, job, cluster, profile, recompute=full)))
    if losses:
        fused = layout.cross_entropy_fusion
        ahead, back = _head_s(model, shard, cluster, profile, vocabulary, fused=fused)
        ends.append(("output layer, loss", losses * ahead, losses * back))
    return ends


def stage_time(
    model: Model, job: Job, layout: Layout, traits: Traits, cluster: Cluster, profile: Profile, shard: Shard, rank: int
) -> StageTime:
    """One micro batch through the layers and the ends of a pipeline rank, chunk by chunk."""
    parts, ends = [0.0] * len(PARTS), 0.0
    forward: list[float] = []
    backward: list[float] = []
    recompute: list[float] = []
    for chunk in stages_of(model, job, layout)[rank]:
        ahead, back, repeated = _chunk_time(model, chunk, shard, cluster, profile, layout.recompute)
        for part in range(len(PARTS)):
            parts[part] += ahead[part] + back[part]
        forward_s, backward_s = sum(ahead), sum(back) + repeated
        for _, ahead_s, back_s in chunk_ends(model, job, layout, traits, cluster, profile, shard, chunk):
            forward_s += ahead_s
            backward_s += back_s
            ends += ahead_s + back_s
        forward.append(forward_s)
        backward.append(backward_s)
        recompute.append(repeated)
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
    shard = average_shard(shard_of(layout, job, flash_attention=profile.flash_attention), layout, job)
    kinds = rank_kinds(model, job, layout)
    times = {
        rank: stage_time(model, job, layout, traits, cluster, profile, shard, rank) for rank in dict.fromkeys(kinds)
    }
    return tuple(times[kind] for kind in kinds)


def pipeline_send(model: Model, job: Job, layout: Layout, cluster: Cluster, profile: Profile) -> Collective:
    """One message between neighbours of the pipeline: the hidden states of a micro batch, or their gradients.

    Where a pipeline leaves a node, all its messages are taken to be as slow as the one that does.
    """
    shard = average_shard(shard_of(layout, job, flash_attention=profile.flash_attention), layout, job)
    ranks, sent = group(layout, "pp"), BF16 * shard.local_tokens * model.hidden_size
    return Collective("send", ranks, sent, point_to_point_s(ranks, sent, cluster, profile))


@lru_cache(maxsize=1 << 12)
def _collectives(
    tensors: tuple[tuple[str, Group, int], ...],
    element_bytes: int,
    is_sharded: bool,
    cluster: Cluster,
    profile: Profile,
) -> tuple[tuple[str, Collective], ...]:
    """One call for each of (name, ranks, elements): an all-reduce, or where each rank keeps a shard half of one."""
    kind, seconds = ("all-gather", all_gather_s) if is_sharded else ("all-reduce", all_reduce_s)
    return tuple(
        (name, Collective(kind, ranks, whole := element_bytes * size, seconds(ranks, whole, cluster, profile)))
        for name, ranks, size in tensors
        if size
    )


def data_parallel(
    model: Model,
    job: Job,
    layout: Layout,
    traits: Traits,
    cluster: Cluster,
    profile: Profile,
    stage: StageTime,
    rank: int,
) -> DataParallel:
    """Gradient reduction and weight gathering of one rank, and what backward and forward of one micro batch leave."""
    parameters = stage_parameters(model, job, layout, traits, rank)
    gradient = FP32 if layout.grad_reduce_in_fp32 else BF16
    tensors = (("dense", group(layout, "dp_cp"), parameters.dense), ("expert", group(layout, "edp"), parameters.expert))
    reduces = _collectives(tensors, gradient, layout.distributed_optimizer, cluster, profile)
    gathers = _collectives(tensors, BF16, True, cluster, profile) if layout.distributed_optimizer else ()
    reduce, gather = sum(one.call_s for _, one in reduces), sum(one.call_s for _, one in gathers)
    # The last bucket has nothing left to hide behind: its share is that of one layer.
    chunks = stages_of(model, job, layout)[rank]
    layers = max(1, sum(chunk.num_layers + chunk.mtp_layers for chunk in chunks))
    hidden_gather = layout.overlap_param_gather and layout.overlap_grad_reduce
    return DataParallel(
        reduces,
        gathers,
        max(reduce - sum(stage.backward_s), reduce / layers) if layout.overlap_grad_reduce else reduce,
        max(gather - sum(stage.forward_s), gather / layers) if hidden_gather else gather,
        _tied_embedding(model, job, layout, traits, cluster, profile),
    )


def _tied_embedding(
    model: Model, job: Job, layout: Layout, traits: Traits, cluster: Cluster, profile: Profile
) -> Collective | None:
    """The stages that hold a copy of the embedding add up the gradients of their copies.

    The whole gradient buffer of the weight, after everything else
    (`core/distributed/finalize_model_grads.py::_allreduce_word_embedding_grads`).
    """
    ranks = embedding_ranks(model, job, layout)
    if len(ranks) == 1 or job.freeze_language_model:
        return None
    elements = padded_vocab_size(model, layout.tp, traits.vocab_multiple) // layout.tp * model.hidden_size
    whole = (FP32 if layout.grad_reduce_in_fp32 else BF16) * elements
    copies = Group(len(ranks), ranks[1] * group(layout, "pp").stride)
    return Collective("all-reduce", copies, whole, all_reduce_s(copies, whole, cluster, profile))


def optimizer_time(
    model: Model, job: Job, layout: Layout, traits: Traits, cluster: Cluster, profile: Profile, rank: int
) -> tuple[tuple[str, float], ...]:
    """(name, seconds) of what one rank does between the last backward and the next step's first forward."""
    parameters = stage_parameters(model, job, layout, traits, rank)
    dense_shards, expert_shards = layout.optimizer_shards
    elements = parameters.dense / dense_shards + parameters.expert / expert_shards
    gradient = FP32 if layout.grad_reduce_in_fp32 else BF16
    on_card = elements * (1.0 - layout.optimizer_offload_fraction)
    moved = ADAM_STEP_BYTES * on_card + gradient * (parameters.dense + parameters.expert)
    # Gradient norm, Adam, and zeroing the gradient buffer.
    adam = ("gradient norm, Adam", elementwise_s(moved, cluster.gpu, profile, kernels=8))
    overhead = ("host work of a step", profile.step_overhead_s)
    if not layout.optimizer_offload_fraction:
        return adam, overhead
    away = elements * layout.optimizer_offload_fraction
    # Gradients go there in fp32; what comes back are the fp32 weights, or the bf16 ones where there are no others.
    back = BF16 if layout.precision_aware_optimizer else FP32
    copied_s = away * (FP32 + back) / (cluster.pcie_bytes_per_s * profile.pcie_efficiency)
    host_s = away * ADAM_STEP_BYTES * cluster.gpus_per_node / HOST_ADAM_BYTES_PER_S
    return adam, ("offload over PCIe", copied_s), ("Adam on the host", host_s), overhead


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
        message_s = pipeline_send(model, job, layout, cluster, profile).call_s
        total = schedule_s(forward, backward, microbatches, message_s)

    parts: dict[str, float] = {name: microbatches * part for name, part in zip(PARTS, worst.parts_s, strict=True)}
    parts["recompute"] = microbatches * sum(worst.recompute_s)
    parts["ends"] = microbatches * worst.ends_s
    parts["pp_bubble"] = without_messages - microbatches * worst.total_s
    if job.stage == "dpo":
        # The reference model sees all micro batches first, forward only (mcore_adapter `trainer/dpo_trainer.py`).
        each = [sum(times) for times in forward]
        parts["reference"] = microbatches * max(each) + (sum(each) - max(each)) / layout.vpp
    parts["pp_comm"] = total - without_messages
    parts["dp_comm"] = data_parallel(model, job, layout, traits, cluster, profile, worst, rank).exposed_s
    parts["optimizer"] = sum(
        seconds for _, seconds in optimizer_time(model, job, layout, traits, cluster, profile, rank)
    )
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
