"""What a pipeline stage holds temporarily: activations from forward to backward, and the candidates for its peak."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from topoplan.engines.megatron.states import (
    StageStates,
    chunk_layers,
    chunk_runs,
    distinct_layers,
    head_elements,
    keeps_own_weights,
    states_in_copies,
)
from topoplan.engines.prediction import FREED, Moment
from topoplan.layout.layout import Layout, Recompute
from topoplan.layout.stages import Chunk
from topoplan.operators.activations import KeptActivations, kept_activations
from topoplan.operators.layers import mtp_layer
from topoplan.operators.op import BF16, FP32
from topoplan.operators.shard import Shard
from topoplan.specs.case import Case
from topoplan.specs.model import Model

Kept = Mapping[int, KeptActivations]
"""What a micro-batch leaves in each kind of layer, by the identity (id) of the layer."""


@lru_cache(maxsize=1 << 12)
def kept_of(model: Model, mtp_layers: int, shard: Shard, recompute: Recompute) -> Kept:
    """Return what each kind of layer of a model keeps under a recompute mode."""
    layers = [*distinct_layers(model), *([mtp_layer(model)] if mtp_layers else [])]
    return {id(layer): kept_activations(model, layer, shard, recompute) for layer in layers}


@lru_cache(maxsize=1 << 14)
def _recomputed_in_runs(model: Model, chunk: Chunk, recompute: Recompute) -> tuple[tuple[int, int, int], ...]:
    """Return, for recompute method block, (layer id, recomputed layers, other layers) of each run of equal layers.

    The first `num_layers` layers of the chunk are recomputed.
    """
    left, runs = recompute.num_layers or 1, []
    for layer, count in chunk_runs(model, chunk):
        again = min(left, count)
        left -= again
        runs.append((id(layer), again, count - again))
    return tuple(runs)


KeptPiece = tuple[int | str, int, float]
"""A piece of what a micro-batch leaves in a chunk: (id of a kind of layer, or name of a tensor; count; bytes of
one)."""


def chunk_kept(model: Model, chunk: Chunk, shard: Shard, recompute: Recompute, kept: Kept) -> list[KeptPiece]:
    """Return the activations of one micro-batch that a chunk keeps from forward to backward, piece by piece."""
    pieces: list[KeptPiece] = []
    if chunk.mtp_layers:
        layer = mtp_layer(model)
        pieces.append((id(layer), chunk.mtp_layers, kept[id(layer)].kept_bytes))
    hidden_states = BF16 * shard.local_tokens * model.hidden_size
    if chunk.final_norm and not chunk.head:
        # On the last stage the final norm is part of the loss, whose backward follows at once.
        pieces.append(("final norm input", 1, hidden_states))
    if recompute.granularity != "full":
        pieces += [
            (id(layer), count, kept[id(layer)].kept_bytes)
            for layer, count in chunk_layers(model, chunk)
            if not layer.predicts_next
        ]
    elif recompute.method == "block":
        for layer_id, again, plain in _recomputed_in_runs(model, chunk, recompute):
            pieces += [(layer_id, again, kept[layer_id].kept_bytes), (layer_id, plain, kept[layer_id].plain_bytes)]
    else:
        pieces.append(("layer inputs", -(-chunk.num_layers // (recompute.num_layers or 1)), hidden_states))
    return pieces


def chunk_kept_bytes(model: Model, chunk: Chunk, shard: Shard, recompute: Recompute, kept: Kept) -> float:
    """Return the total bytes of the pieces of `chunk_kept`."""
    return sum([count * size for _, count, size in chunk_kept(model, chunk, shard, recompute, kept)])


def _mtp_kept_bytes(model: Model, chunk: Chunk, kept: Kept) -> float:
    """Return the bytes that a chunk keeps for its multi-token-prediction layers, which are the first to be freed."""
    return kept[id(mtp_layer(model))].kept_bytes * chunk.mtp_layers


_Backward = tuple[float, float, float, float]
"""What the backward of one layer, or of one recomputed group, adds to what is kept, in bytes: recomputed activations,
gradients in the layer, embedding gradients that wait, and (negative) activations that have been freed by then."""


def _backward_peak(
    model: Model, chunks: tuple[Chunk, ...], shard: Shard, recompute: Recompute, table_bytes: float, kept: Kept
) -> _Backward:
    """Return the backward that adds most.

    `table_bytes` is the embedding's gradient. Autograd sums the gradients of all uses of a weight before it passes them
    on, so the gradient from a multi-token-prediction layer waits if the chunk looks up the same table earlier in
    forward.
    """
    group = recompute.num_layers or 1 if recompute.granularity == "full" and recompute.method == "uniform" else 1
    found: list[_Backward] = [(0.0, 0.0, 0.0, 0.0)]
    for chunk in chunks:
        freed = waiting = 0.0
        if chunk.mtp_layers:
            found += _mtp_backwards(model, chunk, shard, table_bytes, kept)
            freed = _mtp_kept_bytes(model, chunk, kept)
            waiting = table_bytes if chunk.embedding else 0.0
        if recompute.granularity == "full" and recompute.method == "block":
            found += _block_backwards(model, chunk, recompute, freed, waiting, kept)
            continue
        for layer, _ in chunk_layers(model, chunk):
            if layer.predicts_next:
                continue
            one = kept[id(layer)]
            extra = (min(group, chunk.num_layers) - 1) * one.plain_bytes if group > 1 else 0.0
            found.append((one.recomputed_bytes + extra, one.backward_bytes, waiting, -freed))
    return max(found, key=sum)


def _mtp_backwards(model: Model, chunk: Chunk, shard: Shard, table_bytes: float, kept: Kept) -> list[_Backward]:
    """Return the backwards of the last and the second-to-last multi-token-prediction layer of a chunk."""
    one = kept[id(mtp_layer(model))]
    # All depths receive their gradients in one tensor (`MultiTokenPredictionBlock.forward` concatenates their outputs).
    outputs = (1 + chunk.mtp_layers) * BF16 * shard.local_tokens * model.hidden_size
    gradient = one.backward_bytes + outputs
    return [
        (one.recomputed_bytes, gradient, depth * table_bytes, -depth * one.kept_bytes)
        for depth in range(min(2, chunk.mtp_layers))
    ]


def _block_backwards(
    model: Model, chunk: Chunk, recompute: Recompute, freed: float, waiting: float, kept: Kept
) -> list[_Backward]:
    """Return the backwards under recompute method block.

    The last layers keep all activations, and these are freed before the first layers are recomputed. In a run of equal
    layers, the first one in backward needs the most, because the least has been freed by then.
    """
    found: list[_Backward] = []
    for layer_id, again, plain in reversed(_recomputed_in_runs(model, chunk, recompute)):
        one = kept[layer_id]
        if plain:
            found.append((0.0, one.backward_bytes, waiting, -freed))
            freed += plain * one.plain_bytes
        if again:
            found.append((one.recomputed_bytes, one.backward_bytes, waiting, -freed))
            freed += again * one.kept_bytes
    return found


FP32_GRADIENT = ">=2.18"
"""Versions of Transformer Engine whose fused loss makes its gradient in fp32 (TransformerEngine #3193,
`pytorch/triton/cross_entropy.py::cross_entropy_forward`). They are not assumed, but taken if the spec states one."""


CLONES_WHAT_IT_TIMES = "<2.6"
"""Versions of PyTorch whose torch.compile clones the tensors that a kernel writes to while it times the kernel
(`_inductor/runtime/triton_heuristics.py::clone_args`; from 2.6 on not beyond the peak so far,
`copy_args_to_cpu_if_needed`). They are not assumed either."""


def stated_loss_copies(case: Case, layout: Layout) -> int:
    """Return the bytes per logit that the stated versions of a fused loss allocate in addition."""
    native = layout.cross_entropy_fusion_impl == "native"
    package, versions = ("torch", CLONES_WHAT_IT_TIMES) if native else ("transformer-engine", FP32_GRADIENT)
    return FP32 if package in case.cluster.software and case.cluster.may_run(package, versions) else 0


def bytes_per_logit(layout: Layout, *, is_adapter: bool = False, stated_copies: int = 0) -> tuple[int, int]:
    """Return the bytes of the loss per logit: (bf16 value, what the cross entropy allocates for it).

    Unfused, an fp32 copy becomes the softmax and then the gradient (`core/tensor_parallel/cross_entropy.py`); compiled,
    two fp32 copies are alive for a moment of backward (`core/fusions/fused_cross_entropy.py`). Measured with
    megatron-core 0.16.1 and torch's profiler: 6.03 and 10.03 bytes in total. Transformer Engine 2 overwrites the logits
    with the gradient. `stated_copies` are what stated versions add to both (`stated_loss_copies`). mcore_adapter has a
    fused loss of its own, which allocates the gradient beside the logits
    (`parallel_functions/fused_cross_entropy.py::cross_entropy_bwd`).
    """
    if not layout.cross_entropy_fusion:
        return BF16, FP32
    if is_adapter:
        return BF16, BF16
    own = 2 * FP32 if layout.cross_entropy_fusion_impl == "native" else 0
    return BF16, own + stated_copies


def mtp_bytes_per_logit(
    layout: Layout, depths: int, *, is_adapter: bool = False, stated_copies: int = 0
) -> tuple[int, int]:
    """Return the bytes that multi-token prediction adds to `bytes_per_logit`: (beside the main loss, alone after it).

    Every depth keeps its softmax until its backward, which comes after that of the main loss. Unfused, the peak is in
    forward, where a variable still holds the last depth's bf16 logits (`core/models/gpt/gpt_model.py::_postprocess`).
    """
    value, copies = bytes_per_logit(layout, is_adapter=is_adapter, stated_copies=stated_copies)
    kept = FP32 if copies >= FP32 else value
    variable = 0 if layout.cross_entropy_fusion else BF16
    return kept * depths + variable, kept * (depths - 1) + value + copies


def stage_moments(
    case: Case,
    layout: Layout,
    shard: Shard,
    states: StageStates,
    kept: Kept,
    chunks_kept: list[float],
    in_flight_bytes: float,
) -> list[Moment]:
    """Return the moments at which a stage may reach its peak, each with what is alive there but not for the whole step.

    `chunks_kept` has the bytes that one micro-batch leaves in each chunk, `in_flight_bytes` those of all micro-batches
    in flight.

    The moments are the backward of a layer with all micro-batches in flight; on the last stage, the loss; on a stage
    with an embedding, the embedding's gradient, which is dense, after the layers behind it have been freed; and the
    optimizer step.
    """
    model, job = case.model, case.job
    table = float(BF16 * states.vocabulary) if job.trains_language_weights else 0.0
    dummies = ("dummy weight gradients", states.dummy_bytes)
    # With sequence parallelism, whole-sequence copies of a GEMM's input and of the input's gradient exist temporarily.
    # A frozen weight does not need its input.
    copies = 2 if shard.adapters is None else 1
    gathered = copies * BF16 * model.hidden_size * shard.tokens if layout.step.sequence_parallel else 0.0
    recomputed, gradients, waiting, freed = _backward_peak(model, states.chunks, shard, layout.recompute, table, kept)
    # Combined with the forward of the next micro-batch, layer by layer (`operators/combined.py`).
    layers = {id(layer) for chunk in states.chunks for layer, _ in chunk_layers(model, chunk)}
    next_layer = max(kept[layer].kept_bytes for layer in layers) if layers and shard.combined_share else 0.0
    backward = (
        dummies,
        *([("weight gradient", states.gradient_bytes)] if states.gradient_bytes else []),
        ("gathered input and its gradient" if shard.adapters is None else "gathered gradient", gathered),
        ("recomputed activations", recomputed),
        ("gradients in the layer", gradients),
        ("embedding gradient that waits", waiting),
        *([("a layer of the next micro batch", next_layer)] if next_layer else []),
        (FREED, freed),
    )
    moments = [Moment("backward", backward)]
    for chunk, kept_bytes in zip(states.chunks, chunks_kept, strict=True):
        if chunk.head:
            moments += _losses(case, layout, shard, chunk, head_elements(case, layout.tp), dummies)
        if table and (chunk.embedding or chunk.mtp_layers):
            # The gradient of the last lookup, and the sum of the others.
            tables = min(2, chunk.embedding + chunk.mtp_layers) * table
            behind = kept_bytes if chunk.embedding else _mtp_kept_bytes(model, chunk, kept)
            moments.append(Moment("embedding gradient", (dummies, ("gradient of the table", tables), (FREED, -behind))))
    if made := _optimizer_copies(case, layout, states):
        moments.append(Moment("optimizer step", (*made, (FREED, -in_flight_bytes))))
    return moments


def _optimizer_copies(case: Case, layout: Layout, states: StageStates) -> list[tuple[str, float]]:
    """Return the fp32 copies of the optimizer's shard that exist after all activations are freed."""
    made = []
    if not (layout.states.grad_reduce_in_fp32 or keeps_own_weights(case.job, layout)):
        # `core/optimizer/distrib_optimizer.py::_copy_model_grads_to_main_grads`
        made.append(("fp32 copy of the gradients", FP32 * states.shard_elements))
    if copied := states_in_copies(layout):
        # Dense weights and experts have an optimizer each, which run one after the other.
        shards = zip((states.parameters.dense, states.parameters.expert), layout.optimizer_shards, strict=True)
        made.append(("fp32 copies of its states", FP32 * len(copied) * max(whole / ranks for whole, ranks in shards)))
    return made


