"""Memory of every pipeline stage: weights, gradients, optimizer, activations in flight, the ends, transients.

Weights, gradients and optimizer: megatron-core 0.16 `core/distributed/param_and_grad_buffer.py` and
`core/optimizer/distrib_optimizer.py` (2 bytes of weight and 4 or 2 of gradient on every rank, 12 of fp32 weight and two
moments sharded over the data-parallel group; ZeRO stage 1, arXiv 1910.02054, section 5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from topoplan.backends.megatron import Traits
from topoplan.cost.activations import (
    BF16,
    FP32,
    QUANTISED_BYTES,
    kept_activations,
    layer_activations,
    vision_activation_bytes,
)
from topoplan.cost.params import (
    RankParameters,
    Tensor,
    embedding_tensors,
    head_tensors,
    layer_parameters,
    padded_vocab_size,
)
from topoplan.cost.pipeline import in_flight, most_in_flight
from topoplan.cost.profile import Profile
from topoplan.cost.shard import Shard, shard_of
from topoplan.cost.vision import patches_per_microbatch
from topoplan.layout.layout import Layout, Recompute
from topoplan.layout.rules import facts_of
from topoplan.layout.stages import Chunk, split_stages
from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.model import Layer, Model, Moe

ADAM_BYTES = 12
"""fp32 weight, first and second moment."""
PRECISION_AWARE_ADAM_BYTES = 10
"""The same with the fp32 weight kept as a 16-bit remainder of the bf16 one (TE FusedAdam, store_param_remainders)."""
HOST_ADAM_BYTES = 16
"""Pinned host memory of an offloaded element: fp32 weight, two moments and gradient
(`core/optimizer/cpu_offloading/hybrid_optimizer.py`, param_update_in_fp32)."""
GROUPED_GEMM_STREAMS = 4
"""cuBLAS streams of Transformer Engine's grouped GEMM, a workspace each (nvte_get_num_compute_streams)."""
FRAGMENTATION = 0.03
"""Reserved over allocated, less one, when every micro batch allocates the same sizes in the same order."""
IRREGULAR_FRAGMENTATION = 0.06
"""The same when several micro batches are in flight, or experts get other numbers of tokens each time.

Both: medians over the ranks of the six B200 runs published with SimuMax 1.2, without expandable segments. How much
expandable segments would take off was not measured; nothing is taken off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Peak of one pipeline stage."""

    stage: int
    allocated_bytes: float
    parts_bytes: Mapping[str, float]
    """By purpose: weights, gradients, optimizer, activations, ... They add up to allocated_bytes."""
    host_bytes: float = 0.0
    """Pinned host memory of one rank."""


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
    host_capacity_bytes: float | None = None
    """Host memory of a node; None when the spec does not say."""
    by_stage: tuple[StageMemory, ...]

    @property
    def excess_bytes(self) -> float:
        """By how much device memory and margin are over the card; negative when they are within."""
        return self.device_bytes + self.margin_bytes - self.capacity_bytes

    @property
    def fits(self) -> bool:
        """Device memory and margin are within the card, and what is offloaded is within the host's memory."""
        fits_host = self.host_capacity_bytes is None or self.host_bytes <= self.host_capacity_bytes
        return self.excess_bytes <= 0.0 and fits_host


@lru_cache(maxsize=1 << 14)
def chunk_layers(model: Model, chunk: Chunk) -> tuple[tuple[Layer, int], ...]:
    """The distinct layers of a chunk with their counts."""
    counts: dict[int, tuple[Layer, int]] = {}
    for index in chunk.layers:
        layer = model.layers[index]
        counts[id(layer)] = (layer, counts.get(id(layer), (layer, 0))[1] + 1)
    return tuple(counts.values())


