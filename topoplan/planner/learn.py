"""A profile of a cluster from the logs of its runs, as `topoplan calibrate` writes it, and its effect on a ranking."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from topoplan.engines.registry import engine_of
from topoplan.errors import InputError, listed
from topoplan.layout.layout import Layout
from topoplan.planner.calibrate import KNOBS, Calibration, Run, calibrate, predicted_s
from topoplan.planner.exhausted import Ended, exhausted_peaks, lesson_sentence
from topoplan.planner.explain import speed_words
from topoplan.planner.fragmentation import Learnt, Peaks, learn
from topoplan.planner.logged import Logged
from topoplan.planner.measures import Measures
from topoplan.planner.plan import Plan, Ranking
from topoplan.planner.rank import TIE
from topoplan.planner.search import rank
from topoplan.specs.gpu_profile import WIDEST, profile_of
from topoplan.specs.profile import Calibrated, MeasuredPlan, OwnProfile
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.trainers.log import WRITTEN_BY
from topoplan.trainers.registry import trainer_named, versions_of
from topoplan.units import GIB

_PANEL = 12
"""Number of plans of a ranking whose bands are computed."""
_NARROWEST_OWN = 0.03
"""Narrowest time band of a user's own machine: two runs of one layout seldom agree better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One log, and the plan that it is of."""

    spec: Spec
    plan: Plan
    logged: Logged


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """What some logs show about their cluster."""

    profile: OwnProfile
    of: tuple[Lesson, ...]
    ended: tuple[Ended, ...]
    """Runs that ended out of memory."""
    time: Calibration | None
    """None if no log reports steps."""
    memory: Learnt
    spec: Spec
    """Spec of the first log, or of what was measured separately, without what earlier logs taught."""
    measures: tuple[Measures, ...]
    """Times measured separately."""

    @property
    def first(self) -> tuple[Spec, Plan] | None:
        """Spec and plan of the first run; None if nothing ran."""
        return next(iter(_ran(self.of, self.ended)), None)


def _ran(lessons: Sequence[Lesson], ended: Sequence[Ended]) -> list[tuple[Spec, Plan]]:
    return [*((one.spec, one.plan) for one in lessons), *((one.spec, one.plan) for one in ended)]


def learn_from(
    lessons: Sequence[Lesson], ended: Sequence[Ended] = (), measures: Sequence[tuple[Spec, Measures]] = ()
) -> Lessons:
    """Return the profile that agrees best with all logs; `measures` come with the spec of their cluster.

    Raises InputError for logs of another trainer, job or cluster than their plan's, or of several clusters.
    """
    # Constants from earlier logs are not used as a prior: to include those logs, pass them again.
    lessons = [replace(one, spec=_uncalibrated(one.spec)) for one in lessons]
    ended = [replace(one, spec=_uncalibrated(one.spec)) for one in ended]
    ran = _ran(lessons, ended)
    first = ran[0][0] if ran else _uncalibrated(measures[0][0])
    plan = ran[0][1] if ran else None
    for spec, one in measures:
        one.check(spec.cluster)
        if spec.cluster.gpu != first.cluster.gpu:
            raise InputError(f"is of {spec.cluster.gpu.name}, and not of {first.cluster.gpu.name}", where=one.name)
    for lesson in lessons:
        _refuse_other(lesson, first)
    taught = [one for one in ended if one.found.is_informative]
    if not lessons and not taught and not measures:
        raise InputError(lesson_sentence(ended[0].found), where=ended[0].name)
    runs = [
        Run(spec=one.spec, layout=one.plan.layout, step_s=log.step_s, error=log.error, name=log.name)
        for one in lessons
        for log in (one.logged,)
    ]
    timed = [one for _, found in measures for one in found.rows if one.is_used]
    time = calibrate(runs, first, timed) if runs or timed else None
    memory = learn([*map(peaks_of, lessons), *(exhausted_peaks(one.spec, one.plan, one.found) for one in taught)])
    bands = _time_bands(lessons, time) if time else {}
    steps = sum(one.logged.steps for one in lessons)
    constants = {**(time.constants if time else {}), **memory.constants, **memory.bands, **bands}
    profile = OwnProfile(
        gpu=first.cluster.gpu.name,
        constants={key: float(f"{value:.4g}") for key, value in constants.items()},
        source=f"topoplan calibrate, {_sources(steps, len(ran), len(timed))}",
        path="",
        calibrated=Calibrated(
            date=datetime.now(UTC).date().isoformat(),
            trainer=plan.trainer or "" if plan else "",
            versions=versions_of(first, plan.layout.backend, plan.trainer) if plan else _versions(measures),
            measured=(*map(_measured, lessons), *map(_exhausted, taught)),
        ),
    )
    return Lessons(
        profile=profile,
        of=tuple(lessons),
        ended=tuple(ended),
        time=time,
        memory=memory,
        spec=first,
        measures=tuple(one for _, one in measures),
    )


def _sources(steps: int, runs: int, timed: int) -> str:
    told = [f"{steps} steps of {runs} run{'s' * (runs > 1)}"] if runs else []
    return ", ".join([*told, *([f"{timed} times of `topoplan measure`"] if timed else [])])


def _versions(measures: Sequence[tuple[Spec, Measures]]) -> Mapping[str, str]:
    about = measures[0][1].about
    return {name: str(about[name]) for name in ("torch", "cuda", "nccl") if about.get(name)}


def _exhausted(ended: Ended) -> MeasuredPlan:
    needs = round(ended.found.needed_bytes / GIB, 2)
    return MeasuredPlan(model=_name(ended.spec), plan=ended.plan.id, needs_at_least_gib=needs)


