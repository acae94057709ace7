"""Memory of every pipeline stage: weights, gradients, optimizer, activations in flight, the ends, transients.

Weights, gradients and optimizer: megatron-core 0.16 `core/distributed/param_and_grad_buffer.py` and
`core/optimizer/distrib_optimizer.py` (2 bytes of weight and 4 or 2 of gradient on every rank, 12 of fp32 weight and two
moments sharded over the data-parallel group; ZeRO stage 1, arXiv 1910.02054, section 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    mtp_layer,
    padded_vocab_size,
)
from topoplan.cost.pipeline import in_flight, most_in_flight
from topoplan.cost.profile import Profile
from topoplan.cost.shard import Shard, shard_of
from topoplan.cost.vision import patches_per_microbatch
from topoplan.layout.layout import Layout, Recompute, stages_of
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
"""Host memory of an offloaded element: fp32 weight, two moments and gradient
(`core/optimizer/cpu_offloading/hybrid_optimizer.py`, param_update_in_fp32)."""
GROUPED_GEMM_STREAMS = 4
"""cuBLAS streams of Transformer Engine's grouped GEMM, a workspace each (nvte_get_num_compute_streams)."""
FRAGMENTATION = 0.03
"""Reserved over allocated, less one, when every micro batch allocates the same sizes in the same order."""
IRREGULAR_FRAGMENTATION = 0.06
"""The same when several micro batches are in flight, or experts get other numbers of tokens each time.

Both: medians over the ranks of the six B200 runs published with SimuMax 1.2, without expandable segments. How much
expandable segments would take off was not measured; nothing is taken off."""


FREED = "activations freed by then"
"""The name of what a moment no longer holds."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of the step at which a stage may be at its peak."""

    name: str
    """backward, loss, loss backward, embedding gradient or optimizer step."""
    terms_bytes: tuple[tuple[str, float], ...]
    """What is alive then beside weights, gradients, optimizer, workspace and all activations in flight, by name; below
    zero for activations that are freed by then."""

    @property
    def total_bytes(self) -> float:
        """All terms together."""
        return sum([size for _, size in self.terms_bytes])


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Peak of one pipeline stage."""

    stage: int
    allocated_bytes: float
    parts_bytes: Mapping[str, float]
    """By purpose: weights, gradients, optimizer, activations, ... They add up to allocated_bytes."""
    host_bytes: float = 0.0
    """Pinned host memory of one rank."""
    moments: tuple[Moment, ...] = field(default=(), compare=False)
    """All that may be the peak, where they were asked for; the largest is in `parts_bytes` as peak (its name)."""


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
    def excess_without_optimizer_bytes(self) -> float:
        """At least so much would be over the card if all optimizer states were elsewhere."""
        allocated = max(stage.allocated_bytes - stage.parts_bytes["optimizer"] for stage in self.by_stage)
        device = self.device_bytes - (self.allocated_bytes - allocated) * self.reserved_bytes / self.allocated_bytes
        return device + self.margin_bytes * min(1.0, device / self.device_bytes) - self.capacity_bytes

    @property
    def fits(self) -> bool:
        """Device memory and margin are within the card, and what is offloaded is within the host's memory."""
        fits_host = self.host_capacity_bytes is None or self.host_bytes <= self.host_capacity_bytes
        return self.excess_bytes <= 0.0 and fits_host


@lru_cache(maxsize=1 << 14)
def chunk_layers(model: Model, chunk: Chunk) -> tuple[tuple[Layer, int], ...]:
    """The distinct layers of a chunk with their counts, multi-token-prediction layers last."""
    counts: dict[int, tuple[Layer, int]] = {}
    for index in chunk.layers:
        layer = model.layers[index]
        counts[id(layer)] = (layer, counts.get(id(layer), (layer, 0))[1] + 1)
    if chunk.mtp_layers:
        layer = mtp_layer(model)
        counts[id(layer)] = (layer, chunk.mtp_layers)
    return tuple(counts.values())


