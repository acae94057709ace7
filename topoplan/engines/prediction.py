"""What an engine predicts of a layout: memory of the worst GPU, peak candidates of each stage, and the step time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from topoplan.specs.case import Case
from topoplan.specs.gpu_profile import Profile

FREED = "activations freed by then"
"""Name of the negative term of a moment: activations that it no longer holds."""
BEYOND = "beyond the prediction"
"""Name of the part that a calibrated profile adds: tensors that a run out of memory needed and no formula explains."""


class Moment(NamedTuple):
    """A point in the step at which a stage may reach its peak memory."""

    name: str
    """Name of the moment, such as backward, loss, embedding gradient, optimizer step or checkpoint."""
    terms_bytes: tuple[tuple[str, float], ...]
    """What is alive then in addition to weights, gradients, optimizer states, workspace and all activations in flight,
    by name; negative for activations that are freed by then."""

    @property
    def total_bytes(self) -> float:
        """Sum of all terms."""
        return sum([size for _, size in self.terms_bytes])


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Peak memory of one pipeline stage."""

    stage: int
    allocated_bytes: float
    parts_bytes: Mapping[str, float]
    """By purpose: weights, gradients, optimizer, activations, ... The parts add up to allocated_bytes."""
    host_bytes: float = 0.0
    """Pinned host memory of one rank."""
    moments: tuple[Moment, ...] = field(default=(), compare=False)
    """All peak candidates, if they were asked for; the largest of them is in `parts_bytes` as `peak (NAME)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of the worst GPU."""

    allocated_bytes: float
    """Peak of live tensors (torch.cuda.max_memory_allocated)."""
    reserved_bytes: float
    """Peak of what torch's caching allocator needs; torch.cuda.max_memory_reserved is up to gaps_bytes more."""
    device_bytes: float
    """What nvidia-smi shows at least: reserved memory plus the CUDA context and NCCL's buffers."""
    capacity_bytes: float
    """Memory of the card."""
    band: float
    """Half width of the error band around device_bytes, as a fraction of it; the band of the other figures is as
    wide."""
    margin_bytes: float
    """What must stay free on the card for `fits`: the error band and what the driver keeps, unless the spec states a
    margin."""
    host_bytes: float
    """Pinned host memory per node."""
    host_capacity_bytes: float | None = None
    """Host memory of a node; None if the spec does not say."""
    gaps_bytes: float = 0.0
    """What torch's allocator may hold beyond reserved_bytes while the card has room; it gives that back when memory
    runs out."""
    by_stage: tuple[StageMemory, ...]

    @property
    def band_bytes(self) -> tuple[float, float]:
        """Interval in which the device memory that the run needs is expected."""
        return band_interval(self.device_bytes, self.band)

    @property
    def with_gaps_bytes(self) -> float:
        """What nvidia-smi shows with the gaps that the card has room for."""
        return max(self.device_bytes, min(self.device_bytes + self.gaps_bytes, self.capacity_bytes))

    @property
    def shown_bytes(self) -> tuple[float, float]:
        """Interval in which what nvidia-smi shows is expected: `band_bytes`, or up to `with_gaps_bytes`."""
        least, most = self.band_bytes
        return least, max(most, self.with_gaps_bytes)

    @property
    def reserved_band(self) -> float:
        """How much more than `reserved_bytes` torch may reserve, as a fraction: the band, or gaps if they are more."""
        return max(self.band, self.gaps_bytes / self.reserved_bytes)

    @property
    def excess_bytes(self) -> float:
        """By how much device memory plus margin exceeds the card; negative if they are within it."""
        return self.device_bytes + self.margin_bytes - self.capacity_bytes

    @property
    def excess_without_optimizer_bytes(self) -> float:
        """A lower bound of the excess over the card if all optimizer states were kept elsewhere."""
        allocated = max(stage.allocated_bytes - stage.parts_bytes["optimizer"] for stage in self.by_stage)
        device = self.device_bytes - (self.allocated_bytes - allocated) * self.reserved_bytes / self.allocated_bytes
        return device + self.margin_bytes * min(1.0, device / self.device_bytes) - self.capacity_bytes

    @property
    def host_excess_bytes(self) -> float:
        """By how much offloaded memory exceeds the host memory of a node; 0 if within it or unknown."""
        return 0.0 if self.host_capacity_bytes is None else max(0.0, self.host_bytes - self.host_capacity_bytes)

    @property
    def fits(self) -> bool:
        """Whether device memory plus margin is within the card, and offloaded memory within the host's."""
        return self.excess_bytes <= 0.0 and not self.host_excess_bytes


def band_interval(value: float, band: float) -> tuple[float, float]:
    """Return the interval around `value` whose half width is the fraction `band` of it."""
    return value * (1.0 - band), value * (1.0 + band)


def parts_beyond(profile: Profile, passing_bytes: float) -> Mapping[str, float]:
    """Return the part that a run out of memory showed to be missing; `passing_bytes` is what comes and goes in a step.

    It is a share of what comes and goes, because weights and states are known to the byte, and what a user's data or
    trainer adds (longer samples, another loss) grows with the micro-batch and shrinks with recomputation.
    """
    return {BEYOND: profile.tensors_beyond * passing_bytes} if profile.tensors_beyond else {}


def margin_bytes(case: Case, band_bytes: float) -> float:
    """Return what `fits` leaves free: the spec's share of the card, or the error band and what the driver keeps."""
    if case.cluster.margin is None:
        return band_bytes + case.profile.driver_bytes
    return case.cluster.margin * case.cluster.gpu.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Predicted time of one optimizer step."""

    step_s: float
    band_s: tuple[float, float]
    """Interval in which the step time is expected."""
    parts_s: Mapping[str, float]
    """What the step is spent on; the parts add up to step_s."""
