"""Predictions graded against measured runs."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import as_file, files
from itertools import combinations
from pathlib import Path

from topoplan.engines.registry import engine_of
from topoplan.errors import TopoplanError
from topoplan.operators.padding import tokens_per_step
from topoplan.planner.measured import MeasuredRun
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.specs.gpu_profile import entry_name
from topoplan.specs.load import spec_from_document
from topoplan.specs.profile import OwnProfile, read_profile
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.units import GIB

ALLOCATED, BY_STAGE, RESERVED, DEVICE = "allocated", "allocated, by stage", "reserved", "device"
THROUGHPUT = "throughput"
"""Kinds of figures; throughput is followed by the job's precision."""
APART = 0.03
"""Runs of a group whose measured throughput differs by less are considered equally fast; their order is not graded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure beside its prediction."""

    id: str
    """Id of the run."""
    family: str
    kind: str
    stage: int | None = None
    unit: str
    predicted: float
    measured: float
    entry: str = ""
    """Entry of `catalog/profiles.json` that the prediction is based on."""
    band: str = ""
    """Band of the entry that the figure grades; empty if it grades none."""
    half_width: float = 0.0
    """Half width of the predicted band around the figure, as a fraction."""
    gaps: float = 0.0
    """What torch's allocator may hold beyond the prediction while the card has room, in the figure's unit."""
    setup_key: str = ""
    """Figures with equal text here are of runs that, as far as their source says, differ in their layout only."""

    @property
    def is_speed(self) -> bool:
        """Whether the figure is a throughput, whose band is that of the step; otherwise it is a memory size."""
        return self.kind.startswith(THROUGHPUT)

    @property
    def error(self) -> float:
        """Predicted over measured minus one: positive if the prediction is too high."""
        return self.predicted / self.measured - 1.0

    @property
    def off_by(self) -> float:
        """How far the measurement is from the prediction, as a fraction of the prediction, which a band has to cover.

        A step is longer by the factor by which throughput was predicted too high; memory is larger if it was predicted
        too low, and with gaps of the allocator it is as predicted.
        """
        if self.is_speed:
            return abs(self.error)
        nearest = min(max(self.measured, self.predicted), self.predicted + self.gaps)
        return abs(self.measured / nearest - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Errors of the figures of one kind and one source."""

    family: str
    kind: str
    count: int
    median: float
    """Median of the absolute errors."""
    at_90_percent: float
    worst: float
    signed_median: float
    """Median of the signed errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingGrade:
    """How well the predicted order of layouts agrees with the measured order."""

    groups: int
    """Sets of runs that differ in their layout only."""
    pairs: int
    """Pairs of runs of a group whose measured throughput differs by more than 3%."""
    pairs_in_order: int
    mean_loss: float
    """Fraction of throughput lost by choosing the layout that is predicted to be fastest; mean over the groups."""
    worst_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitGrade:
    """One run that fit although it was predicted not to, or the other way round."""

    id: str
    family: str
    device_gib: float
    capacity_gib: float
    unstated: tuple[str, ...] = ()
    """Memory-saving settings that the source does not state; if there are any, the run may have saved more memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """Runs that completed or ran out of memory, against their predictions."""

    ran: int
    """Runs that completed and whose source states how they save memory."""
    ran_unstated: int
    """Runs that completed and whose source does not state it."""
    ran_but_over: tuple[FitGrade, ...]
    """Completed runs of both kinds that are predicted to exceed the card at margin 0."""
    out_of_memory: int
    out_of_memory_but_fit: tuple[FitGrade, ...]
    """Runs that ran out of memory and are predicted to fit at the default margin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Graded predictions of a set of measured runs."""

    figures: tuple[Figure, ...]
    spreads: tuple[Spread, ...]
    ranking: RankingGrade | None
    """None without two runs that can be ranked against each other."""
    fits: Fits
    runs: int
    """Runs that were predicted."""
    failed: Mapping[str, str]
    """Runs that could not be predicted: id -> error."""
    left_out: Mapping[str, int]
    """Rows of the sources that are not graded: reason -> count, most frequent first."""


def validate(runs: Sequence[MeasuredRun], *, base: Path | None = None, profile: OwnProfile | None = None) -> Validation:
    """Predict every run and grade what it measured.

    `base` is the directory that relative paths of models and machines start from. `profile` has constants for the runs
    on its GPU; other runs keep those of their machine, or of the catalog.
    """
    figures: list[Figure] = []
    failed: dict[str, str] = {}
    plans: list[tuple[MeasuredRun, Plan]] = []
    for run in runs:
        if run.left_out:
            continue
        try:
            spec = spec_of_run(run, base)
            if profile is not None and profile.is_of(spec.cluster.gpu):
                spec = replace(spec, profile=profile)
            plan = predict(spec, run.document["layout"])
        except TopoplanError as error:
            failed[run.id] = str(error)
            continue
        plans.append((run, plan))
        figures += _figures(run, spec, plan)
    return Validation(
        figures=tuple(figures),
        spreads=tuple(spread_of(members) for members in _grouped(figures)),
        ranking=_ranking(plans, figures),
        fits=_fits(plans),
        runs=len(plans),
        failed=failed,
        left_out=dict(Counter(run.left_out for run in runs if run.left_out).most_common()),
    )


def at_90_percent(sizes: Sequence[float]) -> float:
    """Return the 90th percentile by nearest rank: the smallest size that at least nine of ten do not exceed."""
    return sorted(sizes)[math.ceil(0.9 * len(sizes)) - 1]


def spread_of(figures: Sequence[Figure]) -> Spread:
    """Return the errors of some figures; family and kind are those of the first."""
    errors = [figure.error for figure in figures]
    sizes = sorted(map(abs, errors))
    return Spread(
        family=figures[0].family,
        kind=figures[0].kind,
        count=len(errors),
        median=statistics.median(sizes),
        at_90_percent=at_90_percent(sizes),
        worst=sizes[-1],
        signed_median=statistics.median(errors),
    )


def spec_of_run(run: MeasuredRun, base: Path | None = None) -> Spec:
    """Return the spec of a run, with the constants of its machine if the rows have them."""
    form = {key: value for key, value in run.document.items() if key not in ("id", "layout")}
    spec = spec_from_document(form, where=run.where or run.id, base=base)
    return replace(spec, profile=_machine(run.machine, base)) if run.machine else spec


@lru_cache(maxsize=16)
def _machine(name: str, base: Path | None) -> OwnProfile:
    """Return the constants of a machine, from a file beside the rows."""
    if base is not None:
        return read_profile(base / name)
    with as_file(files("topoplan").joinpath("catalog", "measured", name)) as path:
        return read_profile(path)


def _grouped(figures: Sequence[Figure]) -> list[list[Figure]]:
    """Return figures grouped by kind (memory before throughput), then by source in the order of the file."""
    order = {kind: at for at, kind in enumerate((ALLOCATED, BY_STAGE, RESERVED, DEVICE))}
    groups: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        groups.setdefault((figure.kind, figure.family), []).append(figure)
    families = list(dict.fromkeys(figure.family for figure in figures))
    keys = sorted(groups, key=lambda key: (order.get(key[0], len(order)), families.index(key[1]), key[0]))
    return [groups[key] for key in keys]


def _figures(run: MeasuredRun, spec: Spec, plan: Plan) -> Iterator[Figure]:
    measured, memory = run.measured, plan.memory
    backend = plan.layout.backend
    memory_band, time_band = engine_of(backend).graded_bands(case_of(spec, backend))
    setup = {key: run.document[key] for key in ("cluster", "model", "job")}
    setup_key = json.dumps(setup, sort_keys=True, default=str) if run.unstated else run.id

    def figure(kind: str, unit: str, predicted: float, real: float, stage: int | None = None) -> Figure:
        of_speed = kind.startswith(THROUGHPUT)
        half_width = plan.time.band_s[1] / plan.time.step_s - 1.0 if of_speed else memory.band
        return Figure(
            id=run.id,
            family=run.family,
            kind=kind,
            unit=unit,
            predicted=predicted,
            measured=real,
            stage=stage,
            entry=entry_name(spec.cluster.gpu),
            band=memory_band if not of_speed else "" if run.slowed or run.machine else time_band,
            half_width=half_width,
            gaps=memory.gaps_bytes / GIB if kind in (RESERVED, DEVICE) else 0.0,
            setup_key=setup_key,
        )

    if measured.allocated_gib is not None:
        yield figure(ALLOCATED, "GiB", memory.allocated_bytes / GIB, measured.allocated_gib)
    for stage, real in zip(memory.by_stage, measured.stage_allocated_gib, strict=False):
        if real is not None:
            yield figure(BY_STAGE, "GiB", stage.allocated_bytes / GIB, real, stage.stage)
    if measured.reserved_gib is not None:
        yield figure(RESERVED, "GiB", memory.reserved_bytes / GIB, measured.reserved_gib)
    if measured.device_gib is not None:
        yield figure(DEVICE, "GiB", memory.device_bytes / GIB, measured.device_gib)
    speed = f"{THROUGHPUT} {spec.job.precision}"
    tokens = measured.tokens_per_s_per_gpu
    if tokens is None and measured.step_s is not None:
        tokens = tokens_per_step(spec.job) / measured.step_s / spec.cluster.world_size
    if tokens is not None:
        yield figure(speed, "tokens/s/GPU", plan.tokens_per_s_per_gpu, tokens)
    elif measured.tflops_per_gpu is not None:
        yield figure(speed, "TFLOP/s/GPU", plan.model_flops_per_s_per_gpu / 1e12, measured.tflops_per_gpu)


def _ranking(plans: Sequence[tuple[MeasuredRun, Plan]], figures: Sequence[Figure]) -> RankingGrade | None:
    speeds = {figure.id: figure for figure in figures if figure.is_speed}
    groups: dict[str, list[Figure]] = {}
    for run, _ in plans:
        if run.rank_group and run.id in speeds:
            groups.setdefault(run.rank_group, []).append(speeds[run.id])
    losses: list[float] = []
    pairs = in_order = 0
    for members in groups.values():
        if len(members) < 2:
            continue
        chosen = max(members, key=lambda figure: figure.predicted)
        losses.append(1.0 - chosen.measured / max(figure.measured for figure in members))
        for one, other in combinations(members, 2):
            if abs(one.measured / other.measured - 1.0) > APART:
                pairs += 1
                in_order += (one.predicted > other.predicted) == (one.measured > other.measured)
    if not losses:
        return None
    return RankingGrade(
        groups=len(losses),
        pairs=pairs,
        pairs_in_order=in_order,
        mean_loss=statistics.mean(losses),
        worst_loss=max(losses),
    )


def _fits(plans: Sequence[tuple[MeasuredRun, Plan]]) -> Fits:
    over: list[FitGrade] = []
    too_good: list[FitGrade] = []
    ran = ran_unstated = out_of_memory = 0
    for run, plan in plans:
        memory = plan.memory
        grade = FitGrade(
            id=run.id,
            family=run.family,
            device_gib=memory.device_bytes / GIB,
            capacity_gib=memory.capacity_bytes / GIB,
            unstated=run.unstated,
        )
        if run.measured.oom:
            out_of_memory += 1
            if plan.fits:
                too_good.append(grade)
            continue
        ran += not run.unstated
        ran_unstated += bool(run.unstated)
        if not replace(memory, margin_bytes=0.0).fits:
            over.append(grade)
    return Fits(
        ran=ran,
        ran_unstated=ran_unstated,
        ran_but_over=tuple(over),
        out_of_memory=out_of_memory,
        out_of_memory_but_fit=tuple(too_good),
    )
