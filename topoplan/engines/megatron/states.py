"""What a pipeline stage holds during the whole step: weights, gradients, optimizer states, workspaces.

megatron-core 0.16 `core/distributed/param_and_grad_buffer.py` and `core/optimizer/distrib_optimizer.py`: per element, 2
bytes of weight and 4 or 2 of gradient on every rank, and 12 of fp32 weight and two moments sharded over the
data-parallel group (ZeRO stage 1, arXiv 1910.02054, section 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from topoplan.layout.layout import Layout, changed, stages_of
from topoplan.layout.stages import Chunk, split_stages
from topoplan.operators.activations import layer_activations
from topoplan.operators.adapters import Adapters, adapters_of
from topoplan.operators.layers import mtp_layer
from topoplan.operators.op import BF16, BLAS_THREADS, FP32, Weight
from topoplan.operators.params import (
    RankParameters,
    adapter_parameters,
    embedding_tensors,
    head_tensors,
    layer_parameters,
    padded_vocab_size,
)
from topoplan.operators.shard import Shard, shard_of
from topoplan.operators.te import QUANTISED_BYTES
from topoplan.specs.case import Case
from topoplan.specs.job import Job
from topoplan.specs.model import Layer, Model, Moe

REMAINDER_BYTES = 2
"""Bytes per element of an fp32 weight stored as the remainder of its bf16 copy (TE FusedAdam,
store_param_remainders)."""
DTYPE_BYTES = {"fp32": FP32, "fp16": 2, "bf16": BF16, "fp8": 1}
HOST_ADAM_BYTES = 16
"""Host memory per offloaded element: fp32 weight, two moments and gradient
(`core/optimizer/cpu_offloading/hybrid_optimizer.py`, param_update_in_fp32)."""
DETERMINISTIC_WORKSPACE = 8 * 4096 * 1024
"""Workspace in bytes of torch's cuBLAS in deterministic mode, which requires CUBLAS_WORKSPACE_CONFIG=:4096:8."""
GROUPED_GEMM_STREAMS = 4
"""cuBLAS streams of Transformer Engine's grouped GEMM, with a workspace each (nvte_get_num_compute_streams)."""
KEEPS_DUMMIES = ">=2.3"
"""Versions of Transformer Engine that keep dummy weight gradients for all steps (TransformerEngine #1651,
`pytorch/module/base.py::get_dummy_wgrad`); before, each is made and freed in its own backward."""
KEEPS_OUTPUT_DUMMY = ">=0.14"
"""Versions of megatron-core whose output layer takes such a dummy too (Megatron-LM e7c55de,
`core/tensor_parallel/layers.py::LinearWithGradAccumulationAndAsyncCommunication.backward`)."""


@lru_cache(maxsize=1 << 14)
def chunk_layers(model: Model, chunk: Chunk) -> tuple[tuple[Layer, int], ...]:
    """Return the distinct layers of a chunk with their counts, multi-token-prediction layers last."""
    counts: dict[int, tuple[Layer, int]] = {}
    for index in chunk.layers:
        layer = model.layers[index]
        counts[id(layer)] = (layer, counts.get(id(layer), (layer, 0))[1] + 1)
    if chunk.mtp_layers:
        layer = mtp_layer(model)
        counts[id(layer)] = (layer, chunk.mtp_layers)
    return tuple(counts.values())


@lru_cache(maxsize=64)
def distinct_layers(model: Model) -> tuple[Layer, ...]:
    """Return each kind of layer of a model once."""
    return tuple({id(layer): layer for layer in model.layers}.values())


@lru_cache(maxsize=1 << 14)
def chunk_runs(model: Model, chunk: Chunk) -> tuple[tuple[Layer, int], ...]:
    """Return the runs of equal consecutive layers of a chunk with their lengths, in order.

    Multi-token-prediction layers are left out.
    """
    layers = (model.layers[index] for index in chunk.layers)
    return tuple((run[0], len(run)) for run in (list(group) for _, group in groupby(layers, key=id)))


def rank_kinds(case: Case, layout: Layout) -> tuple[int, ...]:
    """Return, for each pipeline rank, the first rank that holds the same kinds of layers in the same chunks."""
    model, job = case.model, case.job
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


def distinct_ranks(case: Case, layout: Layout) -> tuple[int, ...]:
    """Return one pipeline rank of each kind: the first, which has the most micro-batches in flight."""
    return tuple(dict.fromkeys(rank_kinds(case, layout)))


