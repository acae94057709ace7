"""Memory of every pipeline stage: what stays for the whole step, activations in flight, and the worst moment."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter, mul
from typing import NamedTuple

from topoplan.engines.megatron.communicators import communicators_bytes
from topoplan.engines.megatron.moments import Kept, chunk_kept_bytes, kept_of, stage_moments
from topoplan.engines.megatron.pipeline import in_flight, most_in_flight
from topoplan.engines.megatron.states import (
    StageStates,
    distinct_ranks,
    host_optimizer_parts,
    resident_parts,
    stage_states,
)
from topoplan.engines.prediction import Memory, Moment, StageMemory, margin_bytes, parts_beyond
from topoplan.layout.layout import Layout, Recompute, changed
from topoplan.layout.stages import Chunk
from topoplan.operators.shard import Shard, shard_of
from topoplan.operators.user_buffers import user_buffer_bytes
from topoplan.operators.vision import vision_kept_bytes
from topoplan.specs.case import Case
from topoplan.specs.facts import facts_of
from topoplan.specs.gpu_profile import band_keys


def _activations_in_flight(layout: Layout, rank: int, kept: list[float], tower: float) -> tuple[float, float]:
    """Return (bytes of layer activations, bytes of vision activations) at the fullest moment of the schedule.

    `kept` has the bytes that one micro-batch leaves in each model chunk; those of the vision tower come with the first
    chunk.
    """
    pp, vpp, microbatches = layout.degrees.pp, layout.degrees.vpp, layout.step.gradient_accumulation_steps
    if not tower and min(kept) == max(kept):
        return most_in_flight(pp, vpp, rank, microbatches) * kept[0], 0.0
    held = fullest_moment(layout, rank, kept, tower)
    return sum(map(mul, held, kept)), held[0] * tower


def fullest_moment(layout: Layout, rank: int, kept: Sequence[float], tower: float) -> tuple[int, ...]:
    """Return the micro-batches of each model chunk that a stage holds when its activations are largest.

    Sums are rounded to whole bytes, so that of equal moments the first one wins independently of rounding errors.
    """
    return max(
        in_flight(layout.degrees.pp, layout.degrees.vpp, rank, layout.step.gradient_accumulation_steps),
        key=lambda held: round(sum(map(mul, held, kept)) + held[0] * tower),
    )


class TransientMemory(NamedTuple):
    """What a stage holds during a part of the step only; it does not depend on where the optimizer states are."""

    activations_bytes: float
    vision_bytes: float
    moments: tuple[Moment, ...]
    peak: tuple[str, float]
    """Name and bytes of the largest of `moments`."""

    @property
    def total_bytes(self) -> float:
        """Everything that comes and goes, at the fullest moment."""
        return self.activations_bytes + self.vision_bytes + self.peak[1]


TransientMemories = dict[tuple[int, tuple[Chunk, ...], Recompute], TransientMemory]
"""By stage, the stage's chunks and recompute mode, for layouts that otherwise differ only in offload."""


def transient_memory(case: Case, layout: Layout, states: StageStates, shard: Shard, kept: Kept) -> TransientMemory:
    """Return the activations in flight and the peak candidates of a pipeline stage.

    `shard` and `kept` are those of the layout.
    """
    chunks_kept = [chunk_kept_bytes(case.model, chunk, shard, layout.recompute, kept) for chunk in states.chunks]
    tower = vision_kept_bytes(case, layout) if states.rank == 0 else 0.0
    activations, vision = _activations_in_flight(layout, states.rank, chunks_kept, tower)
    moments = stage_moments(case, layout, shard, states, kept, chunks_kept, activations + vision)
    totals = [(moment.name, moment.total_bytes) for moment in moments]
    return TransientMemory(
        activations_bytes=activations,
        vision_bytes=vision,
        moments=tuple(moments),
        peak=max(totals, key=itemgetter(1)),
    )


def stage_memory(
    case: Case, layout: Layout, states: StageStates, held: TransientMemory, *, with_moments: bool
) -> StageMemory:
    """Return the peak memory of one pipeline stage.

    It is the sum of what stays for the whole step, activations in flight, and the worst peak candidate.
    """
    parts = resident_parts(case.job, layout, states)
    parts["activations"] = held.activations_bytes
    if held.vision_bytes:
        parts["vision activations"] = held.vision_bytes
    name, peak_bytes = held.peak
    parts[f"peak ({name})"] = peak_bytes
    parts |= parts_beyond(case.profile, held.total_bytes)
    return StageMemory(
        stage=states.rank,
        allocated_bytes=sum(parts.values()),
        parts_bytes=parts,
        host_bytes=sum(host_optimizer_parts(layout, states).values())
        if layout.states.optimizer_offload_fraction
        else 0.0,
        moments=held.moments if with_moments else (),
    )


