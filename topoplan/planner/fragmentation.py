"""How much memory torch's allocator holds beyond live tensors, estimated from the peaks that runs have logged.

Reserved memory is predicted as live tensors times one plus a share. If both were logged, their ratio is measured, and
the share is nearly known. If only reserved memory was logged, a difference from the prediction is divided between live
tensors and one plus the share in proportion to their uncertainty: half of the variance of the profile's band for live
tensors, 5% for one plus the share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from topoplan.engines.registry import engine_of
from topoplan.layout.layout import Layout
from topoplan.planner.bands import NARROWEST
from topoplan.planner.calibrate import AT_90_PERCENT, with_constants
from topoplan.planner.predict import memory_of
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

SHARES = ("fragmentation", "irregular_fragmentation", "sharded_fragmentation", "expandable_fragmentation")
"""Names of the constants; which of them applies to a layout is found out from its prediction."""
_UNKNOWN = 0.05
"""Prior standard deviation of the logarithm of one plus a share."""
_OWN = 0.01
"""Standard deviation of that logarithm between layouts."""
_FREEDOM = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The memory peaks that a run logged."""

    spec: Spec
    layout: Layout
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    stage: int | None = None
    """The pipeline stage that was logged; None for the fullest."""
    at_least: bool = False
    """Whether the run ended out of memory, so that it needed at least this much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Learned shares and bands, and how far the runs were off."""

    constants: Mapping[str, float]
    bands: Mapping[str, float]
    off: tuple[float | None, ...]
    """For each run, predicted over logged reserved memory minus one; None if reserved memory was not logged."""


def learn(runs: Sequence[Peaks]) -> Learnt:
    """Return the shares that agree best with all runs."""
    constants: dict[str, float] = {}
    bands: dict[str, float] = {}
    said = [(run, _share_of(run)) for run in runs if run.allocated_bytes or run.reserved_bytes]
    for key in {key: None for _, key in said if key}:
        constants[key], bands_of = _learn_one(key, [run for run, share in said if share == key])
        for band, width in bands_of.items():
            bands[band] = max(width, bands.get(band, 0.0))
    off = (predicted_bytes(run)[1] / run.reserved_bytes - 1.0 if run.reserved_bytes else None for run in runs)
    return Learnt(constants=constants, bands=bands, off=tuple(off))


def _learn_one(key: str, runs: Sequence[Peaks]) -> tuple[float, dict[str, float]]:
    base = profile_of(runs[0].spec.cluster.gpu, runs[0].spec.profile)
    keys = [engine_of(run.layout.backend).bands(case_of(run.spec, run.layout.backend))[0] for run in runs]
    half = max(getattr(base, band) / AT_90_PERCENT for band in keys) ** 2 / 2.0
    share: float = getattr(base, key)
    moved, weight, left = 0.0, 1.0 / _UNKNOWN**2, 0.0
    for run in sorted(runs, key=lambda one: one.at_least):
        allocated, reserved = predicted_bytes(run)
        tensors = math.log(run.allocated_bytes / allocated) if run.allocated_bytes else None
        held = math.log(run.reserved_bytes / reserved) if run.reserved_bytes else None
        if run.at_least:
            # Whatever made the run need more, the next prediction of this plan has to reflect it.
            moved = max(moved, held or 0.0)
            continue
        left += tensors**2 if tensors is not None else half
        if held is None:
            continue
        error = half if tensors is None else _OWN**2
        gain = (1.0 / error) / (weight + 1.0 / error)
        moved += gain * (held - (tensors or 0.0) - moved)
        weight += 1.0 / error
    own = (_FREEDOM * half + left) / (_FREEDOM + len(runs))
    width = math.expm1(AT_90_PERCENT * math.sqrt(1.0 / weight + own))
    learnt = max(0.0, (1.0 + share) * math.exp(moved) - 1.0)
    return learnt, {band: max(width, NARROWEST[band]) for band in keys}


def predicted_bytes(run: Peaks) -> tuple[float, float]:
    """Return the predicted (allocated, reserved) bytes of the GPU that was logged."""
    memory = memory_of(case_of(run.spec, run.layout.backend), run.layout, all_stages=True)
    if run.stage is None:
        return memory.allocated_bytes, memory.reserved_bytes
    own = memory.by_stage[run.stage].allocated_bytes
    return own, own * memory.reserved_bytes / memory.allocated_bytes


def _share_of(run: Peaks) -> str | None:
    """Return the name of the share that the prediction of a run depends on, or None."""
    base = profile_of(run.spec.cluster.gpu, run.spec.profile)
    _, reserved = predicted_bytes(run)
    for key in SHARES:
        moved = with_constants(run.spec, {key: getattr(base, key) + 0.1})
        if predicted_bytes(replace(run, spec=moved))[1] != reserved:
            return key
    return None
