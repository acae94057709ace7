"""Which plan to try next so that the best one is found soon, which is the best by now, and how sure that is.

Of a plan that ran its step is known. Of all others the logarithm of the step is normal around what the calibrated
constants predict: with the covariance of these constants (`calibrate.py`), by the shares that the plan's step has of
them, and with what formulas miss in a layout of its own. So a trial also tells of every plan that spends its time as
the tried one does, and little of one that spends it otherwise.

The next trial is the one from which most is expected: how much shorter the best plan known then will be, over what
its step may turn out to be, which moves all others with it (the knowledge gradient of correlated beliefs: Frazier,
Powell and Dayanik 2009). Trials end when the leader is clear of the bands: of none of its rivals the lower end is below
it, with WITHIN to spare.
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
"""A plan that is slower than the best by no more is as good."""
NOISE = 0.01
"""Standard error of the step of a trial, as a fraction, before it ran."""
_NORMAL = NormalDist()
_QUANTILES = [_NORMAL.inv_cdf((place + 0.5) / 21) for place in range(21)]
"""Of what a step may turn out to be, all as likely."""
CLEAR = 1.0 - _NORMAL.cdf(AT_90_PERCENT)
"""A rival that is faster with a smaller probability is out: the leader is below its band of nine of ten."""
_RIVALS, _NEIGHBOURS = 24, 3
"""So many at most are looked at, from the best on, and of a family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A plan that may be the best."""

    plan: Plan
    step_s: float
    """Measured, or else predicted."""
    error: float | None = None
    """Of a measured one, the standard error as a fraction; None: it did not run."""

    @property
    def is_measured(self) -> bool:
        """Whether it ran."""
        return self.error is not None

    @property
    def worth_s(self) -> float:
        """What it is compared by: known trouble has to be paid for, unless the plan has run."""
        return self.step_s * (1.0 + CAVEAT_COST) if self.plan.caveats and not self.is_measured else self.step_s

    @property
    def order_s(self) -> float:
        """What leaders are chosen by: of two that are as good, it is the one that ran."""
        return self.worth_s if self.is_measured else self.worth_s * (1.0 + WITHIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is known after some trials."""

    contenders: tuple[Contender, ...]
    """The best of each family that did not run, some of each, and all that did; the leader first."""
    rival: Plan | None
    """The one that is likeliest to beat the leader; None where there is no other."""
    chance: float
    """The probability that this rival is faster than the leader by more than WITHIN."""
    next: Plan | None
    """What to try now; None where no plan that did not run may be the best."""
    open: frozenset[str]
    """Ids of the plans that did not run and may be the best."""

    @property
    def leader(self) -> Contender:
        """The best, as far as is known."""
        return self.contenders[0]

    @property
    def is_clear(self) -> bool:
        """Whether the leader ran, and no other trial is worth it."""
        return self.leader.is_measured and self.chance < CLEAR


def family(layout: Layout) -> tuple[object, ...]:
    """What neighbours have in common: degrees and sharding. Micro batch, recomputation and splits may differ."""
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
    """Where the search for the best plan stands; None where no plan is left.

    `spec` is as it was before anything was learnt, and `ranking` of the plans with the constants that were;
    `measured` is by id, `failed` has the ids of what ran without a step. Before the first measurement nothing is known
    but the prior: then the calibration is that of a run that took what was predicted. `open_before` may be the best
    whatever is known now, as where what is known was only predicted.
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
        # One layout does not tell kernels from links, and neither would its neighbour.
        apart |= {family(one.plan.layout) for one in measured.values()}
    # What may be over the card costs a trial, and at worst a host.
    opened.sort(key=lambda place: (may_be_over(found[place].plan), family(found[place].plan.layout) in apart))
    return Standing(
        contenders=tuple(found),
        rival=found[1 + chances.index(chance)].plan if chances else None,
        chance=chance,
        next=found[opened[0]].plan if opened else None,
        open=frozenset(found[place].plan.id for place in opened),
    )


def as_predicted(spec: Spec, plan: Plan) -> Run:
    """A run that took what was predicted of it: it shifts nothing, and narrows what a run would narrow."""
    return Run(spec=spec, layout=plan.layout, step_s=plan.time.step_s, error=NOISE)


def may_be_over(plan: Plan) -> bool:
    """Whether the band of its memory reaches above the card, as under a margin that somebody made small."""
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
    """Contenders as a joint normal of the logarithms of what they are worth; the leader is the first."""

    logs: Sequence[float]
    shares: Sequence[Mapping[str, float]]
    """Of the step, by knob; empty for what ran, whose step is known."""
    covariance: Mapping[tuple[str, str], float]
    own: Sequence[float]
    """Variance of each that no other has."""

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
        """By how much a rival is slower than the leader, and how far off that may be: of the logarithms."""
        variance = self._together(0, 0) + self._together(rival, rival) - 2.0 * self._together(0, rival)
        return self.logs[rival] - self.logs[0], math.sqrt(max(variance, 1e-12))

    def gain(self, tried: int) -> float:
        """How much shorter the best that is known is expected to be once the step of one is known, in logarithms."""
        deviation = math.sqrt(self._together(tried, tried) + NOISE**2)
        told = [self._together(place, tried) / deviation for place in range(len(self.logs))]
        best = (min(log + tells * z for log, tells in zip(self.logs, told, strict=True)) for z in _QUANTILES)
        return min(self.logs) - sum(best) / len(_QUANTILES)

    def chance(self, rival: int) -> float:
        """Probability that a rival is faster than the leader by more than WITHIN."""
        behind, deviation = self._behind(rival)
        return _NORMAL.cdf((math.log(1.0 - WITHIN) - behind) / deviation)
