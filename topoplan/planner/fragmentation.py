"""What the memory peaks of runs teach: tensors beyond the prediction, and what torch's allocator holds beyond tensors.

A run that ended out of memory gives a lower bound of its live tensors. Where that is more than predicted, tensors that
come and go in a step are counted higher (`tensors_beyond`) until the bound holds. The allocator's share is learnt from
what it held besides, because its settings change that part only.

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
    """Of a run out of memory, with what it could not allocate any more; so is `allocated_bytes`."""
    stage: int | None = None
    """The pipeline stage that was logged; None for the fullest."""
    at_least: bool = False
    """Whether the run ended out of memory, so that it needed at least this much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Learned constants and bands, and how far the runs were off."""

    constants: Mapping[str, float]
    bands: Mapping[str, float]
    off: tuple[float | None, ...]
    """For each run, predicted over logged reserved memory minus one; None if reserved memory was not logged."""


def learn(runs: Sequence[Peaks]) -> Learnt:
    """Return the constants that agree best with all runs."""
    constants = _tensors_beyond(runs)
    bands: dict[str, float] = {}
    # The allocator's share of a run out of memory is what its tensors, counted higher, do not explain.
    told = [replace(run, spec=with_constants(run.spec, constants)) if run.at_least else run for run in runs]
    said = [(run, _share_of(run)) for run in told if run.allocated_bytes or run.reserved_bytes]
    for key in {key: None for _, key in said if key}:
        shares, bands_of = _learn_one(key, [run for run, share in said if share == key])
        constants |= shares
        for band, width in bands_of.items():
            bands[band] = max(width, bands.get(band, 0.0))
    off = (predicted_bytes(run)[1] / run.reserved_bytes - 1.0 if run.reserved_bytes else None for run in runs)
    return Learnt(constants=constants, bands=bands, off=tuple(off))


def _tensors_beyond(runs: Sequence[Peaks]) -> dict[str, float]:
    """Return the least `tensors_beyond` with which the tensors of every run out of memory are predicted, if any."""
    most = 0.0
    for run in runs:
        if run.at_least and run.allocated_bytes:
            share = profile_of(run.spec.cluster.gpu, run.spec.profile).tensors_beyond
            once, twice = (
                _stages_bytes(replace(run, spec=with_constants(run.spec, {"tensors_beyond": one})))
                for one in (0.0, 1.0)
            )
            # A stage needs what stays and, times one plus the share, what comes and goes: the second is the difference.
            rows = zip(once, twice, strict=True)
            needed = min(((run.allocated_bytes - one) / (two - one) for one, two in rows if two > one), default=0.0)
            most = max(most, needed if needed > share else 0.0)
    return {"tensors_beyond": most} if most else {}


def _stages_bytes(run: Peaks) -> list[float]:
    """Return the predicted live tensors of the stage that was logged, or of all."""
    memory = memory_of(case_of(run.spec, run.layout.backend), run.layout, all_stages=True)
    return [one.allocated_bytes for one in memory.by_stage if run.stage in (None, one.stage)]


def _learn_one(key: str, runs: Sequence[Peaks]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the share named `key` and the bands, each only if the runs say something about it."""
    runs = sorted(runs, key=lambda one: one.at_least)
    base = profile_of(runs[0].spec.cluster.gpu, runs[0].spec.profile)
    keys = [engine_of(run.layout.backend).bands(case_of(run.spec, run.layout.backend))[0] for run in runs]
    half = max(getattr(base, band) / AT_90_PERCENT for band in keys) ** 2 / 2.0
    share: float = getattr(base, key)
    moved, weight, left, counted = 0.0, 1.0 / _UNKNOWN**2, 0.0, sum(not one.at_least for one in runs)
    for run in runs:
        allocated, reserved = predicted_bytes(run)
        tensors = math.log(run.allocated_bytes / allocated) if run.allocated_bytes else None
        held = math.log(run.reserved_bytes / reserved) if run.reserved_bytes else None
        if run.at_least:
            # Whatever made the allocator hold more, the next prediction of this plan has to reflect it.
            moved = max(moved, held or 0.0)
            continue
        left += tensors**2 if tensors is not None else half
        if held is None:
            continue
        error = half if tensors is None else _OWN**2
        gain = (1.0 / error) / (weight + 1.0 / error)
        moved += gain * (held - (tensors or 0.0) - moved)
        weight += 1.0 / error
    learnt = {key: max(0.0, (1.0 + share) * math.exp(moved) - 1.0)} if counted or moved else {}
    if not counted:  # A lower bound does not say how far predictions are off.
        return learnt, {}
    own = (_FREEDOM * half + left) / (_FREEDOM + counted)
    width = math.expm1(AT_90_PERCENT * math.sqrt(1.0 / weight + own))
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