def _vocabulary_elements(case: Case, tp: int) -> int:
    model, traits = case.model, case.traits
    return padded_vocab_size(model, tp, traits.vocab_multiple) // tp * model.hidden_size


def head_elements(case: Case, tp: int) -> int:
    """Return the elements of the output layer on one rank; the output layer of a classifier is replicated.

    mcore_bridge `model/gpt_model.py`, OutputLayerLinear.
    """
    return case.model.num_labels * case.model.hidden_size or _vocabulary_elements(case, tp)


@lru_cache(maxsize=1 << 15)
def chunk_parameters(case: Case, chunk: Chunk, tp: int, ep: int, etp: int) -> RankParameters:
    """Return the elements of a chunk that one rank holds, without the vision tower."""
    model = case.model
    total = RankParameters()
    for layer, count in chunk_layers(model, chunk):
        total += layer_parameters(model, layer, tp, ep, etp) * count
    return total + RankParameters(sum(elements for _, elements in end_tensors(case, chunk, tp)))


@lru_cache(maxsize=1 << 14)
def _chunk_adapters(model: Model, chunk: Chunk, adapters: Adapters, tp: int, ep: int, etp: int) -> RankParameters:
    """Return the elements of a chunk's adapters that one rank holds."""
    total = RankParameters()
    for layer, count in chunk_layers(model, chunk):
        total += adapter_parameters(model, layer, adapters, tp, ep, etp) * count
    return total


def end_tensors(case: Case, chunk: Chunk, tp: int) -> list[tuple[Weight, int]]:
    """Return the weights before and after the layers of a chunk, with their elements on one rank.

    Tied embeddings are one tensor in a chunk that holds both ends of the model, and two copies otherwise. With
    multi-token prediction, a copy of the embedding then also serves as output layer, and the output layer's own weight
    stays allocated but unused (`core/models/gpt/gpt_model.py`, skip_weight_param_allocation).
    """
    model = case.model
    vocabulary = _vocabulary_elements(case, tp)
    ends: list[tuple[Weight, int]] = []
    if chunk.embedding or chunk.mtp_layers:
        words, *positions = embedding_tensors(model)
        ends += [(words, vocabulary), *((tensor, tensor.elements) for tensor in positions)]
    final_norm, *output = head_tensors(model)
    if chunk.final_norm:
        ends.append((final_norm, final_norm.elements))
    if chunk.head:
        if output:
            ends.append((output[0], head_elements(case, tp)))
        elif not chunk.embedding:
            table = embedding_tensors(model)[0]
            ends.append((Weight("output_layer (copy of the embedding)", table.elements, table.split), vocabulary))
    return ends


def stage_parameters(case: Case, layout: Layout, rank: int) -> RankParameters:
    """Return the elements on one rank of a pipeline stage: trainable dense, trainable expert, frozen."""
    split = layout.degrees
    return _stage_parameters(case, stages_of(case.model, case.job, layout)[rank], rank, split.tp, split.ep, split.etp)


@lru_cache(maxsize=1 << 12)
def _stage_parameters(case: Case, chunks: tuple[Chunk, ...], rank: int, tp: int, ep: int, etp: int) -> RankParameters:
    model, job = case.model, case.job
    language, adapters = RankParameters(), adapters_of(job)
    for chunk in chunks:
        language += chunk_parameters(case, chunk, tp, ep, etp)
    if not job.trains_language_weights:
        language = RankParameters(frozen=language.total)
    if adapters:
        for chunk in chunks:
            language += _chunk_adapters(model, chunk, adapters, tp, ep, etp)
    if model.vision and rank == 0:
        for elements, frozen in (
            (model.vision.encoder_parameters, job.freeze_vision_tower),
            (model.vision.projector_parameters, job.freeze_multi_modal_projector),
            # mcore_adapter freezes by name prefix and misses vision_model.deepstack_merger_list; adapters freeze
            # everything that they are not attached to.
            (model.vision.deepstack_parameters, adapters is not None),
        ):
            language += RankParameters(frozen=elements) if frozen else RankParameters(dense=elements)
    return language


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageStates:
    """What one pipeline stage holds regardless of micro-batch, recompute mode and offload."""

    rank: int
    chunks: tuple[Chunk, ...]
    parameters: RankParameters
    shard_elements: float
    """Elements whose optimizer states are on this rank."""
    vocabulary: int
    """Elements of the embedding on one rank, its part of the padded vocabulary."""
    dummy_bytes: float
    """Bytes of Transformer Engine's dummy weight gradients: one bf16 buffer per distinct weight shape of the stage."""
    gradient_bytes: float
    """Bytes of the largest weight gradient, which exists for a moment of backward: before it is added to the gradient
    buffer or, if the GEMM accumulates into the buffer itself (gradient_accumulation_fusion), as a dummy of its shape
    that is not kept. 0 if dummies are kept."""
    parts_bytes: Mapping[str, float]
    """Bytes by purpose: weights, gradients, optimizer (with nothing offloaded), workspace, and DPO's reference
    model."""


