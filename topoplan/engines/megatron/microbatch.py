"""Seconds of one micro-batch on every pipeline stage: its layers, and what runs before and after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from topoplan.engines.megatron.states import chunk_layers, distinct_layers, rank_kinds
from topoplan.layout.layout import Layout, Recompute, stages_of
from topoplan.layout.stages import Chunk
from topoplan.network.collectives import all_gather_s, all_reduce_s
from topoplan.network.placement import Group
from topoplan.operators.layers import mtp_layer
from topoplan.operators.machine import elementwise_s, gemm_s
from topoplan.operators.op import BF16, FP32, PARTS
from topoplan.operators.params import padded_vocab_size
from topoplan.operators.shard import Shard, average_shard, shard_of
from topoplan.operators.times import LayerTime, layer_time
from topoplan.operators.vision import unquantised, vision_s
from topoplan.specs.case import Case
from topoplan.specs.model import Layer

ForwardBackward = tuple[float, float]
"""Seconds of a forward and of its backward."""
_FIRST_COLLECTIVE = PARTS.index("tp_comm")
"""Where the parts of a layer begin that are collectives; they come last."""


class StageTime(NamedTuple):
    """Seconds of one micro-batch on one pipeline rank."""

    forward_s: tuple[float, ...]
    """By model chunk, including what runs before and after its layers: embedding, vision tower, output layer, loss."""
    backward_s: tuple[float, ...]
    """By model chunk, including the recomputed part of the forward."""
    recompute_s: tuple[float, ...]
    """By model chunk: forward work that backward repeats; included in backward_s."""
    collectives_s: ForwardBackward = (0.0, 0.0)
    """Seconds in which the layers wait for collectives of their own, with nothing else to do."""

    @property
    def total_s(self) -> float:
        """Forward plus backward, with recomputation."""
        return sum(self.forward_s) + sum(self.backward_s)


class MicroBatch(NamedTuple):
    """Times of the pieces that the stages of a layout consist of, for one micro-batch."""

    shard: Shard
    """The share of the micro-batch on one rank, with sequences of average length."""
    recompute: Recompute
    layers: Mapping[int, tuple[float, float, LayerTime]]
    """(forward seconds, backward seconds, times by part) of each kind of layer, by the identity (id) of the layer."""
    embedding_s: ForwardBackward
    vision_s: ForwardBackward
    head_s: ForwardBackward


def micro_batch(case: Case, layout: Layout, shard: Shard | None = None) -> MicroBatch:
    """Return the times of a layout's pieces, with sequences of average length; they are equal for all pipeline splits.

    `shard` is the layout's `shard_of`, if the caller has it.
    """
    model, job, traits = case.model, case.job, case.traits
    shard = average_shard(shard or shard_of(case, layout), case, layout)
    vision = vision_s(case, layout, model.vision) if model.vision else (0.0, 0.0)
    vocabulary, fused = padded_vocab_size(model, layout.tp, traits.vocab_multiple), layout.cross_entropy_fusion
    return _micro_batch(case, job.mtp_num_layers, shard, layout.recompute, vocabulary, fused, vision)


@lru_cache(maxsize=1 << 12)
def _micro_batch(
    case: Case,
    mtp_layers: int,
    shard: Shard,
    recompute: Recompute,
    vocabulary: int,
    fused: bool,
    vision_s: ForwardBackward,
) -> MicroBatch:
    model = case.model
    layers: dict[int, tuple[float, float, LayerTime]] = {}
    for layer in (*distinct_layers(model), *([mtp_layer(model)] if mtp_layers else [])):
        time = layer_time(case, layer, shard, recompute)
        layers[id(layer)] = sum(time.forward_s), sum(time.backward_s), time
    return MicroBatch(
        shard=shard,
        recompute=recompute,
        layers=layers,
        embedding_s=_embedding_s(case, shard, vocabulary),
        vision_s=vision_s,
        head_s=_head_s(case, shard, model.num_labels * shard.tp or vocabulary, fused=fused),
    )


def recomputed_share(chunk: Chunk, layer: Layer, recompute: Recompute) -> float:
    """Return the fraction of a chunk's layers of one kind that the recompute mode applies to.

    With method block, the first `num_layers` layers of the chunk and no multi-token-prediction layer; otherwise all.
    """
    if recompute.granularity != "full" or recompute.method != "block":
        return 1.0
    if layer.predicts_next or not chunk.num_layers:
        return 0.0
    return min(recompute.num_layers or 0, chunk.num_layers) / chunk.num_layers


@lru_cache(maxsize=1 << 12)
def _head_s(case: Case, shard: Shard, vocabulary: int, *, fused: bool) -> tuple[float, float]:
    """Return (forward, backward) seconds of output layer and loss for one micro-batch.

    The product is tokens x hidden by hidden x vocabulary / tp; the loss works on tokens x vocabulary / tp logits. The
    time of the final norm is not counted.
    """
    model, cluster, profile = case.model, case.cluster, case.profile
    gpu, hidden = cluster.gpu, model.hidden_size
    rows, columns = shard.tokens, vocabulary / shard.tp
    precision = unquantised(shard.precision)
    forward = gemm_s(rows, columns, hidden, gpu, profile, precision)
    is_frozen = shard.adapters is not None
    wgrad = 0.0 if is_frozen else gemm_s(columns, hidden, rows, gpu, profile, precision)
    gradients = gemm_s(rows, hidden, columns, gpu, profile, precision) + wgrad
    backward = gradients
    # Bytes per logit (`core/tensor_parallel/cross_entropy.py`): copy to fp32, maximum, subtraction, exponential, sum
    # and division, one pass each; backward scales and casts. The fused kernel reads twice and writes the gradient.
    forward += elementwise_s((6 if fused else 6 + 4 + 8 + 8 + 4 + 8) * rows * columns, gpu, profile, kernels=8)
    backward += elementwise_s((4 if fused else 8 + 6) * rows * columns, gpu, profile, kernels=3)
    if shard.tp > 1:
        # Like any column-parallel layer (`operators/te.py::TensorParallel`).
        tensor_group, whole = Group(shard.tp, 1), BF16 * shard.tokens * hidden
        if shard.sequence_parallel:
            gather = all_gather_s(tensor_group, whole, cluster, profile)
            forward += gather
            backward += gather if is_frozen else 2 * gather - min(2 * gather, gradients) * profile.tp_overlap
        else:
            reduce = all_reduce_s(tensor_group, whole, cluster, profile)
            backward += reduce - min(reduce, wgrad) * profile.tp_overlap
    return forward, backward


def _embedding_s(case: Case, shard: Shard, vocabulary: int) -> tuple[float, float]:
    """Return (forward, backward) seconds of the embedding: a lookup, and a dense gradient added to the fp32 buffer.

    Each rank looks up its part of the vocabulary; the results are summed over the group (`VocabParallelEmbedding`).
    With sequence parallelism they are scattered over the sequence instead, and the gradient is gathered. A frozen
    embedding has no backward: gradients start at its output (mcore_bridge `model/gpt_model.py::_preprocess`).
    """
    model, cluster, profile = case.model, case.cluster, case.profile
    rows = BF16 * shard.tokens * model.hidden_size
    forward = elementwise_s(3 * rows, cluster.gpu, profile, kernels=3)
    table = vocabulary / shard.tp * model.hidden_size
    backward = elementwise_s(rows + (BF16 + BF16 + 2 * FP32) * table, cluster.gpu, profile, kernels=3)
    if shard.sequence_parallel:
        gather = all_gather_s(Group(shard.tp, 1), rows, cluster, profile)
        forward, backward = forward + gather, backward + gather
    else:
        forward += all_reduce_s(Group(shard.tp, 1), rows, cluster, profile)
    return forward, backward if shard.adapters is None else 0.0


def chunk_ends(case: Case, chunk: Chunk, times: MicroBatch) -> list[tuple[str, float, float]]:
    """Return (name, forward seconds, backward seconds) of everything before and after a chunk's layers."""
    model, job = case.model, case.job
    ends = []
    # Every multi-token-prediction layer looks up its tokens, and every depth has a loss.
    if lookups := chunk.embedding + chunk.mtp_layers:
        ahead, back = times.embedding_s
        ends.append(("embedding", lookups * ahead, lookups * back))
    if chunk.embedding and model.vision:
        ends.append(("vision tower", *times.vision_s))
    if chunk.head:
        ahead, back = times.head_s
        losses = 1 + job.mtp_num_layers
        ends.append(("output layer, loss", losses * ahead, losses * back))
    return ends