@lru_cache(maxsize=1 << 14)
def rank_kinds(model: Model, pp: int, vpp: int, pipeline_layout: str | None) -> tuple[int, ...]:
    """For each pipeline rank, the first one that holds the same kinds of layers in the same chunks."""
    first: dict[object, int] = {}
    return tuple(
        first.setdefault(
            tuple(
                (chunk.embedding, chunk.head, tuple((id(layer), n) for layer, n in chunk_layers(model, chunk)))
                for chunk in chunks
            ),
            rank,
        )
        for rank, chunks in enumerate(split_stages(model.num_layers, pp, vpp, pipeline_layout))
    )


@lru_cache(maxsize=1 << 14)
def distinct_ranks(model: Model, pp: int, vpp: int, pipeline_layout: str | None) -> tuple[tuple[int, int], ...]:
    """Pipeline ranks that hold different layers: the first of each kind, which has most in flight, and their number."""
    return tuple(Counter(rank_kinds(model, pp, vpp, pipeline_layout)).items())


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
    ends = end_tensors(model, chunk, traits, tp, whole_model=whole_model)
    return total + RankParameters(sum(elements for _, elements in ends))


def end_tensors(model: Model, chunk: Chunk, traits: Traits, tp: int, *, whole_model: bool) -> list[tuple[Tensor, int]]:
    """Weights before and behind the layers of a chunk, with the elements of them that one rank holds."""
    vocabulary = _vocabulary_elements(model, traits, tp)
    ends: list[tuple[Tensor, int]] = []
    if chunk.embedding:
        words, *positions = embedding_tensors(model)
        ends += [(words, vocabulary), *((tensor, tensor.elements) for tensor in positions)]
    if chunk.head:
        final_norm, *output = head_tensors(model)
        ends.append((final_norm, final_norm.elements))
        if output:
            ends.append((output[0], vocabulary))
        elif not whole_model:
            table = embedding_tensors(model)[0]
            ends.append((Tensor("output_layer (copy of the embedding)", table.elements, table.split), vocabulary))
    return ends


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
def chunk_kept_bytes(model: Model, chunk: Chunk, shard: Shard, recompute: Recompute) -> float:
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
        if recompute.granularity == "full" and recompute.method == "block":
            peak = max(peak, _block_backward_peak_bytes(model, chunk, shard, recompute))
            continue
        for layer, _ in chunk_layers(model, chunk):
            one = kept_activations(model, layer, shard, recompute)
            extra = (min(group, chunk.num_layers) - 1) * one.plain_bytes if group > 1 else 0.0
            peak = max(peak, one.peak_bytes + extra)
    return peak


def _block_backward_peak_bytes(model: Model, chunk: Chunk, shard: Shard, recompute: Recompute) -> float:
    """The same for recompute method block: the last layers keep all, and are freed before the first are recomputed."""
    peak = freed = 0.0
    for position in reversed(range(chunk.num_layers)):
        layer = model.layers[chunk.layers[position]]
        one = kept_activations(model, layer, shard, recompute)
        if position < (recompute.num_layers or 0):
            peak = max(peak, one.peak_bytes - freed)
            freed += one.kept_bytes
        else:
            peak = max(peak, layer_activations(model, layer, shard).backward_bytes - freed)
            freed += one.plain_bytes
    return peak


@lru_cache(maxsize=1 << 15)
def _layer_elements(model: Model, chunks: tuple[Chunk, ...], tp: int, ep: int, etp: int) -> int:
    """Elements of the transformer blocks on one rank, without the ends."""
    return sum(
        layer_parameters(model, layer, tp, ep, etp).total * count
        for chunk in chunks
        for layer, count in chunk_layers(model, chunk)
    )


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


def vision_kept_bytes(model: Model, job: Job, layout: Layout) -> float:
    """What the vision tower keeps of a micro batch: nothing when it is frozen, whatever becomes of its projector."""
    if model.vision is None or job.freeze_vision_tower:
        return 0.0
    patches = patches_per_microbatch(model.vision, job, layout)
    return vision_activation_bytes(model.vision, patches, recompute=layout.recompute.granularity == "full")


