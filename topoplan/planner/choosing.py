"""Which plan to try next so that the best one is found soon, which one is best so far, and how certain that is.

The step of a plan that ran is known. For all others, the logarithm of the step is normally distributed around the
prediction with calibrated constants: with the covariance of these constants (`calibrate.py`), weighted by their shares
of the plan's step, and with what formulas miss in each layout separately. So a trial also tells about every plan that
spends its time like the tried one, and little about plans that spend it differently.

The next trial is the one with the largest expected benefit: how much shorter the best known step will be, averaged over
the possible outcomes of the trial, which shift all other plans too (the knowledge gradient of correlated beliefs:
Frazier, Powell and Dayanik 2009). Trials end when the leader is clear of the bands: no rival has a lower end below the
leader, with WITHIN to spare.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from topoplan.layout.layout import Layout
from topoplan.planner.calibrate import AT_90_PERCENT, Calibration, Run, calibrate, slopes
from topoplan.planner.plan import Plan, Ranking
from topoplan.planner.rank import CAVEAT_COST
from topoplan.specs.spec import Spec

WITHIN = 0.02
"""A plan that is slower than the best one by no more than this is as good."""
NOISE = 0.01
"""Expected standard error of a trial's step, as a fraction."""
_NORMAL = NormalDist()
_QUANTILES = [_NORMAL.inv_cdf((place + 0.5) / 21) for place in range(21)]
"""Equally likely outcomes of a step, in standard deviations."""
CLEAR = 1.0 - _NORMAL.cdf(AT_90_PERCENT)
"""A rival that is faster with a smaller probability is out: the leader is below the rival's band of nine of ten."""
_RIVALS, _NEIGHBOURS = 24, 3
"""Maximum number of plans considered, best first, in total and per family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A plan that may be the best."""

    plan: Plan
    step_s: float
    """Measured step time, or else the predicted one."""
    error: float | None = None
    """Standard error of a measured step, as a fraction; None if the plan did not run."""

    @property
    def is_measured(self) -> bool:
        """Whether the plan ran."""
        return self.error is not None

    @property
    def worth_s(self) -> float:
        """Seconds by which plans are compared: a plan with a caveat pays for it, unless it has run."""
        return self.step_s * (1.0 + CAVEAT_COST) if self.plan.caveats and not self.is_measured else self.step_s

    @property
    def order_s(self) -> float:
        """Seconds by which leaders are chosen: of two equally good plans, the one that ran leads."""
        return self.worth_s if self.is_measured else self.worth_s * (1.0 + WITHIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is known after some trials."""

    contenders: tuple[Contender, ...]
    """Some plans of each family that did not run, and all that did; the leader first."""
    rival: Plan | None
    """The plan most likely to beat the leader; None if there is no other plan."""
    chance: float
    """Probability that the rival is faster than the leader by more than WITHIN."""
    next: Plan | None
    """The plan to try next; None if no plan that did not run may be the best."""
    open: frozenset[str]
    """Ids of plans that did not run and may be the best."""

    @property
    def leader(self) -> Contender:
        """The best plan so far."""
        return self.contenders[0]

    @property
    def is_clear(self) -> bool:
        """Whether the leader ran and no other trial is worthwhile."""
        return self.leader.is_measured and self.chance < CLEAR


def family(layout: Layout) -> tuple[object, ...]:
    """Return what similar layouts have in common: all but micro-batch, recomputation and splits."""
    degrees = (layout.tp, layout.pp, layout.cp, layout.ep, layout.etp, layout.ulysses)
    return (layout.backend, *degrees, layout.zero_stage, layout.sharding, layout.offload)


def standing(
    spec: Spec,
    ranking: Ranking,
    calibration: Calibration | None,
    measured: Mapping[str, Contender],
    failed: Collection[str] = (),
    open_before: Collection[str] = (),
) -> Standing | None:
    """Return the state of the search for the best plan, or None if no plan is left.

    `spec` is the spec before anything was learned, `ranking` the ranking with the learned constants. `measured` is by
    id; `failed` has the ids of plans that ran without a step. Before the first measurement only the prior is known: the
    calibration is then that of a run that took as long as predicted. `open_before` has the ids of plans that count as
    open in any case, for example because what is known was only predicted.
    """
    found = sorted(_contenders(ranking, measured, failed), key=lambda one: one.order_s)
    if not found:
        return None
    calibration = calibration or calibrate([as_predicted(spec, found[0].plan)])
    joint = _Joint.of(spec, found, calibration)
    chances = [joint.chance(place) for place in range(1, len(found))]
    chance = max(chances, default=0.0)
    likely = {found[place].plan.id for place, one in enumerate([1.0, *chances]) if one >= CLEAR}
    may_be = likely | set(open_before)
    opened = [place for place, one in enumerate(found) if one.plan.id in may_be and not one.is_measured]
    if measured:
        opened.sort(key=joint.gain, reverse=True)
    apart = {family(layout) for layout in ranking.plans.layouts if layout.id in failed}
    if len(measured) == 1 or open_before:
        # One layout does not separate kernels from links, and neither would a similar one.
        apart |= {family(one.plan.layout) for one in measured.values()}
    # A plan that may exceed the card costs a trial, and at worst a host.
    opened.sort(key=lambda place: (may_be_over(found[place].plan), family(found[place].plan.layout) in apart))
    return Standing(
        contenders=tuple(found),
        rival=found[1 + chances.index(chance)].plan if chances else None,
        chance=chance,
        next=found[opened[0]].plan if opened else None,
        open=frozenset(found[place].plan.id for place in opened),
    )


def as_predicted(spec: Spec, plan: Plan) -> Run:
    """Return a run that took as long as predicted: it shifts nothing, and narrows what a run would narrow."""
    return Run(spec=spec, layout=plan.layout, step_s=plan.time.step_s, error=NOISE)


def may_be_over(plan: Plan) -> bool:
    """Return whether the memory band reaches above the card, as it may under a small user-defined margin."""
    return plan.memory.band_bytes[1] > plan.memory.capacity_bytes


def _contenders(ranking: Ranking, measured: Mapping[str, Contender], failed: Collection[str]) -> Iterator[Contender]:
    yield from measured.values()
    seen = Counter[tuple[object, ...]]()
    for place, layout in enumerate(ranking.plans.layouts):
        if layout.id in measured or layout.id in failed or seen[family(layout)] == _NEIGHBOURS:
            continue
        seen[family(layout)] += 1
        plan = ranking.plans[place]
        yield Contender(plan=plan, step_s=plan.time.step_s)
        if seen.total() == _RIVALS:
            return


@dataclass(frozen=True, slots=True)
class _Joint:
    """Contenders as a joint normal distribution of the logarithms of their `worth_s`; the leader is the first."""

    logs: Sequence[float]
    shares: Sequence[Mapping[str, float]]
    """For each contender, the shares of its step by knob; empty for one that ran, whose step is known."""
    covariance: Mapping[tuple[str, str], float]
    own: Sequence[float]
    """For each contender, the variance that it shares with no other."""

    @classmethod
    def of(cls, spec: Spec, contenders: Sequence[Contender], calibration: Calibration) -> _Joint:
        factors = calibration.factors
        names = list(factors)

        def shares(one: Contender) -> dict[str, float]:
            if one.is_measured:
                return {}
            found = slopes(spec, one.plan.layout, factors)
            return {name: found[name] for name in names}

        return cls(
            [math.log(one.worth_s) for one in contenders],
            [shares(one) for one in contenders],
            calibration.covariance,
            [calibration.scatter**2 if one.error is None else one.error**2 for one in contenders],
        )

    def _together(self, one: int, other: int) -> float:
        found = self.own[one] if one == other else 0.0
        mine, theirs = self.shares[one], self.shares[other]
        return found + sum(mine[a] * theirs[b] * value for (a, b), value in self.covariance.items() if mine and theirs)

    def _behind(self, rival: int) -> tuple[float, float]:
        """Return (how much slower a rival is than the leader, standard deviation of that), both in logarithms."""
        variance = self._together(0, 0) + self._together(rival, rival) - 2.0 * self._together(0, rival)
        return self.logs[rival] - self.logs[0], math.sqrt(max(variance, 1e-12))

    def gain(self, tried: int) -> float:
        """Return the expected decrease of the best known step after trying one contender, in logarithms."""
        deviation = math.sqrt(self._together(tried, tried) + NOISE**2)
        told = [self._together(place, tried) / deviation for place in range(len(self.logs))]
        best = (min(log + tells * z for log, tells in zip(self.logs, told, strict=True)) for z in _QUANTILES)
        return min(self.logs) - sum(best) / len(_QUANTILES)

    def chance(self, rival: int) -> float:
        """Return the probability that a rival is faster than the leader by more than WITHIN."""
        behind, deviation = self._behind(rival)
        return _NORMAL.cdf((math.log(1.0 - WITHIN) - behind) / deviation)