def stage_time(case: Case, chunks: Sequence[Chunk], times: MicroBatch) -> StageTime:
    """Return the times of one micro-batch in the layers and the ends of a pipeline rank, chunk by chunk."""
    model = case.model
    forward: list[float] = []
    backward: list[float] = []
    recompute: list[float] = []
    waits = [0.0, 0.0]
    for chunk in chunks:
        ahead = back = repeated = 0.0
        for layer, count in chunk_layers(model, chunk):
            forward_s, backward_s, time = times.layers[id(layer)]
            ahead += count * forward_s
            back += count * backward_s
            for way, seconds in enumerate((time.forward_s, time.backward_s)):
                waits[way] += count * sum(seconds[_FIRST_COLLECTIVE:])
            if time.recompute_s:
                repeated += count * time.recompute_s * recomputed_share(chunk, layer, times.recompute)
        if chunk.embedding or chunk.head or chunk.mtp_layers:
            for _, forward_s, backward_s in chunk_ends(case, chunk, times):
                ahead += forward_s
                back += backward_s
        forward.append(ahead)
        backward.append(back + repeated)
        recompute.append(repeated)
    return StageTime(tuple(forward), tuple(backward), tuple(recompute), (waits[0], waits[1]))


def stage_parts(case: Case, chunks: Sequence[Chunk], times: MicroBatch) -> tuple[tuple[float, ...], float]:
    """Return (seconds of the layers by part in the order of PARTS, seconds of the ends) of a pipeline rank.

    Both are forward plus backward of one micro-batch, without recomputation; with recomputation they add up to the
    `total_s` of `stage_time`.
    """
    model = case.model
    parts, ends = [0.0] * len(PARTS), 0.0
    for chunk in chunks:
        for layer, count in chunk_layers(model, chunk):
            _, _, time = times.layers[id(layer)]
            for part in range(len(PARTS)):
                parts[part] += count * (time.forward_s[part] + time.backward_s[part])
        ends += sum(ahead + back for _, ahead, back in chunk_ends(case, chunk, times))
    return tuple(parts), ends


def pipeline_times(case: Case, layout: Layout, times: MicroBatch) -> tuple[StageTime, ...]:
    """Return the seconds of one micro-batch on every pipeline rank.

    Ranks that hold the same layers share one object.
    """
    model, job = case.model, case.job
    stages, found = stages_of(model, job, layout), dict[int, StageTime]()
    for kind in (kinds := rank_kinds(case, layout)):
        if kind not in found:
            found[kind] = stage_time(case, stages[kind], times)
    return tuple([found[kind] for kind in kinds])
