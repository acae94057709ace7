"""A few constants of a cluster, from the steps of its runs.

A step is predicted from some fifty constants. What runs can tell is how far groups of them are off together (KNOBS):
all rates of kernels, of links inside a machine, of the network, the fixed times of kernels and messages, the host. The
logarithm of each group's factor has a prior around 0, and what is known of them after the runs follows from

    ln(measured step) = ln(predicted step with these factors) + what the formulas miss in this layout + noise

by linearising the prediction and conditioning on one run after the other (a Kalman update), until nothing moves. The
prediction itself is the model: its derivatives are differences of predictions.

Where the prior comes from: the narrowest band that a profile may have is what formulas are off by where all constants
are known (`planner/bands.py`). Half of its width is taken to be the layout's own, and moves that layout alone. What the
band of this GPU is wider by is its machine's: a power limit, a driver, a release, a slow node, what the formulas miss
in this model. It slows kernels, links and messages together, and so it is common to all of them; the work of the
host's CPU it leaves alone. Beside it each group but the kernels may be off by 40% for itself: a step's band says little
of them. So a run that is off by much shifts the other layouts by nearly as much, as one plain factor would, and
one that spends its time otherwise than they do shifts them by less.

How far constants can be off here, and how much layouts differ here, is not known either: the variances of both have a
scaled inverse chi-squared prior, which makes a Student t of each, so that a machine which is off by far is believed.
They are summed over on a grid, weighed by how well the runs go with them. The band of a plan is what is left: the
factors' covariance, carried through the shares of its step, and what may be this layout's own.

Layouts that use two groups in the same proportion cannot tell them apart: their shift is then divided as the prior has
it, and `Calibration.unseparated` says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import NormalDist

from topoplan.engines.registry import engine_of
from topoplan.errors import InputError
from topoplan.layout.layout import Layout
from topoplan.planner.bands import NARROWEST
from topoplan.planner.measures import Timed
from topoplan.specs.case import Case
from topoplan.specs.gpu_profile import PRODUCTS, Profile, profile_of
from topoplan.specs.profile import OwnProfile
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

AT_90_PERCENT = NormalDist().inv_cdf(0.95)
"""A band's half width, in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """Constants that are off together."""

    name: str
    rates: tuple[str, ...] = ()
    """Divided by the factor."""
    times: tuple[str, ...] = ()
    """Multiplied by it."""
    of_host: bool = False
    """Work of the host's CPU, which what slows the GPUs down leaves alone."""

    def factor(self, mine: Profile, base: Profile) -> float:
        """What its work takes longer by with the constants of one profile than with those of another."""
        if self.rates:
            first = self.rates[0]
            return float(getattr(base, first) / getattr(mine, first))
        return float(getattr(mine, self.times[0]) / getattr(base, self.times[0]))


