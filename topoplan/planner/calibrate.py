"""A few constants of a cluster, estimated from the steps of its runs.

A step is predicted from some fifty constants. What runs can show is how far groups of constants are off together
(KNOBS): all rates of kernels, of links inside a machine, of the network, the fixed times of kernels and messages, the
host. The logarithm of each group's factor has a prior around 0, and its posterior after the runs follows from

    ln(measured step) = ln(predicted step with these factors) + what the formulas miss in this layout + noise

by linearizing the prediction and conditioning on one run after another (a Kalman update) until the factors converge.
The prediction itself is the model: its derivatives are differences of predictions.

Origin of the prior: the narrowest band that a profile may have is the error of the formulas if all constants are known
(`planner/bands.py`). Half of its width is attributed to the layout itself, and shifts only that layout. By how much the
band of this GPU is wider is attributed to its machine: a power limit, a driver, a release, a slow node, what the
formulas miss in this model. That slows kernels, links and messages together, so it is common to all of them; it does
not affect the work of the host's CPU. In addition, each group except the kernels may be off by 40% on its own, because
the band of a step says little about these groups. So a run that is far off shifts other layouts nearly as much as a
single factor would, and it shifts layouts less if they spend their time differently from the run.

How far constants can be off here, and how much layouts differ here, is not known either: both variances have a scaled
inverse chi-squared prior, which makes each a Student t distribution, so that a machine that is far off is believed. The
variances are integrated over on a grid, weighted by the likelihood of the runs. The band of a plan is the remaining
uncertainty: the factors' covariance, propagated through the shares of its step, and what may be the layout's own.

Layouts that use two groups in the same proportion cannot separate them: their shift is then divided as in the prior,
and `Calibration.unseparated` lists them.
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
"""Half width of a band, in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """Constants that are off by a common factor."""

    name: str
    rates: tuple[str, ...] = ()
    """Constants that are divided by the factor."""
    times: tuple[str, ...] = ()
    """Constants that are multiplied by the factor."""
    of_host: bool = False
    """Whether this is work of the host's CPU, which is unaffected by what slows the GPUs down."""

    def factor(self, mine: Profile, base: Profile) -> float:
        """Return how many times longer the knob's work takes with profile `mine` than with profile `base`."""
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
"""Knob -> the factor by which its work takes longer."""
Covariance = Mapping[tuple[str, str], float]
"""Covariance of the logarithms of the factors of two knobs."""
_NAMES = tuple(knob.name for knob in KNOBS)
_UNKNOWN = 0.4
"""Half width, as of a band, of the prior of every knob except kernels, in addition to the machine's: links, networks
and hosts of one kind differ by this much."""
_LAYOUT_SHARE = 0.5
"""Share of the narrowest band's width that is attributed to a layout: of 10%, 5%."""
_FREEDOM, _AT_90_OF_T = 4.0, 2.132
"""Degrees of freedom of both scales: a machine may be slow for reasons that nobody has seen yet, and how much layouts
differ has been seen on few machines. Then the half width of a band, in scales of a Student t with these degrees of
freedom."""
_GRID = 5
"""Points of each scale, all equally likely; more points change nothing."""
_NEARLY = 0.005
"""Factors that differ from 1 by less leave constants unchanged."""
_USED, _COUNTS, _ALIKE = 0.001, 0.03, 0.98
"""Share of the step below which it does not depend on a knob; share below which a knob's separation from others does
not matter; cosine above which two knobs are used alike."""
_DIFFERENCE = 0.02
_CLOSE = 1e-4
_LINEARISATIONS = 8
_FAR = 3.0
"""A run that is off by more than this factor is not of this model, job or cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One layout, and the measured time of its steps."""

    spec: Spec
    layout: Layout
    step_s: float
    error: float = 0.0
    """Standard error of `step_s`, as a fraction."""
    name: str = ""
    """Name for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """What was learned about one knob."""

    knob: Knob
    factor: float
    """Factor by which the knob's work takes longer."""
    spread: float
    """Standard deviation of the factor's logarithm."""
    prior: float
    """Standard deviation of the factor's logarithm before the runs."""

    @property
    def explained_share(self) -> float:
        """Fraction of the prior variance that the runs removed; 0 is nothing."""
        return max(0.0, 1.0 - (self.spread / self.prior) ** 2) if self.prior else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What some runs show about their cluster."""

    shifts: tuple[Shift, ...]
    """Shifts in the order of KNOBS."""
    covariance: Covariance
    scatter: float
    """Standard deviation of what the formulas miss in one layout, as a logarithm."""
    shares: tuple[Mapping[str, float], ...]
    """For each run, the shares of its step by knob."""
    constants: Mapping[str, float]
    """Constants that differ from the GPU's own."""
    before: tuple[float, ...]
    """For each run, predicted over measured step time minus one, with the uncalibrated constants."""
    after: tuple[float, ...]

    @property
    def factors(self) -> Factors:
        """Factor of each knob."""
        return {shift.knob.name: shift.factor for shift in self.shifts}

    @property
    def used(self) -> tuple[str, ...]:
        """Knobs that the steps of these runs depend on."""
        return tuple(name for name in self.factors if any(abs(share[name]) > _USED for share in self.shares))

    @property
    def unseparated(self) -> tuple[tuple[str, str], ...]:
        """Pairs of knobs that matter in these steps and that all of these layouts use in the same proportion."""
        pairs = itertools.combinations([name for name in self.factors if self._part(name, name) > _COUNTS**2], 2)
        return tuple(
            (one, other)
            for one, other in pairs
            if self._part(one, other) > _ALIKE * math.sqrt(self._part(one, one) * self._part(other, other))
        )

    def _part(self, one: str, other: str) -> float:
        return sum(share[one] * share[other] for share in self.shares) / max(1, len(self.shares))

    def band(self, spec: Spec, layout: Layout) -> float:
        """Return the half width of a layout's step-time band as a fraction: nine of ten layouts are expected inside."""
        slope = slopes(spec, layout, self.factors)
        known = sum(slope[one] * slope[other] * value for (one, other), value in self.covariance.items())
        return math.expm1(AT_90_PERCENT * math.sqrt(known + self.scatter**2))