def _name(spec: Spec) -> str:
    """Return a model's name, without the directory that it may be in."""
    return spec.model.name.rstrip("/").rpartition("/")[2]


def _uncalibrated(spec: Spec) -> Spec:
    return replace(spec, profile=None) if spec.profile and spec.profile.calibrated else spec


def _measured(lesson: Lesson) -> MeasuredPlan:
    logged = lesson.logged
    return MeasuredPlan(
        model=_name(lesson.spec),
        plan=lesson.plan.id,
        steps=logged.steps,
        step_s=float(f"{logged.step_s:.4g}"),
        spread=round(logged.spread, 4),
    )


def peaks_of(lesson: Lesson) -> Peaks:
    """Return the memory peaks that a log reports."""
    logged, trainer = lesson.logged, lesson.plan.trainer
    of_first = bool(trainer) and logged.writer == trainer and trainer_named(trainer).log.peaks_of_rank_0
    return Peaks(
        spec=lesson.spec,
        layout=lesson.plan.layout,
        allocated_bytes=logged.allocated_bytes,
        reserved_bytes=logged.reserved_bytes,
        stage=0 if of_first else None,
    )


def _refuse_other(lesson: Lesson, first: Spec) -> None:
    """Raise InputError for a log that cannot be of its plan, or a plan for another GPU than the first one's."""
    logged, spec, trainer = lesson.logged, lesson.spec, lesson.plan.trainer
    if spec.cluster.gpu != first.cluster.gpu:
        what = f"is of {spec.cluster.gpu.name}, and the first log of {first.cluster.gpu.name}"
        raise InputError(what, where=logged.name, remedy="calibrate each kind of GPU by itself")
    writers = WRITTEN_BY.get(logged.writer, (logged.writer,))
    if trainer and logged.writer and trainer not in writers:
        titles = listed([trainer_named(name).title for name in writers], "or")
        known = f"{logged.writer}, as {titles} writes it" if logged.writer in WRITTEN_BY else titles
        what = f"is a log of {known}, and the plan is written for {trainer_named(trainer).title}"
        raise InputError(what, where=logged.name, remedy=f"give --trainer {writers[0]}, or the bundle that ran")
    batch = spec.job.global_batch_size
    if logged.batch not in (None, batch):
        what = f"has {logged.batch} sequences per step, and the job {batch}"
        raise InputError(
            what, where=logged.name, remedy=f"say --set global_batch_size={logged.batch}, or give its spec"
        )


def _time_bands(lessons: Sequence[Lesson], time: Calibration) -> Mapping[str, float]:
    """Return the band of each kind of job that ran, wide enough for nine of ten of its best plans."""
    bands: dict[str, float] = {}
    for lesson in lessons:
        spec = replace(lesson.spec, backends=(lesson.plan.layout.backend,), trainer=lesson.plan.trainer)
        key = engine_of(lesson.plan.layout.backend).bands(case_of(spec, lesson.plan.layout.backend))[1]
        if key in bands:
            continue
        try:
            found = rank(spec).plans.layouts
        except InputError:
            found = ()
        panel = [*found[: 4 * _PANEL : 4], lesson.plan.layout]
        widths = sorted(time.band(spec, layout) for layout in panel)
        width = widths[(9 * (len(widths) - 1) + 9) // 10]
        bands[key] = min(max(width, _NARROWEST_OWN), WIDEST)
    return bands


_MOST = 200
"""Number of plans considered, best first."""


def reordered(ranking: Ranking) -> tuple[str, ...]:
    """Return sentences on the best plan before calibration and on plans out of memory; none without calibration."""
    spec, layouts = ranking.spec, ranking.plans.layouts[:_MOST]
    if spec.profile is None or spec.profile.calibrated is None or not layouts:
        return ()
    ended = dict.fromkeys(one.plan for one in spec.profile.calibrated.measured if one.needs_at_least_gib)
    here = {layout.id for layout in ranking.plans.layouts}
    return (
        _reordered(spec, layouts),
        *(
            f"{plan} ran out of memory on this cluster" + ("" if plan in here else ", and is left out")
            for plan in ended
        ),
    )


def _reordered(spec: Spec, layouts: Sequence[Layout]) -> str:
    own = replace(spec, profile=None)
    once = [predicted_s(own, layout, {}) for layout in layouts]
    was = min(range(len(layouts)), key=lambda place: once[place])
    best, other = layouts[0], layouts[was]
    now = [predicted_s(spec, layout, {}) for layout in (best, other)]
    if once[was] > once[0] * (1.0 - TIE) or now[1] < now[0] * (1.0 + TIE):
        return "the calibrated constants leave the best plan as it was"
    return (
        f"without the calibrated constants {other.id} led, by {100 * (once[0] / once[was] - 1):.0f}%; with them it is"
        f" {speed_words(now[1] / now[0])} than plan 1{_because(spec, (best, other))}"
    )


def _because(spec: Spec, layouts: Sequence[Layout]) -> str:
    """Return the constants that speak most against the second of two layouts."""
    base, own, found = profile_of(spec.cluster.gpu), replace(spec, profile=None), []
    mine = profile_of(spec.cluster.gpu, spec.profile)
    for knob in KNOBS:
        factor = knob.factor(mine, base)
        ahead, behind = (
            predicted_s(own, layout, {knob.name: factor}) / predicted_s(own, layout, {}) for layout in layouts
        )
        found.append((math.log(behind / ahead), knob.name, factor))
    most, name, factor = max(found)
    return f", because of the {name}, which take {factor:.2f} times as long" if most > 0 else ""