KNOBS = (
    Knob(name="kernels", rates=(*PRODUCTS, "memory_efficiency")),
    Knob(name="links inside a machine", rates=("nvlink_efficiency", "pcie_efficiency")),
    Knob(name="links between machines", rates=("network_efficiency", "tcp_socket_bytes_per_s")),
    Knob(
        name="fixed times of kernels and messages",
        times=(
            "kernel_launch_s",
            "collective_latency_s",
            "hop_latency_s",
            "network_hop_latency_s",
            "nvls_latency_s",
        ),
    ),
    Knob(
        name="launches and work of the host", times=("eager_launch_s", "zero3_hook_s", "step_overhead_s"), of_host=True
    ),
    Knob(name="steps of Adam on the host", rates=("host_adam_bytes_per_s",), of_host=True),
)
Factors = Mapping[str, float]
"""Knob -> what its work takes longer by, as a factor."""
Covariance = Mapping[tuple[str, str], float]
"""Of the logarithms of the factors of two knobs."""
_NAMES = tuple(knob.name for knob in KNOBS)
_UNKNOWN = 0.4
"""Half width of the prior of all but kernels, beside the machine's, as of a band: links, networks and hosts of a kind
differ by so much."""
_OWN = 0.5
"""Of the narrowest band's width, the share that is a layout's own: of its 10%, 5%."""
_FREEDOM, _AT_90_OF_T = 4.0, 2.132
"""Degrees of freedom of both scales: a machine may be slow for reasons that nobody has seen yet, and how much layouts
differ has been seen on few machines. A band's half width, in scales of a Student t that has so many."""
_GRID = 5
"""Points of each scale, all as likely; with more nothing changes."""
_NEARLY = 0.005
"""Constants that are off by less are left as they are."""
_USED, _COUNTS, _ALIKE = 0.001, 0.03, 0.98
"""Shares of the step, below which it does not depend on a knob, or nobody asks what it is told apart from; above this
cosine two knobs are used alike."""
_DIFFERENCE = 0.02
_CLOSE = 1e-4
_LINEARISATIONS = 8
_FAR = 3.0
"""A run that is off by more than this factor is not of this model, job or cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One layout, and what its steps took."""

    spec: Spec
    layout: Layout
    step_s: float
    error: float = 0.0
    """Standard error of `step_s`, as a fraction."""
    name: str = ""
    """For messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """What was learnt of one knob."""

    knob: Knob
    factor: float
    """Its work takes longer by this."""
    spread: float
    """Standard deviation of the factor's logarithm."""
    prior: float
    """What it was before."""

    @property
    def told(self) -> float:
        """The share of what was not known of it that the runs tell; 0 is nothing."""
        return max(0.0, 1.0 - (self.spread / self.prior) ** 2) if self.prior else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What some runs tell of their cluster."""

    shifts: tuple[Shift, ...]
    """In the order of KNOBS."""
    covariance: Covariance
    scatter: float
    """Standard deviation of what the formulas miss in one layout."""
    shares: tuple[Mapping[str, float], ...]
    """Of each run, the shares of its step by knob."""
    constants: Mapping[str, float]
    """Those that differ from the GPU's own."""
    before: tuple[float, ...]
    """Predicted over measured, less one: of each run, with the constants as they were."""
    after: tuple[float, ...]

    @property
    def factors(self) -> Factors:
        """Knob -> factor."""
        return {shift.knob.name: shift.factor for shift in self.shifts}

    @property
    def used(self) -> tuple[str, ...]:
        """Knobs that the steps of these runs depend on."""
        return tuple(name for name in self.factors if any(abs(share[name]) > _USED for share in self.shares))

    @property
    def unseparated(self) -> tuple[tuple[str, str], ...]:
        """Knobs that count in these steps, and that all of these layouts use in the same proportion."""
        pairs = itertools.combinations([name for name in self.factors if self._part(name, name) > _COUNTS**2], 2)
        return tuple(
            (one, other)
            for one, other in pairs
            if self._part(one, other) > _ALIKE * math.sqrt(self._part(one, one) * self._part(other, other))
        )

    def _part(self, one: str, other: str) -> float:
        return sum(share[one] * share[other] for share in self.shares) / max(1, len(self.shares))

    def band(self, spec: Spec, layout: Layout) -> float:
        """Half width of the band around the step of a layout, as a fraction: nine of ten are expected in it."""
        slope = slopes(spec, layout, self.factors)
        known = sum(slope[one] * slope[other] * value for (one, other), value in self.covariance.items())
        return math.expm1(AT_90_PERCENT * math.sqrt(known + self.scatter**2))


def calibrate(runs: Sequence[Run], spec: Spec | None = None, timed: Sequence[Timed] = ()) -> Calibration:
    """The most probable factors, from runs of one cluster with one profile, and from what was timed on it by itself.

    Without runs `spec` says which cluster. Raises InputError for a run far off.
    """
    spec = spec or runs[0].spec
    base = _stated(spec)
    steps = [predicted_s(run.spec, run.layout, {}) for run in runs]
    before = tuple(step / run.step_s - 1.0 for step, run in zip(steps, runs, strict=True))
    for run, step in zip(runs, steps, strict=True):
        if not 1.0 / _FAR < step / run.step_s < _FAR:
            what = f"a step took {run.step_s:.3g} s, and {step:.3g} s are predicted of {run.layout.id}"
            remedy = "most often it is the log of another plan: give the one that ran, with --plan or by its bundle"
            raise InputError(
                what, where=run.name, expected="expected a log of this plan, job and cluster", remedy=remedy
            )
    factors: Factors = dict.fromkeys(_NAMES, 1.0)
    rows = _rows(runs, spec, timed, factors)
    prior = _prior(runs, rows, base)
    for _ in range(_LINEARISATIONS):
        posterior = _conditioned(rows, prior)
        moved = {name: math.exp(value) for name, value in posterior.mean.items()}
        if all(abs(math.log(value / factors[name])) < _CLOSE for name, value in moved.items()):
            break
        factors = moved
        rows = _rows(runs, spec, timed, factors)
    after = tuple(predicted_s(run.spec, run.layout, factors) / run.step_s - 1.0 for run in runs)
    return Calibration(
        shifts=tuple(
            Shift(
                knob=knob,
                factor=factors[knob.name],
                spread=math.sqrt(posterior.covariance[knob.name, knob.name]),
                prior=math.sqrt(posterior.scale * prior.covariance[knob.name, knob.name]),
            )
            for knob in KNOBS
        ),
        covariance=posterior.covariance,
        scatter=math.sqrt(posterior.own),
        shares=tuple(row.slopes for row in rows if row.has_own),
        constants=_constants(base, {name: value for name, value in factors.items() if abs(value - 1.0) > _NEARLY}),
        before=before,
        after=after,
    )