def _activations_in_flight(layout: Layout, rank: int, kept: list[float], tower: float) -> tuple[float, float]:
    """(activations of the layers, of the vision tower) at the fullest moment of the schedule.

    `kept` has what a micro batch leaves in each model chunk; the tower's come with the first chunk's.
    """
    pp, vpp, microbatches = layout.pp, layout.vpp, layout.gradient_accumulation_steps
    if not tower and min(kept) == max(kept):
        return most_in_flight(pp, vpp, rank, microbatches) * kept[0], 0.0
    held = fullest_moment(layout, rank, kept, tower)
    return sum(count * size for count, size in zip(held, kept, strict=True)), held[0] * tower


def fullest_moment(layout: Layout, rank: int, kept: Sequence[float], tower: float) -> tuple[int, ...]:
    """Micro batches of each model chunk that a stage holds when its activations are at their most."""
    return max(
        in_flight(layout.pp, layout.vpp, rank, layout.gradient_accumulation_steps),
        key=lambda held: sum(count * size for count, size in zip(held, kept, strict=True)) + held[0] * tower,
    )


def bytes_per_logit(layout: Layout) -> int:
    """Memory of the loss for one logit: the bf16 logit and what its cross entropy makes of it.

    Unfused, an fp32 copy becomes the softmax and then the gradient (`core/tensor_parallel/cross_entropy.py`); compiled,
    two more fp32 copies live for a moment (`core/fusions/fused_cross_entropy.py`). Measured with megatron-core 0.16.1
    and torch's profiler: 6.03 and 10.03 bytes. Transformer Engine 2 writes the gradient over the logits.
    """
    if not layout.cross_entropy_fusion:
        return BF16 + FP32
    return BF16 + 2 * FP32 if layout.cross_entropy_fusion_impl == "native" else BF16