def calibrate(runs: Sequence[Run], spec: Spec | None = None, timed: Sequence[Timed] = ()) -> Calibration:
    """Return the most probable factors, from runs of one cluster and from times measured separately on it.

    `timed` are the separate measurements. `spec` says which cluster it is if there are no runs. Raises InputError for a
    run that is far off.
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
        shares=tuple(row.slopes for row in rows if row.has_layout_error),
        constants=_constants(base, {name: value for name, value in factors.items() if abs(value - 1.0) > _NEARLY}),
        before=before,
        after=after,
    )


def predicted_s(spec: Spec, layout: Layout, factors: Factors) -> float:
    """Return the predicted step of a layout in seconds, with constants that are off by these factors."""
    return engine_of(layout.backend).time(_case(spec, layout.backend, tuple(factors.items())), layout).step_s


@lru_cache(maxsize=64)
def _case(spec: Spec, backend: str, factors: tuple[tuple[str, float], ...]) -> Case:
    """Return one case for all layouts whose slopes are asked for, because results are cached by case."""
    return case_of(_off_by(spec, dict(factors)), backend)


def _off_by(spec: Spec, factors: Factors) -> Spec:
    if all(value == 1.0 for value in factors.values()):
        return spec
    return with_constants(spec, _constants(_stated(spec), factors))


def with_constants(spec: Spec, constants: Mapping[str, float]) -> Spec:
    """Return the spec with these constants in place of its own."""
    own = spec.profile or OwnProfile(gpu=spec.cluster.gpu.name, constants={}, source="", path="")
    return replace(spec, profile=replace(own, constants={**own.constants, **constants}))


def slopes(spec: Spec, layout: Layout, factors: Factors) -> dict[str, float]:
    """Return the derivatives of the step's logarithm by each factor's logarithm: the shares of the step."""
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
    """Return the constants that factors other than 1 change; constants that are fractions do not exceed 1."""
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
    """One observation: `off` is slopes times logarithms of the factors, plus an error of the layout's own and noise."""

    off: float
    slopes: Mapping[str, float]
    noise: float
    has_layout_error: bool
    """Whether the observation is of a layout, which has an error of its own."""