def rank_kinds(model: Model, job: Job, layout: Layout) -> tuple[int, ...]:
    """For each pipeline rank, the first one that holds the same kinds of layers in the same chunks."""
    return _rank_kinds(model, layout.pp, layout.vpp, layout.pipeline_layout, job.mtp_num_layers)


@lru_cache(maxsize=1 << 14)
def _rank_kinds(model: Model, pp: int, vpp: int, pipeline_layout: str | None, mtp_layers: int) -> tuple[int, ...]:
    first: dict[object, int] = {}
    return tuple(
        first.setdefault(
            tuple(
                (
                    *(chunk.embedding, chunk.final_norm, chunk.head),
                    *((id(layer), n) for layer, n in chunk_layers(model, chunk)),
                )
                for chunk in chunks
            ),
            rank,
        )
        for rank, chunks in enumerate(split_stages(model.num_layers, pp, vpp, pipeline_layout, mtp_layers))
    )


def distinct_ranks(model: Model, job: Job, layout: Layout) -> tuple[int, ...]:
    """Pipeline ranks that hold different layers: the first of each kind, which has most in flight."""
    return tuple(dict.fromkeys(rank_kinds(model, job, layout)))


def _vocabulary_elements(model: Model, traits: Traits, tp: int) -> int:
    return padded_vocab_size(model, tp, traits.vocab_multiple) // tp * model.hidden_size


@lru_cache(maxsize=1 << 15)
def chunk_parameters(model: Model, chunk: Chunk, traits: Traits, tp: int, ep: int, etp: int) -> RankParameters:
    """Elements that one rank holds of a chunk, the vision tower left out."""
    total = RankParameters()
    for layer, count in chunk_layers(model, chunk):
        one = layer_parameters(model, layer, tp, ep, etp)
        total += RankParameters(one.dense * count, one.expert * count)
    return total + RankParameters(sum(elements for _, elements in end_tensors(model, chunk, traits, tp)))


def end_tensors(model: Model, chunk: Chunk, traits: Traits, tp: int) -> list[tuple[Tensor, int]]:
    """Weights before and behind the layers of a chunk, with the elements of them that one rank holds.

    Tied embeddings are one tensor in a chunk that holds both ends of the model, and two copies elsewhere; then
    multi-token prediction uses its copy of the embedding for the output too, and the output layer's lies idle beside it
    (`core/models/gpt/gpt_model.py`, skip_weight_param_allocation).
    """
    vocabulary = _vocabulary_elements(model, traits, tp)
    ends: list[tuple[Tensor, int]] = []
    if chunk.embedding or chunk.mtp_layers:
        words, *positions = embedding_tensors(model)
        ends += [(words, vocabulary), *((tensor, tensor.elements) for tensor in positions)]
    final_norm, *output = head_tensors(model)
    if chunk.final_norm:
        ends.append((final_norm, final_norm.elements))
    if chunk.head:
        if output:
            ends.append((output[0], vocabulary))
        elif not chunk.embedding:
            table = embedding_tensors(model)[0]
            ends.append((Tensor("output_layer (copy of the embedding)", table.elements, table.split), vocabulary))
    return ends


def stage_parameters(model: Model, job: Job, layout: Layout, traits: Traits, rank: int) -> RankParameters:
    """Elements on one rank of a pipeline stage: trainable dense, trainable expert, frozen."""
    language = RankParameters()
    for chunk in stages_of(model, job, layout)[rank]:
        language += chunk_parameters(model, chunk, traits, layout.tp, layout.ep, layout.etp)
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