class ShapeStates(NamedTuple):
    """What layouts that differ only in micro-batch, recompute mode or offload share."""

    stages: tuple[StageStates, ...]
    fragmentation: float
    """Memory that torch's allocator cannot give back beyond live tensors, as a fraction of them."""
    gaps: float
    """Memory that it holds beyond live tensors while the card has room, as a fraction of those that come and go: what
    stays is never freed and leaves no gaps."""
    band: float
    """Half width of the error band of memory, as a fraction."""
    non_torch_bytes: tuple[float, float]
    """Bytes of the CUDA context and NCCL's buffers, which torch does not see: (without, with) sequence parallelism."""


def shape_states(case: Case, layout: Layout, *, all_stages: bool = False) -> ShapeStates:
    """Return the states of a layout: of every pipeline stage, or only of the stages that can need the most."""
    profile, is_moe = case.profile, facts_of(case.model).is_moe
    ranks = range(layout.pp) if all_stages else distinct_ranks(case, layout)
    without, with_it = (
        profile.context_bytes + communicators_bytes(case, changed(layout, sequence_parallel=switch))
        for switch in (False, True)
    )
    return ShapeStates(
        stages=stage_states(case, layout, ranks),
        fragmentation=profile.irregular_fragmentation if is_moe or layout.pp > 1 else profile.fragmentation,
        gaps=profile.expert_gaps if is_moe else profile.transient_gaps,
        band=getattr(profile, band_keys(case.model, case.job)[0]),
        non_torch_bytes=(without, with_it),
    )


def resident_excess_bytes(case: Case, layout: Layout, states: ShapeStates) -> float:
    """Return a lower bound of the excess over the card for all layouts with these states and this offload.

    The bound leaves out activations and transients.
    """
    cluster, job = case.cluster, case.job
    allocated = max(sum(resident_parts(job, layout, one).values()) for one in states.stages)
    _, device, margin = _on_card(case, states, min(states.non_torch_bytes), allocated)
    return device + margin - cluster.gpu.memory_bytes


def _on_card(
    case: Case, states: ShapeStates, non_torch_bytes: float, allocated_bytes: float
) -> tuple[float, float, float]:
    """Return (reserved bytes, device bytes, margin in bytes) for some allocated bytes."""
    reserved = allocated_bytes * (1.0 + states.fragmentation)
    device = reserved + non_torch_bytes
    return reserved, device, margin_bytes(case, device * states.band)


def predict_memory(
    case: Case,
    layout: Layout,
    *,
    all_stages: bool = False,
    states: ShapeStates | None = None,
    shard: Shard | None = None,
    known: TransientMemories | None = None,
    until_over: bool = False,
) -> Memory:
    """Return the memory of the worst GPU of a layout.

    - `all_stages`: list every pipeline stage with its peak candidates; otherwise only the stages that can be the worst.
    - `states`, `shard`: the layout's own, if known from a layout that shares them.
    - `known`: temporary memory of stages, reused if present and extended if not.
    - `until_over`: stop at the first stage that exceeds the card; the figures are then lower bounds.
    """
    model, cluster = case.model, case.cluster
    if states is None:
        states = shape_states(case, layout, all_stages=all_stages)
    shard, known = shard or shard_of(case, layout), {} if known is None else known
    kept: Kept | None = None
    stages: list[StageMemory] = []
    non_torch, allocated = states.non_torch_bytes[layout.sequence_parallel], 0.0
    non_torch += user_buffer_bytes(shard, model.hidden_size)
    reserved = device = margin = loose = 0.0
    for one in states.stages:
        key = one.rank, one.chunks, layout.recompute
        if (held := known.get(key)) is None:
            kept = kept or kept_of(model, case.job.mtp_num_layers, shard, layout.recompute)
            held = known[key] = transient_memory(case, layout, one, shard, kept)
        stages.append(stage_memory(case, layout, one, held, with_moments=all_stages))
        loose = max(loose, stages[-1].allocated_bytes + states.gaps * held.total_bytes)
        if stages[-1].allocated_bytes > allocated:
            allocated = stages[-1].allocated_bytes
            reserved, device, margin = _on_card(case, states, non_torch, allocated)
            if until_over and device + margin > cluster.gpu.memory_bytes:
                break
    return Memory(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=device,
        capacity_bytes=cluster.gpu.memory_bytes,
        band=states.band,
        margin_bytes=margin,
        host_bytes=max(stage.host_bytes for stage in stages) * cluster.gpus_per_node,
        host_capacity_bytes=cluster.host_memory_bytes,
        gaps_bytes=max(0.0, loose - reserved),
        by_stage=tuple(stages),
    )
