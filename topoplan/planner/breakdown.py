"""Where each byte of a plan goes: the terms that `engines/megatron/memory.py` adds up, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from topoplan.engines.megatron.communicators import communicators
from topoplan.engines.megatron.memory import fragmentation, fullest_moment, vision_kept_bytes
from topoplan.engines.megatron.moments import chunk_kept_bytes, kept_of
from topoplan.engines.megatron.states import chunk_layers, end_tensors, stage_parameters
from topoplan.layout.layout import stages_of
from topoplan.layout.stages import Chunk
from topoplan.network.communicators import Communicator
from topoplan.operators.adapters import adapter_tensors
from topoplan.operators.params import RankParameters, cut, layer_tensors
from topoplan.operators.shard import shard_of
from topoplan.operators.te_activations import kept_activations, layer_activations
from topoplan.planner.case import case_of
from topoplan.planner.plan import Plan, StageMemory
from topoplan.specs.gpu_profile import profile_notes
from topoplan.specs.model import Layer, Model
from topoplan.specs.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRow:
    """One tensor that a layer saves for its backward pass."""

    name: str
    saved_bytes: float
    """Of one micro batch, on one rank."""
    freed_by: tuple[str, ...]
    """Recompute modules that would free it; full recomputation frees all."""
    kept: bool
    """In this plan, on the layers that are recomputed as its mode says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRow:
    """One weight, of one layer or of the ends."""

    name: str
    elements: int
    """Of the whole model."""
    split: str
    """tp, expert, expert_replicated or replicated."""
    rank_elements: int
    """On one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRows:
    """One kind of layer of the worst stage."""

    layer: Layer
    count: int
    """Layers of this kind on the stage."""
    saved: tuple[SavedRow, ...]
    saved_bytes: float
    """All of `saved` together."""
    kept_bytes: float
    """What a micro batch leaves in a layer from forward to backward, with the plan's recomputation."""
    peak_bytes: float
    """What the layer's own backward adds: what is recomputed, and gradients."""
    weights: tuple[WeightRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRow:
    """A model chunk of the worst stage; there is one without interleaving."""

    layers: int
    """Multi-token-prediction layers are among them."""
    kept_bytes: float
    """What a micro batch leaves in the chunk."""
    in_flight: int
    """Micro batches that it holds when activations are at their most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """Pipeline stages that need the same."""

    stages: tuple[int, ...]
    layers: int
    """Multi-token-prediction layers are among them."""
    in_flight: tuple[int, ...]
    """Micro batches that each model chunk holds when activations are at their most."""
    memory: StageMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The memory of a plan, term by term."""

    stages: tuple[StageRow, ...]
    worst: int
    """The stage that needs most; what follows is of it."""
    chunks: tuple[ChunkRow, ...]
    vision_kept_bytes: float
    """What a micro batch leaves in the vision tower."""
    layers: tuple[LayerRows, ...]
    ends: tuple[WeightRow, ...]
    """Weights of the embedding, the output layer and the vision tower, where the stage has them."""
    parameters: RankParameters
    """All weights on one rank."""
    dense_shards: int
    """Ranks that share the optimizer state of dense weights."""
    expert_shards: int
    """Ranks that share the optimizer state of an expert."""
    fragmentation: float
    """What the allocator holds beyond live tensors, as a share of them."""
    context_bytes: int
    communicators: tuple[Communicator, ...]
    """NCCL communicators of a rank."""
    margin_stated: bool
    """The margin is the user's; else it is the error band of the prediction."""
    notes: tuple[str, ...]
    """On the constants behind the plan: a file of the user's own, and bands that are borrowed."""


def breakdown(spec: Spec, plan: Plan) -> Breakdown:
    """The terms of `plan.memory`, which has to list every stage (`planner.predict.predict`)."""
    model, job, layout, memory = spec.model, spec.job, plan.layout, plan.memory
    case = case_of(spec, layout.backend)
    profile = case.profile
    worst = max(memory.by_stage, key=lambda stage: stage.allocated_bytes).stage
    all_chunks = stages_of(model, job, layout)
    shard = shard_of(case, layout)
    by_layer = kept_of(model, job.mtp_num_layers, shard, layout.recompute)

    def chunk_rows(rank: int) -> tuple[ChunkRow, ...]:
        kept = [chunk_kept_bytes(model, chunk, shard, layout.recompute, by_layer) for chunk in all_chunks[rank]]
        held = fullest_moment(layout, rank, kept, tower_bytes(rank))
        return tuple(
            ChunkRow(layers=chunk.num_layers + chunk.mtp_layers, kept_bytes=size, in_flight=count)
            for chunk, size, count in zip(all_chunks[rank], kept, held, strict=True)
        )

    def tower_bytes(rank: int) -> float:
        return vision_kept_bytes(case, layout) if rank == 0 else 0.0

    def layer_rows(layer: Layer, count: int) -> LayerRows:
        activations = layer_activations(model, layer, shard)
        kept = kept_activations(model, layer, shard, layout.recompute)
        full, modules = layout.recompute.granularity == "full", set(layout.recompute.modules)
        return LayerRows(
            layer=layer,
            count=count,
            saved=tuple(
                SavedRow(
                    name=tensor.name,
                    saved_bytes=tensor.saved_bytes,
                    freed_by=tensor.freed_by,
                    kept=not full and not modules & set(tensor.freed_by),
                )
                for tensor in activations.saved
            ),
            saved_bytes=activations.saved_bytes,
            kept_bytes=kept.kept_bytes,
            peak_bytes=kept.peak_bytes,
            weights=tuple(
                WeightRow(
                    name=tensor.name,
                    elements=tensor.elements,
                    split=tensor.split,
                    rank_elements=cut(tensor, layout.tp, layout.ep, layout.etp),
                )
                for tensor in (
                    *layer_tensors(model, layer),
                    *(adapter_tensors(model, layer, shard.adapters) if shard.adapters else ()),
                )
            ),
        )

    ends = [
        WeightRow(name=tensor.name, elements=tensor.elements, split=tensor.split, rank_elements=elements)
        for chunk in all_chunks[worst]
        for tensor, elements in end_tensors(case, chunk, layout.tp)
    ]
    if worst == 0:
        ends += _vision_rows(model)
    stages = [
        StageRow(
            stages=(stage.stage,),
            layers=sum(chunk.num_layers + chunk.mtp_layers for chunk in all_chunks[stage.stage]),
            in_flight=tuple(row.in_flight for row in chunk_rows(stage.stage)),
            memory=stage,
        )
        for stage in memory.by_stage
    ]
    return Breakdown(
        stages=_merged(stages),
        worst=worst,
        chunks=chunk_rows(worst),
        vision_kept_bytes=tower_bytes(worst),
        layers=tuple(layer_rows(layer, count) for layer, count in _layers_of(model, all_chunks[worst])),
        ends=tuple(ends),
        parameters=stage_parameters(case, layout, worst),
        dense_shards=layout.optimizer_shards[0],
        expert_shards=layout.optimizer_shards[1],
        fragmentation=fragmentation(case, layout),
        context_bytes=profile.context_bytes,
        communicators=communicators(case, layout),
        margin_stated=spec.cluster.margin is not None,
        notes=profile_notes(profile, spec.cluster.gpu, model, job),
    )


def _layers_of(model: Model, chunks: tuple[Chunk, ...]) -> list[tuple[Layer, int]]:
    """The distinct layers of a stage with their counts; equal layers are one kind."""
    kinds: dict[Layer, int] = {}
    for chunk in chunks:
        for layer, count in chunk_layers(model, chunk):
            kinds[layer] = kinds.get(layer, 0) + count
    return list(kinds.items())


def _vision_rows(model: Model) -> list[WeightRow]:
    tower = model.vision
    if tower is None:
        return []
    parts = (
        ("vision encoder", tower.encoder_parameters),
        ("vision projector", tower.projector_parameters),
        ("vision deepstack mergers", tower.deepstack_parameters),
    )
    return [WeightRow(name=name, elements=n, split="replicated", rank_elements=n) for name, n in parts if n]


def _merged(rows: list[StageRow]) -> tuple[StageRow, ...]:
    """Stages that follow each other and need the same, as one row."""
    runs = runs_of(rows, lambda row: (row.layers, row.in_flight, row.memory.parts_bytes))
    return tuple(replace(run[0], stages=tuple(stage for row in run for stage in row.stages)) for run in runs)


_Row = TypeVar("_Row")


def runs_of(rows: Iterable[_Row], sameness: Callable[[_Row], object]) -> list[list[_Row]]:
    """Rows that follow each other and are the same in what counts."""
    return [list(run) for _, run in groupby(rows, key=sameness)]
