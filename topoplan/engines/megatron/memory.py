"""Memory of every pipeline stage: what it holds all the step, activations in flight, and the worst of its moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from topoplan.engines.megatron.communicators import communicators_bytes
from topoplan.engines.megatron.moments import Kept, Moment, chunk_kept_bytes, kept_of, stage_moments
from topoplan.engines.megatron.pipeline import in_flight, most_in_flight
from topoplan.engines.megatron.states import (
    StageStates,
    distinct_ranks,
    host_optimizer_parts,
    resident_parts,
    stage_states,
)
from topoplan.layout.layout import Layout, changed
from topoplan.operators.shard import Shard, shard_of
from topoplan.operators.vision import patches_per_microbatch, vision_activation_bytes
from topoplan.specs.case import Case
from topoplan.specs.cluster import Cluster
from topoplan.specs.facts import facts_of
from topoplan.specs.gpu_profile import band_keys


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
    def host_excess_bytes(self) -> float:
        """By how much what is offloaded is over the host memory of a node; 0 where it is within, or not known."""
        return 0.0 if self.host_capacity_bytes is None else max(0.0, self.host_bytes - self.host_capacity_bytes)

    @property
    def fits(self) -> bool:
        """Device memory and margin are within the card, and what is offloaded is within the host's memory."""
        return self.excess_bytes <= 0.0 and not self.host_excess_bytes


def vision_kept_bytes(case: Case, layout: Layout) -> float:
    """What the vision tower keeps of a micro batch: nothing when it is frozen, whatever becomes of its projector."""
    model, job = case.model, case.job
    if model.vision is None or job.freeze_vision_tower:
        return 0.0
    patches = patches_per_microbatch(model.vision, job, layout)
    return vision_activation_bytes(model.vision, patches, recompute=layout.recompute.granularity == "full")


def _activations_in_flight(layout: Layout, rank: int, kept: list[float], tower: float) -> tuple[float, float]:
    """(activations of the layers, of the vision tower) at the fullest moment of the schedule.

    `kept` has what a micro batch leaves in each model chunk; the tower's come with the first chunk's.
    """
    pp, vpp, microbatches = layout.degrees.pp, layout.degrees.vpp, layout.step.gradient_accumulation_steps
    if not tower and min(kept) == max(kept):
        return most_in_flight(pp, vpp, rank, microbatches) * kept[0], 0.0
    held = fullest_moment(layout, rank, kept, tower)
    return sum(count * size for count, size in zip(held, kept, strict=True)), held[0] * tower


def fullest_moment(layout: Layout, rank: int, kept: Sequence[float], tower: float) -> tuple[int, ...]:
    """Micro batches of each model chunk that a stage holds when its activations are at their most."""
    return max(
        in_flight(layout.degrees.pp, layout.degrees.vpp, rank, layout.step.gradient_accumulation_steps),
        key=lambda held: sum(count * size for count, size in zip(held, kept, strict=True)) + held[0] * tower,
    )


def stage_memory(
    case: Case, layout: Layout, states: StageStates, shard: Shard, kept: Kept, *, with_moments: bool = False
) -> StageMemory:
    """Peak of one pipeline stage: what stays all the step, activations in flight, and the worst of its moments.

    `shard` and `kept` are those of the layout; `with_moments` hands out the moments too.
    """
    model, job = case.model, case.job
    chunks_kept = [chunk_kept_bytes(model, chunk, shard, layout.recompute, kept) for chunk in states.chunks]
    tower = vision_kept_bytes(case, layout) if states.rank == 0 else 0.0
    activations, vision = _activations_in_flight(layout, states.rank, chunks_kept, tower)
    moments = stage_moments(case, layout, shard, states, kept, chunks_kept, activations + vision)
    peak = max(moments, key=lambda moment: moment.total_bytes)
    parts = resident_parts(job, layout, states)
    parts["activations"] = activations
    if vision:
        parts["vision activations"] = vision
    parts[f"peak ({peak.name})"] = peak.total_bytes
    return StageMemory(
        stage=states.rank,
        allocated_bytes=sum(parts.values()),
        parts_bytes=parts,
        host_bytes=sum(host_optimizer_parts(layout, states).values()) if layout.optimizer_offload_fraction else 0.0,
        moments=tuple(moments) if with_moments else (),
    )


