"""What an engine predicts of a layout: the memory of its worst GPU with the moments of each stage, and its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from topoplan.specs.cluster import Cluster

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
    band: float
    """Half width of the error band around device_bytes, as a fraction of it; that of the other figures is as wide."""
    margin_bytes: float
    """What must stay free on the card for `fits`: the band, unless the spec says otherwise."""
    host_bytes: float
    """Pinned host memory per node."""
    host_capacity_bytes: float | None = None
    """Host memory of a node; None when the spec does not say."""
    by_stage: tuple[StageMemory, ...]

    @property
    def band_bytes(self) -> tuple[float, float]:
        """Interval that the memory of the card is expected in."""
        return around(self.device_bytes, self.band)

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


def around(value: float, band: float) -> tuple[float, float]:
    """The interval of a half width that is a fraction of the value in its middle."""
    return value * (1.0 - band), value * (1.0 + band)


def stated_margin_bytes(cluster: Cluster, usual_bytes: float) -> float:
    """The spec's share of the card, or the usual margin where it says nothing."""
    return usual_bytes if cluster.margin is None else cluster.margin * cluster.gpu.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """One optimizer step."""

    step_s: float
    band_s: tuple[float, float]
    """Interval that the step time is expected in."""
    parts_s: Mapping[str, float]
    """What the step is spent on; adds up to step_s."""