def stage_states(case: Case, layout: Layout, ranks: Iterable[int]) -> tuple[StageStates, ...]:
    """Return the states of the given pipeline ranks.

    Layouts that differ only in micro-batch, recompute mode or offload share them.
    """
    model, job = case.model, case.job
    stages, vocabulary = stages_of(model, job, layout), _vocabulary_elements(case, layout.tp)
    return tuple(_stage_states(case, layout, rank, stages[rank], vocabulary) for rank in ranks)


def _stage_states(case: Case, layout: Layout, rank: int, chunks: tuple[Chunk, ...], vocabulary: int) -> StageStates:
    model, job, profile = case.model, case.job, case.profile
    parameters = stage_parameters(case, layout, rank)
    dense_shards, expert_shards = layout.optimizer_shards
    shard = shard_of(case, layout)
    layers = {id(layer): layer for chunk in chunks for layer, _ in chunk_layers(model, chunk)}.values()
    weights = float(BF16 * parameters.total)
    if shard.is_low_precision:
        # Rowwise and columnwise quantized copies of the layers' weights are cached across the micro-batches of a step.
        weights += quantised_element_bytes(layout, shard) * layer_elements(model, chunks, layout)
    workspaces = 1 + (GROUPED_GEMM_STREAMS if any(isinstance(layer.ffn, Moe) for layer in layers) else 0)
    shard_elements = parameters.dense / dense_shards + parameters.expert / expert_shards
    trainable = parameters.dense + parameters.expert
    of_torch = DETERMINISTIC_WORKSPACE if layout.deterministic_mode else profile.cublas_workspace_bytes
    parts = {
        "weights": weights,
        "gradients": float((FP32 if layout.grad_reduce_in_fp32 else BF16) * trainable),
        **optimizer_parts(job, changed(layout, optimizer_offload_fraction=0.0), parameters, shard_elements),
        "workspace": float(BLAS_THREADS * of_torch + workspaces * profile.te_workspace_bytes),
    }
    if job.keeps_reference:
        # A second model in bf16, forward only (mcore_adapter `trainer/dpo_trainer.py`, ref_model; ms-swift
        # `megatron/trainers/rlhf_mixin.py`, ref_models).
        parts["reference model"] = float(BF16 * parameters.total)
    shapes = {shape for layer in layers for shape in layer_activations(model, layer, shard).weight_shapes}
    sizes = [rows * columns for rows, columns in shapes]
    head = [head_elements(case, layout.tp)] if shard.adapters is None and any(chunk.head for chunk in chunks) else []
    is_fused = layout.switches.gradient_accumulation_fusion
    keeps_dummies = is_fused and case.cluster.may_run("transformer-engine", KEEPS_DUMMIES)
    keeps_head = case.cluster.may_run("megatron-core", KEEPS_OUTPUT_DUMMY)
    return StageStates(
        rank=rank,
        chunks=chunks,
        parameters=parameters,
        shard_elements=shard_elements,
        vocabulary=vocabulary,
        dummy_bytes=BF16 * sum(sizes + head if keeps_head else sizes) if keeps_dummies else 0,
        gradient_bytes=0 if keeps_dummies else BF16 * max(sizes + head, default=0),
        parts_bytes=parts,
    )


