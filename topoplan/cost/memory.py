"""Memory of every pipeline stage: weights, gradients, optimizer, activations in flight, the ends, transients.

Weights, gradients and optimizer: megatron-core 0.16 `core/distributed/param_and_grad_buffer.py` and
`core/optimizer/distrib_optimizer.py` (2 bytes of weight and 4 or 2 of gradient on every rank, 12 of fp32 weight and two
moments sharded over the data-parallel group; ZeRO stage 1, arXiv 1910.02054, section 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from topoplan.backends.megatron import Traits
from topoplan.cost.activations import BF16, FP32, kept_activations, layer_activations, vision_activation_bytes
from topoplan.cost.params import RankParameters, embedding_tensors, head_tensors, layer_parameters, padded_vocab_size
from topoplan.cost.pipeline import in_flight
from topoplan.cost.profile import Profile
from topoplan.cost.shard import Shard, shard_of
from topoplan.cost.vision import patches_per_microbatch
from topoplan.layout.layout import Layout, Recompute
from topoplan.layout.stages import Chunk, split_stages
from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.model import Layer, Model, Moe

ADAM_BYTES = 12
"""fp32 weight, first and second moment."""
PRECISION_AWARE_ADAM_BYTES = 10
"""The same with the fp32 weight kept as a 16-bit remainder of the bf16 one (TE FusedAdam, store_param_remainders)."""
GROUPED_GEMM_STREAMS = 4
"""cuBLAS streams of Transformer Engine's grouped GEMM, a workspace each (nvte_get_num_compute_streams)."""
DEFAULT_MARGIN = 0.04
"""Share of the card left free when the spec does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Peak of one pipeline stage."""

    stage: int
    allocated_bytes: float
    parts_bytes: Mapping[str, float]
    """By purpose: weights, gradients, optimizer, activations, ... They add up to allocated_bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of the worst GPU."""

    allocated_bytes: float
    """Peak of live tensors (torch.cuda.max_memory_allocated)."""
    reserved_bytes: float
    """What torch's allocator holds."""
    device_bytes: float
    """What nvidia-smi shows: adds the CUDA context and NCCL's buffers."""
    capacity_bytes: float
    """The card."""
    margin_bytes: float
    """What must stay free on the card for `fits`."""
    host_bytes: float
    """Pinned host memory per node."""
    by_stage: tuple[StageMemory, ...]

    @property
    def fits(self) -> bool:
        return self.device_bytes + self.margin_bytes <= self.capacity_bytes


@lru_cache(maxsize=1 << 14)
def chunk_layers(model: Model, chunk: Chunk) -> tuple[tuple[Layer, int], ...]:
    """The distinct layers of a chunk with their counts."""
    counts: dict[int, tuple[Layer, int]] = {}
    for index in chunk.layers:
        layer = model.layers[index]
        counts[id(layer)] = (layer, counts.get(id(layer), (layer, 0))[1] + 1)
    return tuple(counts.values())


@lru_cache(maxsize=1 << 14)
def distinct_ranks(model: Model, pp: int, vpp: int, pipeline_layout: str | None) -> tuple[tuple[int, int], ...]:
    """Pipeline ranks that hold different layers: the first of each kind, which has most in flight, and their number."""
    seen: dict[object, list[int]] = {}
    for rank, chunks in enumerate(split_stages(model.num_layers, pp, vpp, pipeline_layout)):
        key = tuple(
            (chunk.embedding, chunk.head, tuple((id(layer), n) for layer, n in chunk_layers(model, chunk)))
            for chunk in chunks
        )
        seen.setdefault(key, [rank, 0])[1] += 1
    return tuple((rank, count) for rank, count in seen.values())


def _vocabulary_elements(model: Model, traits: Traits, tp: int) -> int:
    return padded_vocab_size(model, tp, traits.vocab_multiple) // tp * model.hidden_size


@lru_cache(maxsize=1 << 15)
def chunk_parameters(
    model: Model, chunk: Chunk, traits: Traits, tp: int, ep: int, etp: int, *, whole_model: bool
) -> RankParameters:
    """Elements that one rank holds of a chunk, the vision tower left out.

    `whole_model`: the chunk is the entire model, so that tied embeddings are one tensor and not two copies.
    """
    total = RankParameters()
    for layer, count in chunk_layers(model, chunk):
        one = layer_parameters(model, layer, tp, ep, etp)
        total += RankParameters(one.dense * count, one.expert * count)
    vocabulary = _vocabulary_elements(model, traits, tp)
    if chunk.embedding:
        positions = sum(t.elements for t in embedding_tensors(model)[1:])
        total += RankParameters(vocabulary + positions)
    if chunk.head:
        final_norm = head_tensors(model)[0].elements
        total += RankParameters(final_norm + (0 if model.tie_word_embeddings and whole_model else vocabulary))
    return total