def _rows(runs: Sequence[Run], spec: Spec, timed: Sequence[Timed], factors: Factors) -> list[_Row]:
    rows = [
        _row(run.step_s, partial(predicted_s, run.spec, run.layout), factors, run.error, has_layout_error=True)
        for run in runs
    ]
    for one in timed:

        def seconds(moved: Factors, one: Timed = one) -> float:
            return one.predicted_s(spec.cluster, _stated(_off_by(spec, moved)))

        rows.append(_row(one.seconds, seconds, factors, one.noise, has_layout_error=False))
    return rows


def _row(
    measured_s: float, seconds: Callable[[Factors], float], factors: Factors, noise: float, *, has_layout_error: bool
) -> _Row:
    slope = _slopes(seconds, factors)
    off = math.log(measured_s / seconds(factors))
    off += sum(slope[name] * math.log(value) for name, value in factors.items())
    return _Row(off, slope, noise, has_layout_error)


@dataclass(frozen=True, slots=True)
class _Prior:
    """Variances before any run, with both scales at 1."""

    covariance: Covariance
    own: float
    """Variance of a layout's own error."""


def _scale_of(band: float) -> float:
    """Return the scale of a logarithm's Student t distribution with nine of ten values in a band of this width."""
    return math.log1p(band) / _AT_90_OF_T


def _prior(runs: Sequence[Run], rows: Sequence[_Row], base: Profile) -> _Prior:
    keys = [engine_of(run.layout.backend).bands(case_of(run.spec, run.layout.backend))[1] for run in runs]
    keys = keys or ["time_band"]
    own = _scale_of(_LAYOUT_SHARE * max(NARROWEST[key] for key in keys)) ** 2
    machine = max(_scale_of(getattr(base, key)) for key in keys) ** 2 - own
    # What no run used stays unchanged, whatever is learned about the rest of the machine.
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
    """Variance of a layout's own error."""
    scale: float
    """Scale of the prior's covariance."""
    log_likelihood: float
    """Log-likelihood of the rows, up to a constant."""


def _conditioned(rows: Sequence[_Row], prior: _Prior) -> _Posterior:
    """Return mean and covariance given the rows, integrated over both scales."""
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
    """Return mean and covariance given the rows and both scales."""
    mean = dict.fromkeys(_NAMES, 0.0)
    covariance = {pair: scale * value for pair, value in prior.covariance.items()}
    own, log_likelihood = scale_of_own * prior.own, 0.0
    for row in rows:
        gain = {one: sum(covariance[one, other] * row.slopes[other] for other in _NAMES) for one in _NAMES}
        variance = sum(gain[one] * row.slopes[one] for one in _NAMES) + own * row.has_layout_error + row.noise**2
        innovation = row.off - sum(row.slopes[one] * mean[one] for one in _NAMES)
        log_likelihood -= (math.log(variance) + innovation**2 / variance) / 2.0
        for one in _NAMES:
            mean[one] += gain[one] * innovation / variance
        for one, other in covariance:
            covariance[one, other] -= gain[one] * gain[other] / variance
    return _Posterior(mean, covariance, own, scale, log_likelihood)


def _scales(points: int) -> tuple[float, ...]:
    """Return values of a variance's scale: means of equally likely parts of a scaled inverse chi-squared distribution.

    The parts end at quantiles by Wilson and Hilferty (1931). With four degrees of freedom the integral has a closed
    form.
    """
    part = 2.0 / (9.0 * _FREEDOM)
    normal = [NormalDist().inv_cdf(place / points) for place in range(1, points)]
    ends = [0.0, *(_FREEDOM * (1.0 - part + z * math.sqrt(part)) ** 3 for z in normal), math.inf]
    return tuple(
        2.0 * points * (math.exp(-below / 2.0) - math.exp(-above / 2.0)) for below, above in itertools.pairwise(ends)
    )


_SCALES = _scales(_GRID)