def predicted_s(spec: Spec, layout: Layout, factors: Factors) -> float:
    """The step of a layout whose constants are off by these factors."""
    return engine_of(layout.backend).time(_case(spec, layout.backend, tuple(factors.items())), layout).step_s


@lru_cache(maxsize=64)
def _case(spec: Spec, backend: str, factors: tuple[tuple[str, float], ...]) -> Case:
    """One for all layouts whose slopes are asked for: what is worked out for a case is kept."""
    return case_of(_off_by(spec, dict(factors)), backend)


def _off_by(spec: Spec, factors: Factors) -> Spec:
    """With constants that are off by these factors."""
    if all(value == 1.0 for value in factors.values()):
        return spec
    return with_constants(spec, _constants(_stated(spec), factors))


def with_constants(spec: Spec, constants: Mapping[str, float]) -> Spec:
    """The spec with constants over those that it has."""
    own = spec.profile or OwnProfile(gpu=spec.cluster.gpu.name, constants={}, source="", path="")
    return replace(spec, profile=replace(own, constants={**own.constants, **constants}))


def slopes(spec: Spec, layout: Layout, factors: Factors) -> dict[str, float]:
    """By how much the logarithm of the step goes up with that of each factor: the shares of the step."""
    return _slopes(lambda moved: predicted_s(spec, layout, moved), factors)


def _slopes(seconds: Callable[[Factors], float], factors: Factors) -> dict[str, float]:
    here = seconds(factors)

    def slope(name: str) -> float:
        moved = {**factors, name: factors.get(name, 1.0) * math.exp(_DIFFERENCE)}
        return math.log(seconds(moved) / here) / _DIFFERENCE

    return {knob.name: slope(knob.name) for knob in KNOBS}


def _stated(spec: Spec) -> Profile:
    return profile_of(spec.cluster.gpu, spec.profile)


def _constants(base: Profile, factors: Factors) -> dict[str, float]:
    """The constants that factors other than 1 change; no share is above 1."""
    found = {}
    for knob in KNOBS:
        factor = factors.get(knob.name, 1.0)
        if factor == 1.0:
            continue
        for key in knob.rates:
            value = getattr(base, key)
            found[key] = min(value / factor, 1.0) if value <= 1.0 else value / factor
        for key in knob.times:
            found[key] = getattr(base, key) * factor
    return found


@dataclass(frozen=True, slots=True)
class _Row:
    """One observation, linearised: `off` is slopes times the logarithms of the factors, plus what is its own."""

    off: float
    slopes: Mapping[str, float]
    noise: float
    has_own: bool
    """It is of a layout, which has something of its own."""


def _rows(runs: Sequence[Run], spec: Spec, timed: Sequence[Timed], factors: Factors) -> list[_Row]:
    rows = [
        _row(run.step_s, partial(predicted_s, run.spec, run.layout), factors, run.error, has_own=True) for run in runs
    ]
    for one in timed:

        def seconds(moved: Factors, one: Timed = one) -> float:
            return one.predicted_s(spec.cluster, _stated(_off_by(spec, moved)))

        rows.append(_row(one.seconds, seconds, factors, one.noise, has_own=False))
    return rows


def _row(
    measured_s: float, seconds: Callable[[Factors], float], factors: Factors, noise: float, *, has_own: bool
) -> _Row:
    slope = _slopes(seconds, factors)
    off = math.log(measured_s / seconds(factors))
    off += sum(slope[name] * math.log(value) for name, value in factors.items())
    return _Row(off, slope, noise, has_own)


