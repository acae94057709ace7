"""A few constants of a cluster, from the steps of its runs.

A step is predicted from some fifty constants. What runs can tell is how far groups of them are off together (KNOBS):
all rates of kernels, of links inside a machine, of the network, the fixed times of kernels and messages, the host. The
logarithm of each group's factor has a prior around 0, and the most probable factors are found from

    ln(measured step) = ln(predicted step with these factors) + what the formulas miss in this layout + noise

by linearising the prediction and conditioning on one run after the other (a Kalman update), until nothing moves. The
prediction itself is the model: its derivatives are differences of predictions.

Where the widths come from: the narrowest band that a profile may have is what formulas are off by where all constants
are known (`planner/bands.py`). Half of its variance is taken to be the layout's own, and moves that layout alone; what
the band of this GPU is wider by is the rate of its kernels, which most of a step is spent on. So on a GPU that was
measured well a run shifts others by half of what it was off, and on one that was not by nearly all. All other groups
may be off by a fifth: a step's band says little of them. Two things are learnt on the way: how far off constants can
be here (a Student t, so that a machine which is off by far is believed), and how much layouts differ from each other.

Layouts that use two groups in the same proportion cannot tell them apart: their shift is then divided as the prior has
it, and `Calibration.unseparated` says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from types import MappingProxyType

from topoplan.engines.registry import engine_of
from topoplan.errors import InputError
from topoplan.layout.layout import Layout
from topoplan.planner.bands import NARROWEST
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
    Knob(name="launches and work of the host", times=("eager_launch_s", "zero3_hook_s", "step_overhead_s")),
    Knob(name="steps of Adam on the host", rates=("host_adam_bytes_per_s",)),
)
Factors = Mapping[str, float]
"""Knob -> what its work takes longer by, as a factor."""
_UNKNOWN = 0.2
"""Width of the prior of all but kernels: links, networks and hosts of a kind differ by so much."""
_FREEDOM, _FREEDOM_OF_SCATTER = 4.0, 20.0
"""Degrees of freedom of the t of a factor, and of the scatter of layouts. A machine may be slow for reasons that nobody
has seen yet; how well formulas tell layouts apart has been seen on many."""
_NEARLY = 0.005
"""Constants that are off by less are left as they are."""
_COUNTS, _ALIKE = 0.03, 0.98
"""Below this share of the step nobody asks what it is told apart from; above this cosine two knobs are used alike."""
_DIFFERENCE = 0.05
_LINEARISATIONS, _ROUNDS = 8, 40
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
    """In the order of KNOBS; of those that the steps of these runs depend on."""
    covariance: Mapping[tuple[str, str], float]
    """Of the logarithms of the factors."""
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
    def unseparated(self) -> tuple[tuple[str, str], ...]:
        """Knobs that count in these steps, and that all of these layouts use in the same proportion."""
        pairs = itertools.combinations([name for name in self.factors if self._part(name, name) > _COUNTS**2], 2)
        return tuple(
            (one, other)
            for one, other in pairs
            if self._part(one, other) > _ALIKE * math.sqrt(self._part(one, one) * self._part(other, other))
        )

    def _part(self, one: str, other: str) -> float:
        return sum(share[one] * share[other] for share in self.shares) / len(self.shares)

    def band(self, spec: Spec, layout: Layout) -> float:
        """Half width of the band around the step of a layout, as a fraction: nine of ten are expected in it."""
        slope = slopes(spec, layout, self.factors)
        known = sum(slope[one] * slope[other] * value for (one, other), value in self.covariance.items())
        return math.expm1(AT_90_PERCENT * math.sqrt(known + self.scatter**2))


def calibrate(runs: Sequence[Run]) -> Calibration:
    """The most probable factors, from runs of one cluster with one profile. Raises InputError for a run far off."""
    base = _stated(runs[0].spec)
    steps = [predicted_s(run.spec, run.layout, {}) for run in runs]
    before = tuple(step / run.step_s - 1.0 for step, run in zip(steps, runs, strict=True))
    for run, step in zip(runs, steps, strict=True):
        if not 1.0 / _FAR < step / run.step_s < _FAR:
            what = f"a step took {run.step_s:.3g} s, and {step:.3g} s are predicted of {run.layout.id}"
            raise InputError(
                what, where=run.name, expected="expected a log of this model, job and cluster", remedy="see --plan"
            )
    prior, scatter = _widths(runs, base)
    posterior, rows = _Posterior({}, {}, 0.0, {}), list[_Row]()
    factors: Factors = {}
    for _ in range(_LINEARISATIONS):
        rows = [_row(run, factors) for run in runs]
        posterior = _conditioned(rows, prior, scatter)
        moved = {name: math.exp(value) for name, value in posterior.mean.items()}
        if all(abs(math.log(value / factors.get(name, 1.0))) < 1e-4 for name, value in moved.items()):
            break
        factors = moved
    after = tuple(predicted_s(run.spec, run.layout, factors) / run.step_s - 1.0 for run in runs)
    return Calibration(
        shifts=tuple(
            Shift(
                knob=knob,
                factor=factors.get(knob.name, 1.0),
                spread=math.sqrt(posterior.covariance[knob.name, knob.name]),
                prior=posterior.prior[knob.name],
            )
            for knob in KNOBS
            if knob.name in prior
        ),
        covariance=posterior.covariance,
        scatter=posterior.scatter,
        shares=tuple(row.slopes for row in rows),
        constants=_constants(base, {name: value for name, value in factors.items() if abs(value - 1.0) > _NEARLY}),
        before=before,
        after=after,
    )


def predicted_s(spec: Spec, layout: Layout, factors: Factors) -> float:
    """The step of a layout whose constants are off by these factors."""
    if any(value != 1.0 for value in factors.values()):
        base = _stated(spec)
        given = dict(spec.profile.constants) if spec.profile else {}
        own = OwnProfile(
            gpu=spec.cluster.gpu.name, constants={**given, **_constants(base, factors)}, source="", path=""
        )
        spec = replace(spec, profile=own)
    return engine_of(layout.backend).time(case_of(spec, layout.backend), layout).step_s


def slopes(spec: Spec, layout: Layout, factors: Factors) -> dict[str, float]:
    """By how much the logarithm of the step goes up with that of each factor: the shares of the step."""
    found = {}
    for knob in KNOBS:
        at = factors.get(knob.name, 1.0)
        ahead, behind = (
            predicted_s(spec, layout, {**factors, knob.name: at * math.exp(move)})
            for move in (_DIFFERENCE, -_DIFFERENCE)
        )
        found[knob.name] = math.log(ahead / behind) / (2.0 * _DIFFERENCE)
    return found


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


def _widths(runs: Sequence[Run], base: Profile) -> tuple[dict[str, float], float]:
    """(standard deviation of the logarithm of each knob's factor, of what is a layout's own) before any run."""
    keys = [engine_of(run.layout.backend).bands(case_of(run.spec, run.layout.backend))[1] for run in runs]
    own = max(NARROWEST[key] / AT_90_PERCENT for key in keys) ** 2 / 2.0
    machine = max(getattr(base, key) / AT_90_PERCENT for key in keys) ** 2 - own
    shares = [slopes(run.spec, run.layout, {}) for run in runs]
    used = [knob.name for knob in KNOBS if any(abs(share[knob.name]) > 1e-3 for share in shares)]
    kernels = math.sqrt(max(machine, own))
    return {name: kernels if name == KNOBS[0].name else _UNKNOWN for name in used}, math.sqrt(own)


@dataclass(frozen=True, slots=True)
class _Row:
    """One run, linearised: `off` is slopes times the logarithms of the factors, plus what is the layout's own."""

    off: float
    slopes: Mapping[str, float]
    noise: float