def fragmentation(case: Case, layout: Layout) -> float:
    """What torch's allocator holds beyond live tensors, as a share of them."""
    model, profile = case.model, case.profile
    irregular = layout.pp > 1 or facts_of(model).is_moe
    return profile.irregular_fragmentation if irregular else profile.fragmentation


def margin_bytes(case: Case, device_bytes: float) -> float:
    """What `fits` leaves free: the spec's share of the card, else the error band of the prediction."""
    model, cluster, job, profile = case.model, case.cluster, case.job, case.profile
    band: float = getattr(profile, band_keys(model, job)[0])
    return stated_margin_bytes(cluster, device_bytes * band)


def stated_margin_bytes(cluster: Cluster, usual_bytes: float) -> float:
    """The spec's share of the card, or the usual margin where it says nothing."""
    return usual_bytes if cluster.margin is None else cluster.margin * cluster.gpu.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShapeStates:
    """What layouts that differ in micro batch, recompute mode or offload share."""

    stages: tuple[StageStates, ...]
    fragmentation: float
    """What torch's allocator holds beyond live tensors, as a share of them."""
    beside_bytes: tuple[float, float]
    """The CUDA context and NCCL's buffers, which torch does not see: without and with sequence parallel."""


def shape_states(case: Case, layout: Layout, *, all_stages: bool = False) -> ShapeStates:
    """The states of a layout: of every pipeline stage, or only of those that can need most."""
    profile = case.profile
    ranks = range(layout.pp) if all_stages else distinct_ranks(case, layout)
    without, with_it = (
        profile.context_bytes + communicators_bytes(case, changed(layout, sequence_parallel=switch))
        for switch in (False, True)
    )
    return ShapeStates(
        stages=stage_states(case, layout, ranks),
        fragmentation=fragmentation(case, layout),
        beside_bytes=(without, with_it),
    )


def resident_excess_bytes(case: Case, layout: Layout, states: ShapeStates) -> float:
    """At least so much is over the card in every layout that shares these states and offloads as much.

    That is without activations and transients.
    """
    cluster, job = case.cluster, case.job
    allocated = max(sum(resident_parts(job, layout, one).values()) for one in states.stages)
    beside = min(states.beside_bytes)
    _, device, margin = _on_card(case, states.fragmentation, beside, allocated)
    return device + margin - cluster.gpu.memory_bytes


def _on_card(case: Case, fragments: float, beside_bytes: float, allocated_bytes: float) -> tuple[float, float, float]:
    """(reserved memory, device memory, margin) of allocated memory, in bytes."""
    reserved = allocated_bytes * (1.0 + fragments)
    device = reserved + beside_bytes
    return reserved, device, margin_bytes(case, device)


def predict_memory(
    case: Case, layout: Layout, *, all_stages: bool = False, states: ShapeStates | None = None, until_over: bool = False
) -> Memory:
    """Memory of the worst GPU of a layout.

    `all_stages` lists every pipeline stage, with its moments; without it only those that can be the worst. `states` are
    its `shape_states`, where they are known from a layout that shares them. `until_over` goes no further than the first
    stage that is over the card: the figures are then at least what the worst one needs.
    """
    model, cluster, job = case.model, case.cluster, case.job
    if states is None:
        states = shape_states(case, layout, all_stages=all_stages)
    shard = shard_of(case, layout)
    kept = kept_of(model, job.mtp_num_layers, shard, layout.recompute)
    stages: list[StageMemory] = []
    beside, allocated = states.beside_bytes[layout.sequence_parallel], 0.0
    reserved = device = margin = 0.0
    for one in states.stages:
        stages.append(stage_memory(case, layout, one, shard, kept, with_moments=all_stages))
        if stages[-1].allocated_bytes > allocated:
            allocated = stages[-1].allocated_bytes
            reserved, device, margin = _on_card(case, states.fragmentation, beside, allocated)
            if until_over and device + margin > cluster.gpu.memory_bytes:
                break
    return Memory(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=device,
        capacity_bytes=cluster.gpu.memory_bytes,
        margin_bytes=margin,
        host_bytes=max(stage.host_bytes for stage in stages) * cluster.gpus_per_node,
        host_capacity_bytes=cluster.host_memory_bytes,
        by_stage=tuple(stages),
    )