@dataclass(frozen=True, slots=True)
class _Prior:
    """Before any run, with both scales at 1."""

    covariance: Covariance
    own: float
    """Variance of what is a layout's own."""


def _scale_of(band: float) -> float:
    """Of the Student t of a logarithm, nine of ten of which are in a band of this half width."""
    return math.log1p(band) / _AT_90_OF_T


def _prior(runs: Sequence[Run], rows: Sequence[_Row], base: Profile) -> _Prior:
    keys = [engine_of(run.layout.backend).bands(case_of(run.spec, run.layout.backend))[1] for run in runs]
    keys = keys or ["time_band"]
    own = _scale_of(_OWN * max(NARROWEST[key] for key in keys)) ** 2
    machine = max(_scale_of(getattr(base, key)) for key in keys) ** 2 - own
    # What no run used stays as it was, however the rest of the machine turns out.
    slowed = {knob.name for knob in KNOBS if not knob.of_host and any(row.slopes[knob.name] > _USED for row in rows)}
    covariance = {(one, other): machine if {one, other} <= slowed else 0.0 for one in _NAMES for other in _NAMES}
    for knob in KNOBS:
        apart = 0.0 if knob is KNOBS[0] else _scale_of(_UNKNOWN) ** 2
        covariance[knob.name, knob.name] = apart + (0.0 if knob.of_host else machine)
    return _Prior(covariance, own)


@dataclass(frozen=True, slots=True)
class _Posterior:
    mean: Mapping[str, float]
    covariance: Covariance
    own: float
    """Variance of what is a layout's own."""
    scale: float
    """Of the prior's covariance."""
    log_likelihood: float
    """Of the rows, but for a constant."""


def _conditioned(rows: Sequence[_Row], prior: _Prior) -> _Posterior:
    """Mean and covariance, given the rows, whichever the scales are."""
    grid = [_updated(rows, prior, *scales) for scales in itertools.product(_SCALES, repeat=2)]
    most = max(one.log_likelihood for one in grid)
    weights = [math.exp(one.log_likelihood - most) for one in grid]
    total = sum(weights)

    def expected(values: Iterable[float]) -> float:
        return sum(weight * value for weight, value in zip(weights, values, strict=True)) / total

    mean = {name: expected(one.mean[name] for one in grid) for name in _NAMES}
    return _Posterior(
        mean,
        {
            (a, b): expected(one.covariance[a, b] + (one.mean[a] - mean[a]) * (one.mean[b] - mean[b]) for one in grid)
            for a, b in prior.covariance
        },
        expected(one.own for one in grid),
        expected(one.scale for one in grid),
        most,
    )


def _updated(rows: Sequence[_Row], prior: _Prior, scale: float, scale_of_own: float) -> _Posterior:
    """The same where the scales are known."""
    mean = dict.fromkeys(_NAMES, 0.0)
    covariance = {pair: scale * value for pair, value in prior.covariance.items()}
    own, log_likelihood = scale_of_own * prior.own, 0.0
    for row in rows:
        gain = {one: sum(covariance[one, other] * row.slopes[other] for other in _NAMES) for one in _NAMES}
        variance = sum(gain[one] * row.slopes[one] for one in _NAMES) + own * row.has_own + row.noise**2
        innovation = row.off - sum(row.slopes[one] * mean[one] for one in _NAMES)
        log_likelihood -= (math.log(variance) + innovation**2 / variance) / 2.0
        for one in _NAMES:
            mean[one] += gain[one] * innovation / variance
        for one, other in covariance:
            covariance[one, other] -= gain[one] * gain[other] / variance
    return _Posterior(mean, covariance, own, scale, log_likelihood)


def _scales(points: int) -> tuple[float, ...]:
    """Of a variance: the means of parts, all as likely, of a scaled inverse chi-squared.

    The parts end at quantiles by Wilson and Hilferty (1931). With four degrees of freedom the integral is closed.
    """
    part = 2.0 / (9.0 * _FREEDOM)
    normal = [NormalDist().inv_cdf(place / points) for place in range(1, points)]
    ends = [0.0, *(_FREEDOM * (1.0 - part + z * math.sqrt(part)) ** 3 for z in normal), math.inf]
    return tuple(
        2.0 * points * (math.exp(-below / 2.0) - math.exp(-above / 2.0)) for below, above in itertools.pairwise(ends)
    )


_SCALES = _scales(_GRID)