def stage_memory(model: Model, job: Job, layout: Layout, traits: Traits, profile: Profile, rank: int) -> StageMemory:
    """Peak of one pipeline stage: the worst of three moments.

    Backward of a layer with all micro batches in flight; on the last stage the loss; on the first the gradient of the
    embedding, which is dense, once the layers of that micro batch are freed.
    """
    shard = shard_of(layout, job, flash_attention=profile.flash_attention)
    chunks = split_stages(model.num_layers, layout.pp, layout.vpp, layout.pipeline_layout)[rank]
    parameters = stage_parameters(model, job, layout, traits, rank)
    dense_shards, expert_shards = layout.optimizer_shards
    trainable = parameters.dense + parameters.expert
    shard_elements = parameters.dense / dense_shards + parameters.expert / expert_shards
    offloaded = layout.optimizer_offload_fraction
    # Remainders need the bf16 weight to be the one that is trained, and an optimizer that is TE's throughout.
    remainders = layout.precision_aware_optimizer and job.precision == "bf16" and not offloaded
    adam = PRECISION_AWARE_ADAM_BYTES if remainders else ADAM_BYTES
    weights = float(BF16 * parameters.total)
    if shard.eight_bit:
        # Rowwise and columnwise quantised copies of the blocks' weights are cached over the micro batches of a step.
        elements = _layer_elements(model, chunks, layout.tp, layout.ep, layout.etp)
        weights += (2 * QUANTISED_BYTES[shard.precision] - (BF16 if layout.fp8_param else 0)) * elements
    moe = any(isinstance(layer.ffn, Moe) for chunk in chunks for layer, _ in chunk_layers(model, chunk))
    parts = {
        "weights": weights,
        "gradients": float((FP32 if layout.grad_reduce_in_fp32 else BF16) * trainable),
        "optimizer": adam * shard_elements * (1.0 - offloaded),
        "workspace": float(profile.cublas_workspace_bytes * (2 + (GROUPED_GEMM_STREAMS if moe else 0))),
    }

    if job.stage == "dpo":
        # A second model in bf16, forward only (mcore_adapter `trainer/dpo_trainer.py`, ref_model).
        parts["reference model"] = float(BF16 * parameters.total)
    kept = [chunk_kept_bytes(model, chunk, shard, layout.recompute) for chunk in chunks]
    tower = vision_kept_bytes(model, job, layout) if rank == 0 else 0.0
    activations, vision = _activations_in_flight(layout, rank, kept, tower)
    vocabulary = _vocabulary_elements(model, traits, layout.tp)
    hidden_bytes = BF16 * model.hidden_size
    dummies = _dummy_gradient_bytes(model, chunks, shard, vocabulary)
    # With sequence parallelism a whole-sequence copy of a GEMM's input, and of its gradient, exists for a moment.
    gathered = 2 * hidden_bytes * shard.tokens if layout.sequence_parallel else 0.0

    moments = {"backward": dummies + gathered + _backward_peak_bytes(model, chunks, shard, layout.recompute)}
    if any(chunk.head for chunk in chunks):
        logits = shard.tokens * (vocabulary // model.hidden_size)
        # Beside the loss: final norm in and out, and the output layer's gathered input.
        ends = hidden_bytes * (2 * shard.local_tokens + 2 * shard.tokens)
        later = dummies if layout.gradient_accumulation_steps > 1 else 0.0
        moments["loss"] = later + bytes_per_logit(layout) * logits + ends
    if any(chunk.embedding for chunk in chunks) and not job.freeze_language_model:
        moments["embedding gradient"] = dummies + BF16 * vocabulary - kept[0]
    if not (layout.grad_reduce_in_fp32 or layout.precision_aware_optimizer or offloaded):
        # The fp32 optimizer casts its shard of the bf16 gradients when all activations are gone
        # (`core/optimizer/distrib_optimizer.py::_copy_model_grads_to_main_grads`).
        moments["optimizer step"] = FP32 * shard_elements - activations - vision
    peak = max(moments, key=lambda name: moments[name])
    parts["activations"] = activations
    if vision:
        parts["vision activations"] = vision
    parts[f"peak ({peak})"] = moments[peak]
    return StageMemory(
        stage=rank,
        allocated_bytes=sum(parts.values()),
        parts_bytes=parts,
        host_bytes=HOST_ADAM_BYTES * shard_elements * offloaded,
    )


def communicator_sizes(layout: Layout, model: Model) -> dict[str, int]:
    """NCCL communicators that a rank really uses, with their ranks: the world, and every group of more than one.

    Groups: megatron-core `core/parallel_state.py::initialize_model_parallel`.
    """
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp x cp": layout.dp * layout.cp, "pp": layout.pp}
    if layout.ep > 1 or layout.etp > 1:
        sizes |= {"ep": layout.ep, "expert dp": layout.expert_dp}
        if layout.etp != layout.tp:
            sizes["etp"] = layout.etp
    if model.tie_word_embeddings:
        sizes["embedding (first and last stage)"] = min(layout.pp, 2)
    return {"world": layout.world_size} | {name: size for name, size in sizes.items() if size > 1}


def communicators(layout: Layout, model: Model) -> int:
    """Number of `communicator_sizes`."""
    return len(communicator_sizes(layout, model))


def fragmentation(model: Model, layout: Layout) -> float:
    """What torch's allocator holds beyond live tensors, as a share of them."""
    irregular = layout.pp > 1 or facts_of(model).is_moe
    return IRREGULAR_FRAGMENTATION if irregular else FRAGMENTATION


def margin_bytes(model: Model, cluster: Cluster, profile: Profile, device_bytes: float) -> float:
    """What `fits` leaves free: the spec's share of the card, else the error band of the prediction."""
    if cluster.margin is not None:
        return cluster.margin * cluster.gpu.memory_bytes
    return device_bytes * (profile.moe_memory_band if facts_of(model).is_moe else profile.memory_band)


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
    reserved = allocated * (1.0 + fragmentation(model, layout))
    device = reserved + profile.context_bytes + profile.nccl_bytes_per_communicator * communicators(layout, model)
    return Memory(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=device,
        capacity_bytes=cluster.gpu.memory_bytes,
        margin_bytes=margin_bytes(model, cluster, profile, device),
        host_bytes=max(stage.host_bytes for stage in stages) * cluster.gpus_per_node,
        host_capacity_bytes=cluster.host_memory_bytes,
        by_stage=stages,
    )