def _row(run: Run, factors: Factors) -> _Row:
    slope = slopes(run.spec, run.layout, factors)
    off = math.log(run.step_s / predicted_s(run.spec, run.layout, factors))
    off += sum(slope[name] * math.log(value) for name, value in factors.items())
    return _Row(off, slope, run.error)


@dataclass(frozen=True, slots=True)
class _Posterior:
    mean: Mapping[str, float]
    covariance: Mapping[tuple[str, str], float]
    scatter: float
    prior: Mapping[str, float]
    """The widths of the prior, as wide as they turned out."""


def _conditioned(rows: Sequence[_Row], prior: Mapping[str, float], scatter: float) -> _Posterior:
    """Mean and covariance, given the rows, with the scales of the prior and of the scatter that go with them.

    Both scales have an inverse chi-squared prior; expectation and maximisation take turns (Dempster, Laird and Rubin
    1977): a normal with such a scale is a Student t.
    """
    names, width, own = list(prior), dict(prior), scatter**2
    mean: dict[str, float] = {}
    covariance: dict[tuple[str, str], float] = {}
    for _ in range(_ROUNDS):
        mean = dict.fromkeys(names, 0.0)
        covariance = {(one, other): width[one] ** 2 if one == other else 0.0 for one in names for other in names}
        for row in rows:
            gain = {one: sum(covariance[one, other] * row.slopes[other] for other in names) for one in names}
            variance = sum(gain[one] * row.slopes[one] for one in names) + own + row.noise**2
            innovation = row.off - sum(row.slopes[one] * mean[one] for one in names)
            for one in names:
                mean[one] += gain[one] * innovation / variance
                for other in names:
                    covariance[one, other] -= gain[one] * gain[other] / variance
        left = sum(
            (row.off - sum(row.slopes[one] * mean[one] for one in names)) ** 2
            + sum(row.slopes[one] * row.slopes[other] * covariance[one, other] for one in names for other in names)
            for row in rows
        )
        for one in names:
            seen = mean[one] ** 2 + covariance[one, one]
            width[one] = math.sqrt((_FREEDOM * prior[one] ** 2 + seen) / (_FREEDOM + 1.0))
        own = (_FREEDOM_OF_SCATTER * scatter**2 + left) / (_FREEDOM_OF_SCATTER + len(rows))
    return _Posterior(MappingProxyType(mean), MappingProxyType(covariance), math.sqrt(own), width)