def chunk_kept_bytes(model: Model, chunk: Chunk, shard: Shard, recompute: Recompute) -> float:
    """Activations of one micro batch that a chunk keeps from forward to backward."""
    beside = _mtp_kept_bytes(model, chunk, shard, recompute)
    if chunk.final_norm and not chunk.head:
        # The final norm's input; on the last stage it is part of the loss, whose backward follows at once.
        beside += BF16 * shard.local_tokens * model.hidden_size
    group = recompute.num_layers or 1
    if recompute.granularity != "full":
        kept = sum(
            kept_activations(model, layer, shard, recompute).kept_bytes * count
            for layer, count in chunk_layers(model, chunk)
            if not layer.predicts_next
        )
    elif recompute.method == "block":
        kept = 0.0
        for position, index in enumerate(chunk.layers):
            one = kept_activations(model, model.layers[index], shard, recompute)
            kept += one.kept_bytes if position < group else one.plain_bytes
    else:
        inputs = -(-chunk.num_layers // group)
        kept = inputs * BF16 * shard.local_tokens * model.hidden_size
    return kept + beside


def _mtp_kept_bytes(model: Model, chunk: Chunk, shard: Shard, recompute: Recompute) -> float:
    """The part of multi-token-prediction layers in what a chunk keeps; theirs are the first to be freed."""
    if not chunk.mtp_layers:
        return 0.0
    return kept_activations(model, mtp_layer(model), shard, recompute).kept_bytes * chunk.mtp_layers


_Backward = tuple[float, float, float, float]
"""What the backward of one layer (or of one recomputed group) adds to what is kept: activations brought back, gradients
in the layer, embedding gradients that wait, and, below zero, activations that are freed by then."""


def _backward_peak(
    model: Model, chunks: tuple[Chunk, ...], shard: Shard, recompute: Recompute, table_bytes: float
) -> _Backward:
    """The backward that adds most.

    `table_bytes`: the embedding's gradient. Autograd adds up the gradients of all uses of a weight before it hands them
    on, so that of a multi-token-prediction layer waits where the chunk looks up the same table earlier in forward.
    """
    group = recompute.num_layers or 1 if recompute.granularity == "full" and recompute.method == "uniform" else 1
    found: list[_Backward] = [(0.0, 0.0, 0.0, 0.0)]
    for chunk in chunks:
        freed = waiting = 0.0
        if chunk.mtp_layers:
            found += _mtp_backwards(model, chunk, shard, recompute, table_bytes)
            freed = _mtp_kept_bytes(model, chunk, shard, recompute)
            waiting = table_bytes if chunk.embedding else 0.0
        if recompute.granularity == "full" and recompute.method == "block":
            found += _block_backwards(model, chunk, shard, recompute, freed, waiting)
            continue
        for layer, _ in chunk_layers(model, chunk):
            if layer.predicts_next:
                continue
            one = kept_activations(model, layer, shard, recompute)
            extra = (min(group, chunk.num_layers) - 1) * one.plain_bytes if group > 1 else 0.0
            found.append((one.recomputed_bytes + extra, one.backward_bytes, waiting, -freed))
    return max(found, key=sum)


def _mtp_backwards(
    model: Model, chunk: Chunk, shard: Shard, recompute: Recompute, table_bytes: float
) -> list[_Backward]:
    """The same for the last and the last but one of the multi-token-prediction layers of a chunk."""
    one = kept_activations(model, mtp_layer(model), shard, recompute)
    # All depths get their gradients in one tensor (`MultiTokenPredictionBlock.forward` concatenates their outputs).
    outputs = (1 + chunk.mtp_layers) * BF16 * shard.local_tokens * model.hidden_size
    gradient = one.backward_bytes + outputs
    return [
        (one.recomputed_bytes, gradient, depth * table_bytes, -depth * one.kept_bytes)
        for depth in range(min(2, chunk.mtp_layers))
    ]


def _block_backwards(
    model: Model, chunk: Chunk, shard: Shard, recompute: Recompute, freed: float, waiting: float
) -> list[_Backward]:
    """The same for recompute method block: the last layers keep all, and are freed before the first are recomputed."""
    found: list[_Backward] = []
    for position in reversed(range(chunk.num_layers)):
        one = kept_activations(model, model.layers[chunk.layers[position]], shard, recompute)
        if position < (recompute.num_layers or 0):
            found.append((one.recomputed_bytes, one.backward_bytes, waiting, -freed))
            freed += one.kept_bytes
        else:
            found.append((0.0, one.backward_bytes, waiting, -freed))
            freed += one.plain_bytes
    return found


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


def bytes_per_logit(layout: Layout) -> tuple[int, int]:
    """Memory of the loss for one logit: (its bf16 value, what its cross entropy makes of it).

    Unfused, an fp32 copy becomes the softmax and then the gradient (`core/tensor_parallel/cross_entropy.py`); compiled,
    two fp32 copies live for a moment of backward (`core/fusions/fused_cross_entropy.py`). Measured with megatron-core
    0.16.1 and torch's profiler: 6.03 and 10.03 bytes. Transformer Engine 2 writes the gradient over the logits.
    """
    if not layout.cross_entropy_fusion:
        return BF16, FP32
    return BF16, 2 * FP32 if layout.cross_entropy_fusion_impl == "native" else 0


def mtp_bytes_per_logit(layout: Layout, depths: int) -> tuple[int, int]:
    """What multi-token prediction adds to `bytes_per_logit`: (beside the main loss, alone once that one is done).

    Every depth keeps its softmax to its backward, which comes after that of the main loss; unfused, the peak is in
    forward, where the last depth's bf16 logits are still in a variable (`core/models/gpt/gpt_model.py::_postprocess`).
    """
    value, copies = bytes_per_logit(layout)
    kept = FP32 if copies else BF16
    variable = 0 if layout.cross_entropy_fusion else BF16
    return kept * depths + variable, kept * (depths - 1) + value + copies


def stage_moments(
    model: Model,
    job: Job,
    layout: Layout,
    shard: Shard,
    chunks: tuple[Chunk, ...],
    vocabulary: int,
    shard_elements: float,
    kept: list[float],
    in_flight_bytes: float,
) -> list[Moment]:
    """The moments at which a stage may be at its peak, with all that is alive then and not for the whole step.

    `kept` is what a micro batch leaves in each chunk, `in_flight_bytes` what all of them do.

    Backward of a layer with all micro batches in flight; on the last stage the loss; where there is an embedding its
    gradient, which is dense, once the layers behind it are freed.
    """
    table = 0.0 if job.freeze_language_model else float(BF16 * vocabulary)
    dummies = ("dummy weight gradients", _dummy_gradient_bytes(model, chunks, shard, vocabulary))
    # With sequence parallelism a whole-sequence copy of a GEMM's input, and of its gradient, exists for a moment.
    gathered = 2 * BF16 * model.hidden_size * shard.tokens if layout.sequence_parallel else 0.0
    recomputed, gradients, waiting, freed = _backward_peak(model, chunks, shard, layout.recompute, table)
    backward = (
        dummies,
        ("gathered input and its gradient", gathered),
        ("recomputed activations", recomputed),
        ("gradients in the layer", gradients),
        ("embedding gradient that waits", waiting),
        (FREED, freed),
    )
    moments = [Moment("backward", backward)]
    for chunk, kept_bytes in zip(chunks, kept, strict=True):
        if chunk.head:
            moments += _losses(model, job, layout, shard, chunk, vocabulary, dummies)
        if table and (chunk.embedding or chunk.mtp_layers):
            # The last lookup's gradient, and the sum of the others.
            tables = min(2, chunk.embedding + chunk.mtp_layers) * table
            behind = kept_bytes if chunk.embedding else _mtp_kept_bytes(model, chunk, shard, layout.recompute)
            moments.append(Moment("embedding gradient", (dummies, ("gradient of the table", tables), (FREED, -behind))))
    if not (layout.grad_reduce_in_fp32 or layout.precision_aware_optimizer):
        # The fp32 optimizer casts its shard of the bf16 gradients when all activations are gone
        # (`core/optimizer/distrib_optimizer.py::_copy_model_grads_to_main_grads`).
        cast = ("fp32 copy of the gradients", FP32 * shard_elements)
        moments.append(Moment("optimizer step", (cast, (FREED, -in_flight_bytes))))
    return moments


def _losses(
    model: Model,
    job: Job,
    layout: Layout,
    shard: Shard,
    chunk: Chunk,
    vocabulary: int,
    dummies: tuple[str, float],
) -> list[Moment]:
    """Forward of the loss and, with multi-token prediction, its backward."""
    depths = job.mtp_num_layers
    hidden_bytes, logits = BF16 * model.hidden_size, shard.tokens * (vocabulary // model.hidden_size)
    value, copies = bytes_per_logit(layout)
    # With multi-token prediction the norm's output is among what its layers keep, and a copy of it goes to the loss.
    ends = (
        (
            "inputs of the final norm and the output layer",
            hidden_bytes * (chunk.final_norm + 1 + depths) * shard.local_tokens,
        ),
        ("gathered input of the output layer and its gradient", hidden_bytes * 2 * shard.tokens),
    )
    first = dummies if layout.gradient_accumulation_steps > 1 else (dummies[0], 0.0)
    values, fp32 = ("bf16 logits", value * logits), ("fp32 copies of the logits", copies * logits)
    if not depths:
        return [Moment("loss", (first, values, fp32, *ends))]
    others = "logits of multi-token prediction"
    # The output layer's weight is used by all depths, and autograd adds up their (dummy) gradients out of place.
    added = (
        "sum of the output layer's dummy gradients",
        0.0 if job.freeze_language_model else float(BF16 * vocabulary),
    )
    beside, alone = mtp_bytes_per_logit(layout, depths)
    return [
        Moment("loss", (first, values, fp32, (others, beside * logits), *ends)),
        Moment("loss backward", (dummies, added, (others, alone * logits), *ends)),
    ]


def stage_memory(
    model: Model,
    job: Job,
    layout: Layout,
    traits: Traits,
    profile: Profile,
    rank: int,
    *,
    with_moments: bool = False,
) -> StageMemory:
    """Peak of one pipeline stage: what stays all the step, activations in flight, and the worst of its moments.

    `with_moments` hands out the moments too.
    """
    shard = shard_of(layout, job, flash_attention=profile.flash_attention)
    chunks = stages_of(model, job, layout)[rank]
    parameters = stage_parameters(model, job, layout, traits, rank)
    dense_shards, expert_shards = layout.optimizer_shards
    trainable = parameters.dense + parameters.expert
    shard_elements = parameters.dense / dense_shards + parameters.expert / expert_shards
    offloaded = layout.optimizer_offload_fraction
    # Remainders need the bf16 weight to be the one that is trained, and an optimizer that is TE's throughout.
    remainders = layout.precision_aware_optimizer and job.precision == "bf16" and not offloaded
    adam = PRECISION_AWARE_ADAM_BYTES if remainders else ADAM_BYTES
    # What is offloaded is a copy of the fp32 weights, unless they are the optimizer's own
    # (`core/optimizer/distrib_optimizer.py::_build_model_and_main_param_groups`).
    left_behind = 0 if layout.precision_aware_optimizer else FP32 * offloaded
    # The hybrid optimizer is built twice: first over all weights of the rank, then over its shard. The first is in a
    # reference cycle, and nothing in the trainers runs the garbage collection that would free its fp32 copies.
    whole = float(FP32 * trainable) if offloaded else 0.0
    weights = float(BF16 * parameters.total)
    if shard.eight_bit:
        # Rowwise and columnwise quantised copies of the blocks' weights are cached over the micro batches of a step.
        elements = _layer_elements(model, chunks, layout.tp, layout.ep, layout.etp)
        weights += (2 * QUANTISED_BYTES[shard.precision] - (BF16 if layout.fp8_param else 0)) * elements
    moe = any(isinstance(layer.ffn, Moe) for chunk in chunks for layer, _ in chunk_layers(model, chunk))
    parts = {
        "weights": weights,
        "gradients": float((FP32 if layout.grad_reduce_in_fp32 else BF16) * trainable),
        "optimizer": shard_elements * (adam * (1.0 - offloaded) + left_behind),
        "workspace": float(profile.cublas_workspace_bytes * (2 + (GROUPED_GEMM_STREAMS if moe else 0))),
    }
    if 0.0 < offloaded < 1.0:
        parts["copies for offload"] = whole * (1.0 - offloaded)
    if job.stage == "dpo":
        # A second model in bf16, forward only (mcore_adapter `trainer/dpo_trainer.py`, ref_model).
        parts["reference model"] = float(BF16 * parameters.total)
    kept = [chunk_kept_bytes(model, chunk, shard, layout.recompute) for chunk in chunks]
    tower = vision_kept_bytes(model, job, layout) if rank == 0 else 0.0
    activations, vision = _activations_in_flight(layout, rank, kept, tower)
    vocabulary = _vocabulary_elements(model, traits, layout.tp)
    moments = stage_moments(model, job, layout, shard, chunks, vocabulary, shard_elements, kept, activations + vision)
    peak = max(moments, key=lambda moment: moment.total_bytes)
    parts["activations"] = activations
    if vision:
        parts["vision activations"] = vision
    parts[f"peak ({peak.name})"] = peak.total_bytes
    return StageMemory(
        stage=rank,
        allocated_bytes=sum(parts.values()),
        parts_bytes=parts,
        host_bytes=(HOST_ADAM_BYTES * shard_elements + whole) * offloaded,
        moments=tuple(moments) if with_moments else (),
    )


def embedding_ranks(model: Model, job: Job, layout: Layout) -> tuple[int, ...]:
    """Pipeline ranks that hold a copy of the word embedding.

    Source: Megatron-LM `pretrain_gpt.py::get_embedding_ranks`.
    """
    ranks = {0, layout.pp - 1} if model.tie_word_embeddings else {0}
    for rank, chunks in enumerate(stages_of(model, job, layout) if job.mtp_num_layers else ()):
        if chunks[-1].mtp_layers:
            ranks.add(rank)
    return tuple(sorted(ranks))


def communicator_sizes(layout: Layout, model: Model, job: Job) -> dict[str, int]:
    """NCCL communicators that a rank really uses, with their ranks: the world, and every group of more than one.

    Groups: megatron-core `core/parallel_state.py::initialize_model_parallel`.
    """
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp x cp": layout.dp * layout.cp, "pp": layout.pp}
    if layout.ep > 1 or layout.etp > 1:
        sizes |= {"ep": layout.ep, "expert dp": layout.expert_dp}
        if layout.etp != layout.tp:
            sizes["etp"] = layout.etp
    if model.tie_word_embeddings or job.mtp_num_layers:
        sizes["embedding (first and last stage)"] = len(embedding_ranks(model, job, layout))
    return {"world": layout.world_size} | {name: size for name, size in sizes.items() if size > 1}


def communicators(layout: Layout, model: Model, job: Job) -> int:
    """Number of `communicator_sizes`."""
    return len(communicator_sizes(layout, model, job))


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

    `all_stages` lists every pipeline stage, with its moments; without it only those that can be the worst.
    """
    ranks = range(layout.pp) if all_stages else distinct_ranks(model, job, layout)
    stages = tuple(stage_memory(model, job, layout, traits, profile, rank, with_moments=all_stages) for rank in ranks)
    allocated = max(stage.allocated_bytes for stage in stages)
    reserved = allocated * (1.0 + fragmentation(model, layout))
    device = reserved + profile.context_bytes + profile.nccl_bytes_per_communicator * communicators(layout, model, job)
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