def _losses(
    case: Case, layout: Layout, shard: Shard, chunk: Chunk, vocabulary: int, dummies: tuple[str, float]
) -> list[Moment]:
    """Return the moments of the loss: its forward and, with multi-token prediction, its backward."""
    model, job = case.model, case.job
    depths = job.mtp_num_layers
    hidden_bytes, logits = BF16 * model.hidden_size, shard.tokens * (vocabulary // model.hidden_size)
    is_adapter, stated_copies = case.traits.is_adapter, stated_loss_copies(case, layout)
    value, copies = bytes_per_logit(layout, is_adapter=is_adapter, stated_copies=stated_copies)
    # With multi-token prediction, its layers keep the norm's output, and the loss gets a copy of it.
    ends = (
        (
            "inputs of the final norm and the output layer",
            hidden_bytes * (chunk.final_norm + 1 + depths) * shard.local_tokens,
        ),
        (
            # `LinearWithFrozenWeight` saves no input (`core/tensor_parallel/layers.py`).
            ("gathered input of the output layer and its gradient", hidden_bytes * 2 * shard.tokens)
            if shard.adapters is None
            else ("gradient of the output layer's gathered input", hidden_bytes * shard.tokens)
        ),
    )
    first = dummies if layout.gradient_accumulation_steps > 1 else (dummies[0], 0.0)
    name = "fp32 copies of the logits" if copies != BF16 else "gradient of the logits"
    values, made = ("bf16 logits", value * logits), (name, copies * logits)
    if not depths:
        return [Moment("loss", (first, values, made, *ends))]
    others = "logits of multi-token prediction"
    # The output layer's weight is used by all depths, and autograd sums their (dummy) gradients out of place.
    added = (
        "sum of the output layer's dummy gradients",
        float(BF16 * vocabulary) if job.trains_language_weights else 0.0,
    )
    beside, alone = mtp_bytes_per_logit(layout, depths, is_adapter=is_adapter, stated_copies=stated_copies)
    return [
        Moment("loss", (first, values, made, (others, beside * logits), *ends)),
        Moment("loss backward", (dummies, added, (others, alone * logits), *ends)),
    ]
