"""What trials have taught so far: the profile, the plans in their new order, and what to try next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from topoplan.errors import InputError
from topoplan.planner.calibrate import Calibration, Run, calibrate
from topoplan.planner.choosing import NOISE, Contender, Standing, as_predicted, standing
from topoplan.planner.effort import start_up_s
from topoplan.planner.exhausted import Ended
from topoplan.planner.learn import Lesson, Lessons, learn_from
from topoplan.planner.plan import Plan, Ranking
from topoplan.planner.search import rank
from topoplan.specs.spec import Spec

_LONGER, _SPARE_S = 3.0, 300.0
"""A trial may take _LONGER times the predicted start-up, which is an assumption on most machines, plus _SPARE_S."""
_LEAST_S = 60.0
"""Minimum seconds of steps: trainers have a clock of whole seconds, which `logged.py` reads in stretches of ten and
leaves some out."""
_SLOWER = 1.5
"""Factor above the upper end of the band that the steps of a trial may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A finished trial."""

    plan: Plan
    """The plan as it was predicted at the time."""
    lesson: Lesson | None = None
    """None if there were too few steps."""
    ended: Ended | None = None
    """Set if the trial ended out of memory."""
    why: str = ""
    """What went wrong, in one line; irrelevant if the steps are known."""
    is_lost: bool = False
    """Whether a host or a rank was lost, which may not happen again."""
    took_s: float = 0.0
    """Seconds for which it occupied the GPUs."""
    run: str = ""
    """Id of the run; empty if nothing was started."""

    @property
    def step_s(self) -> float | None:
        """Measured step time; None if the plan cannot run or there were too few steps."""
        return self.lesson.logged.step_s if self.lesson and not self.ended else None

    @property
    def gpu_hours(self) -> float:
        """Cost of the trial."""
        return self.took_s * self.plan.layout.world_size / 3600.0


def trial_steps(plan: Plan, steps: int) -> int:
    """Return `steps`, or more if the plan's steps are too short to be timed."""
    return max(steps, math.ceil(_LEAST_S / plan.time.band_s[0]))


@dataclass(frozen=True, slots=True)
class Expected:
    """How long a trial takes, from its start on the hosts to its end."""

    steps: int
    seconds: float
    at_most_s: float
    """Time limit after which the trial is ended."""


def expected(spec: Spec, plan: Plan, steps: int) -> Expected:
    """Return the expected duration of a trial of at least `steps` steps."""
    steps, start_s, (_, slow_s) = trial_steps(plan, steps), start_up_s(spec), plan.time.band_s
    return Expected(steps, start_s + steps * plan.time.step_s, _LONGER * start_s + _SLOWER * steps * slow_s + _SPARE_S)


def hang_after_s(spec: Spec, plan: Plan) -> float:
    """Return the seconds without a sign of life after which a trial counts as hung."""
    return max(_LONGER * start_up_s(spec), 20.0 * plan.time.band_s[1])


class Tuning:
    """The trials of one job. Nothing is run here."""

    def __init__(self, spec: Spec, ranking: Ranking) -> None:
        """`ranking` is the ranking of the spec before any trial."""
        self._spec, self.ranking = spec, ranking
        self.tried: list[Tried] = []
        self.learnt: Lessons | None = None

    def add(self, tried: Tried) -> None:
        """Learn from a trial, and rank again. A trial whose log is not of its plan has failed."""
        self.tried.append(tried)
        lessons = [one.lesson for one in self.tried if one.lesson]
        ended = [one.ended for one in self.tried if one.ended and one.ended.found.is_informative]
        if not (tried.lesson or tried.ended) or not (lessons or ended):
            return
        try:
            self.learnt = learn_from(lessons, ended)
        except InputError as error:
            self.tried[-1] = replace(tried, lesson=None, ended=None, why=str(error))
            return
        self.ranking = rank(replace(self._spec, profile=self.learnt.profile, trainer=self.trainer))

    @property
    def trainer(self) -> str | None:
        """The trainer of all trials, since a profile is of one trainer."""
        return self.tried[0].plan.trainer if self.tried else self._spec.trainer

    @property
    def calibration(self) -> Calibration | None:
        """What the steps have shown; None before the first measurement."""
        return self.learnt.time if self.learnt else None

    @property
    def standing(self) -> Standing | None:
        """Which plan leads, how certain that is, and what to try next; None if no plan fits any more."""
        return standing(self._spec, self.ranking, self.calibration, self._ran, self._failed)

    @property
    def _ran(self) -> dict[str, Contender]:
        return {
            one.plan.id: Contender(plan=one.plan, step_s=one.lesson.logged.step_s, error=one.lesson.logged.error)
            for one in self.tried
            if one.lesson and not one.ended
        }

    @property
    def _failed(self) -> set[str]:
        """Ids of plans that are not tried again."""
        ran = self._ran
        without = Counter(one.plan.id for one in self.tried if one.plan.id not in ran)
        lost = {one.plan.id for one in self.tried if one.is_lost}
        return {plan for plan, times in without.items() if plan not in lost or times > 1}

    @property
    def measured(self) -> int:
        """Number of trials that reported their steps."""
        return sum(one.step_s is not None for one in self.tried)

    @property
    def gpu_hours(self) -> float:
        """Cost of all trials."""
        return sum(one.gpu_hours for one in self.tried)

    def ahead(self, count: int, *, at_once: bool = False) -> Sequence[Plan]:
        """Return the next trials, assuming that all of them take as long as predicted.

        With `at_once` the trials are chosen before any of them has run: no plan is ruled out because others take as
        long as predicted.
        """
        known, failed, calibration = self._ran, self._failed, self.calibration
        runs = [
            Run(spec=self._spec, layout=one.plan.layout, step_s=one.step_s, error=one.error or 0.0)
            for one in known.values()
        ]
        found: list[Plan] = []
        may_be: frozenset[str] = frozenset()
        while len(found) < count:
            stands = standing(self._spec, self.ranking, calibration, known, failed, may_be)
            if stands is None or stands.next is None:
                break
            plan = stands.next
            may_be = stands.open if at_once else may_be
            found.append(plan)
            known[plan.id] = Contender(plan=plan, step_s=plan.time.step_s, error=NOISE)
            runs.append(as_predicted(self._spec, plan))
            calibration = calibrate(runs)
        return found