def stage_parameters(model: Model, job: Job, layout: Layout, traits: Traits, rank: int) -> RankParameters:
    """Elements on one rank of a pipeline stage: trainable dense, trainable expert, frozen."""
    chunks = split_stages(model.num_layers, layout.pp, layout.vpp, layout.pipeline_layout)[rank]
    language = RankParameters()
    for chunk in chunks:
        language += chunk_parameters(
            model, chunk, traits, layout.tp, layout.ep, layout.etp, whole_model=layout.pp * layout.vpp == 1
        )
    if job.freeze_language_model:
        language = RankParameters(frozen=language.total)
    if model.vision and rank == 0:
        for elements, frozen in (
            (model.vision.encoder_parameters, job.freeze_vision_tower),
            (model.vision.projector_parameters, job.freeze_multi_modal_projector),
            # The adapter's freezing goes by name prefix and misses vision_model.deepstack_merger_list.
            (model.vision.deepstack_parameters, False),
        ):
            language += RankParameters(frozen=elements) if frozen else RankParameters(dense=elements)
    return language


@lru_cache(maxsize=1 << 15)
def _chunk_kept_bytes(model: Model, chunk: Chunk, shard: Shard, recompute: Recompute) -> float:
    """Activations of one micro batch that a chunk keeps from forward to backward."""
    if recompute.granularity != "full":
        return sum(
            kept_activations(model, layer, shard, recompute).kept_bytes * count
            for layer, count in chunk_layers(model, chunk)
        )
    group = recompute.num_layers or 1
    if recompute.method == "block":
        kept = 0.0
        for position, index in enumerate(chunk.layers):
            one = kept_activations(model, model.layers[index], shard, recompute)
            kept += one.kept_bytes if position < group else one.plain_bytes
        return kept
    inputs = -(-chunk.num_layers // group)
    return inputs * BF16 * shard.local_tokens * model.hidden_size


@lru_cache(maxsize=1 << 15)
def _backward_peak_bytes(model: Model, chunks: tuple[Chunk, ...], shard: Shard, recompute: Recompute) -> float:
    """Most that the backward of one layer (or of one recomputed group) adds to what is kept."""
    group = recompute.num_layers or 1 if recompute.granularity == "full" and recompute.method == "uniform" else 1
    peak = 0.0
    for chunk in chunks:
        for layer, _ in chunk_layers(model, chunk):
            one = kept_activations(model, layer, shard, recompute)
            extra = (min(group, chunk.num_layers) - 1) * one.plain_bytes if group > 1 else 0.0
            peak = max(peak, one.peak_bytes + extra)
    return peak


@lru_cache(maxsize=1 << 15)
def _dummy_gradient_bytes(model: Model, chunks: tuple[Chunk, ...], shard: Shard, vocabulary: int) -> float:
    """Transformer Engine's dummy weight gradients, one bf16 buffer for each distinct weight shape of the stage."""
    shapes = {
        shape
        for chunk in chunks
        for layer, _ in chunk_layers(model, chunk)
        for shape in layer_activations(model, layer, shard).weight_shapes
    }
    elements = sum(rows * columns for rows, columns in shapes)
    return BF16 * (elements + (vocabulary if any(chunk.head for chunk in chunks) else 0))


def stage_memory(
    model: Model, job: Job, layout: Layout, traits: Traits, profile: Profile, rank: int
) -> StageMemory:
    """Peak of one pipeline stage: the worst of three moments.

    Backward of a layer with all micro batches in flight; on the last stage the loss; on the first the gradient of the
    embedding, which is dense, once the layers of that micro batch are freed.
    """
    shard = shard_of(layout, job)
    chunks = split_stages(model.num_layers, layout.pp, layout.vpp, layout.pipeline_layout)[rank]
    parameters = stage_parameters(model, job, layout, traits, rank)
    dense_shards = layout.dp * layout.cp if layout.distributed_optimizer else 1
    expert_shards = layout.expert_dp if layout.distributed_optimizer else 1
    trainable = parameters.dense + parameters.expert
    adam = PRECISION_AWARE_ADAM_BYTES if layout.precision_aware_optimizer else ADAM_BYTES
    optimizer = adam * (parameters.dense / dense_shards + parameters.expert / expert_shards)
    weights = BF16 * parameters.total
    if shard.eight_bit:
        # Quantised rowwise and columnwise copies of the weights are cached over the micro batches of a step.
        weights += 2 * parameters.total
    moe = any(isinstance(layer.ffn, Moe) for chunk in chunks for layer, _ in chunk_layers(model, chunk))
    parts = {
        "weights": float(weights),
        "gradients": float((FP32 if layout.grad_reduce_in_fp32 else BF16) * trainable),
        "optimizer": optimizer * (1.0 - layout.optimizer_offload_fraction),
        "workspace": float(profile.cublas_workspace_bytes * (2 + (GROUPED_GEMM_STREAMS if moe else 0))),
    }

    alive = in_flight(layout.pp, layout.vpp, rank, layout.gradient_accumulation_steps)
    kept = [_chunk_kept_bytes(model, chunk, shard, layout.recompute) for chunk in chunks]
    activations = sum(count * kept_bytes for count, kept_bytes in zip(alive, kept, strict=True))
    vocabulary = _vocabulary_elements(model, traits, layout.tp)
    hidden_bytes = BF16 * model.hidden_size
    dummies = _dummy_gradient_bytes(model, chunks, shard, vocabulary)
    # With sequence parallelism a whole-sequence copy of a GEMM's input, and of its gradient, exists for a moment.
    gathered = 2 * hidden_bytes * shard.tokens if layout.sequence_parallel else 0.0

    vision = 0.0
    if model.vision and rank == 0:
        patches = patches_per_microbatch(model.vision, job, layout)
        full = layout.recompute.granularity == "full"
        if not (job.freeze_vision_tower and job.freeze_multi_modal_projector):
            vision = alive[0] * vision_activation_bytes(model.vision, patches, recompute=full)
        activations += vision

    moments = {"backward": dummies + gathered + _backward_peak_bytes(model, chunks, shard, layout.recompute)}
    if any(chunk.head for chunk in chunks):
        logits = shard.tokens * (vocabulary // model.hidden_size)
        # bf16 logits; unfused, an fp32 copy that becomes the softmax and then the gradient
        # (`core/tensor_parallel/cross_entropy.py`). Final norm in and out, and the output layer's gathered input.
        per_logit = BF16 if layout.cross_entropy_fusion else BF16 + FP32
        ends = hidden_bytes * (2 * shard.local_tokens + 2 * shard.tokens)
        moments["loss"] = (dummies if layout.gradient_accumulation_steps > 1 else 0.0) + per_logit * logits + ends
    if any(chunk.embedding for chunk in chunks) and not job.freeze_language_model:
        moments["embedding gradient"] = dummies + BF16 * vocabulary - kept[0]
    peak = max(moments, key=lambda name: moments[name])
    parts["activations"] = activations - vision
    if vision:
        parts["vision activations"] = vision
    parts[f"peak ({peak})"] = moments[peak]
    return StageMemory(stage=rank, allocated_bytes=sum(parts.values()), parts_bytes=parts)


def communicators(layout: Layout, model: Model) -> int:
    """NCCL communicators that a rank really uses: the world, and every group of more than one rank."""
    sizes = [layout.tp, layout.cp, layout.dp * layout.cp, layout.pp]
    if layout.ep > 1 or layout.etp > 1:
        sizes += [layout.ep, layout.etp if layout.etp != layout.tp else 1, layout.expert_dp]
    if model.tie_word_embeddings:
        sizes.append(layout.pp)
    return 1 + sum(size > 1 for size in sizes)


def margin_fraction(cluster: Cluster) -> float:
    """Share of the card that `fits` leaves free."""
    return DEFAULT_MARGIN if cluster.margin is None else cluster.margin


def predict_memory(
    model: Model, cluster: Cluster, job: Job, layout: Layout, traits: Traits, profile: Profile, *, all_stages: bool
) -> Memory:
    """Memory of the worst GPU of a layout.

    `all_stages` lists every pipeline stage; without it only those that can be the worst.
    """
    ranks = (
        range(layout.pp)
        if all_stages
        else [rank for rank, _ in distinct_ranks(model, layout.pp, layout.vpp, layout.pipeline_layout)]
    )
    stages = tuple(stage_memory(model, job, layout, traits, profile, rank) for rank in ranks)
    allocated = max(stage.allocated_bytes for stage in stages)
    reserved = allocated * (1.0 + profile.fragmentation)
    device = reserved + profile.context_bytes + profile.nccl_bytes_per_communicator * communicators(layout, model)
    host = 0.0
    if layout.optimizer_offload_fraction:
        heaviest = max(
            stage.parts_bytes["optimizer"] / (1.0 - layout.optimizer_offload_fraction or 1.0) for stage in stages
        )
        host = heaviest * layout.optimizer_offload_fraction * cluster.gpus_per_node
    return Memory(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=device,
        capacity_bytes=cluster.gpu.memory_bytes,
        margin_bytes=margin_fraction(cluster) * cluster.gpu.memory_bytes,
        host_bytes=host,
        by_stage=stages,
    )