def optimizer_parts(job: Job, layout: Layout, parameters: RankParameters, shard_elements: float) -> dict[str, float]:
    """Return the bytes of optimizer states on the card, and of the copies that partial offload leaves there.

    The hybrid optimizer is constructed twice: first over all weights of the rank, then over the rank's shard. The first
    one is in a reference cycle, and nothing in the trainers triggers the garbage collection that would free its fp32
    copies.
    """
    parts = {"optimizer": shard_elements * optimizer_element_bytes(job, layout)}
    offloaded = layout.optimizer_offload_fraction
    if 0.0 < offloaded < 1.0:
        parts["copies for offload"] = FP32 * (parameters.dense + parameters.expert) * (1.0 - offloaded)
    return parts


def optimizer_element_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes on the card per element of this rank's optimizer shard."""
    offloaded = layout.optimizer_offload_fraction
    adam = sum(adam_state_bytes(job, layout))
    # Offloading copies the fp32 weights, so the originals stay, unless the fp32 weights are the optimizer's own
    # (`core/optimizer/distrib_optimizer.py::_build_model_and_main_param_groups`).
    left_behind = 0 if layout.precision_aware_optimizer else FP32 * offloaded
    return adam * (1.0 - offloaded) + left_behind


def keeps_own_weights(job: Job, layout: Layout) -> bool:
    """Return whether Transformer Engine's Adam keeps the main weights itself and takes gradients as they are.

    Otherwise Megatron keeps them. megatron-core `optimizer/optimizer_config.py`,
    use_precision_aware_optimizer_no_fp8_or_ds_fp8, with any fp8 recipe except the delayed one.
    """
    is_low = job.precision not in ("bf16", "fp16") and layout.main_params_dtype == "fp32"
    return layout.precision_aware_optimizer and not is_low


def adam_state_bytes(job: Job, layout: Layout) -> tuple[int, int, int]:
    """Return the bytes per element of the main weight, of the first moment and of the second moment."""
    weight = DTYPE_BYTES[layout.main_params_dtype]
    # Remainders require that the bf16 weight is the one trained, and that the whole optimizer is TE's.
    if layout.precision_aware_optimizer and job.precision == "bf16" and not layout.optimizer_offload_fraction:
        weight = min(weight, REMAINDER_BYTES)
    return weight, DTYPE_BYTES[layout.exp_avg_dtype], DTYPE_BYTES[layout.exp_avg_sq_dtype]


def states_in_copies(layout: Layout) -> tuple[int, ...]:
    """Return the bytes per element of each state that a step works on in an fp32 copy.

    These are the states that are not fp32, except two bf16 moments. Transformer Engine 2.8
    `optimizers/fused_adam.py::FusedAdam.step` (unscaled_lists, fuse_unscale).
    """
    moments = (layout.exp_avg_dtype, layout.exp_avg_sq_dtype)
    kept = (layout.main_params_dtype, *(() if moments == ("bf16", "bf16") else moments))
    return tuple(DTYPE_BYTES[dtype] for dtype in kept if dtype != "fp32")


def resident_parts(job: Job, layout: Layout, states: StageStates) -> dict[str, float]:
    """Return the bytes that a stage holds during the whole step, by purpose, with the layout's share of offload."""
    if not layout.states.optimizer_offload_fraction:
        return dict(states.parts_bytes)
    return {**states.parts_bytes, **optimizer_parts(job, layout, states.parameters, states.shard_elements)}


def host_optimizer_parts(layout: Layout, states: StageStates) -> dict[str, float]:
    """Return the host memory of one rank's offloaded states, and of the fp32 copies described in `optimizer_parts`."""
    offloaded, trainable = layout.optimizer_offload_fraction, states.parameters.dense + states.parameters.expert
    return {
        "fp32 weights, moments and gradients": HOST_ADAM_BYTES * states.shard_elements * offloaded,
        "fp32 copies of the weights": FP32 * trainable * offloaded,
    }


def quantised_element_bytes(layout: Layout, shard: Shard) -> float:
    """Return the bytes per element that a weight's two quantized copies add, net of the bf16 copy they replace.

    The copies are rowwise and columnwise; they replace the bf16 weight with `fp8_param`.
    """
    return 2 * QUANTISED_BYTES[shard.precision] - (BF16 if layout.fp8_param else 0)


def layer_elements(model: Model, chunks: tuple[Chunk, ...], layout: Layout) -> int:
    """Return the elements of the transformer layers on one rank, without embedding and output layer."""
    return sum(
        layer_parameters(model, layer, layout.tp, layout.ep, layout.etp).total * count
        for chunk in chunks
        for layer, count in chunk_layers(model, chunk)
    )
