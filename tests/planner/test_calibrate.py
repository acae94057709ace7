"""The constants of a cluster are recovered from a few of its steps, and what cannot be determined is not claimed."""

import functools
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest

from tests.samples import make_spec
from topoplan.errors import InputError
from topoplan.layout.forms import layout_from_dict
from topoplan.layout.layout import Layout
from topoplan.planner.calibrate import KNOBS, Run, calibrate, predicted_s
from topoplan.planner.measured import MeasuredRun, shipped_runs
from topoplan.planner.predict import predict
from topoplan.planner.validate import at_90_percent, spec_of_run

SPEC = make_spec()
LAYOUTS = [
    layout_from_dict({"backend": "mca", **keys}, SPEC.cluster, SPEC.model, SPEC.job)
    for keys in (
        {"tp": 1, "micro_batch_size": 1, "recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}},
        {"tp": 8, "micro_batch_size": 2, "sequence_parallel": True},
        {"tp": 2, "pp": 2, "micro_batch_size": 1, "sequence_parallel": True},
    )
]
OTHERS = [
    layout_from_dict({"backend": "mca", **keys}, SPEC.cluster, SPEC.model, SPEC.job)
    for keys in (
        {"tp": 4, "micro_batch_size": 2, "sequence_parallel": True},
        {"tp": 2, "micro_batch_size": 1},
        {"tp": 4, "pp": 4, "micro_batch_size": 1, "sequence_parallel": True},
    )
]


def run_of(layout: Layout, step_s: float) -> Run:
    return Run(spec=SPEC, layout=layout, step_s=step_s, error=0.005, name="log")


@pytest.mark.parametrize(
    "truth",
    [{"kernels": 1.3}, {"links inside a machine": 1.4}, {"kernels": 1.2, "links inside a machine": 0.9}, {}],
    ids=str,
)
def test_a_cluster_that_is_off_is_found_from_three_layouts(truth: dict[str, float]) -> None:
    found = calibrate([run_of(layout, predicted_s(SPEC, layout, truth)) for layout in LAYOUTS])
    for layout in OTHERS:
        real = predicted_s(SPEC, layout, truth)
        assert predicted_s(SPEC, layout, found.factors) == pytest.approx(real, rel=0.025)
        assert abs(real / predicted_s(SPEC, layout, found.factors) - 1.0) < found.band(SPEC, layout) < 0.11
    assert max(map(abs, found.after)) < 0.035


def test_one_layout_moves_what_it_cannot_tell_apart_by_what_was_uncertain() -> None:
    layout = LAYOUTS[1]
    found = calibrate([run_of(layout, 1.1 * predicted_s(SPEC, layout, {}))])
    assert all(1.0 <= shift.factor < 1.25 for shift in found.shifts)
    assert ("kernels", "links inside a machine") in found.unseparated
    assert 1.02 < (1.0 + found.after[0]) / (1.0 + found.before[0]) < 1.09, "a part is the layout's own"
    all_three = calibrate([run_of(one, 1.1 * predicted_s(SPEC, one, {})) for one in LAYOUTS])
    assert ("kernels", "links inside a machine") not in all_three.unseparated
    assert all_three.band(SPEC, OTHERS[0]) < found.band(SPEC, OTHERS[0])


def test_what_is_off_as_a_whole_moves_all_that_ran_but_the_host() -> None:
    layout = LAYOUTS[2]
    found = calibrate([run_of(layout, 1.3 * predicted_s(SPEC, layout, {}))])
    for knob in KNOBS:
        off = found.factors[knob.name]
        assert off < 1.05 if knob.of_host or knob.name not in found.used else off > 1.15, knob.name
    kernels, network = (found.covariance[name, name] for name in ("kernels", "links between machines"))
    assert network > 0.2**2 > kernels, "what hardly ran is as unknown as before"


def test_no_share_is_more_than_all() -> None:
    fast, faster = (predicted_s(SPEC, LAYOUTS[0], {"kernels": factor}) for factor in (0.4, 0.1))
    assert fast == faster < predicted_s(SPEC, LAYOUTS[0], {"kernels": 0.9})


def test_steps_that_are_far_off_are_of_something_else() -> None:
    layout = LAYOUTS[0]
    with pytest.raises(InputError, match="the log of another plan: give the one that ran, with --plan"):
        calibrate([run_of(layout, 4.0 * predicted_s(SPEC, layout, {}))])


@dataclass(frozen=True)
class Pair:
    """One run as the log, another run of its group predicted: the sizes of its errors."""

    before: float
    factor: float
    """Error with a single factor that makes the log right."""
    after: float
    held: bool
    """Whether the measurement is inside the band."""


@pytest.mark.parametrize(
    ("is_megatron", "own_kernels", "of_before", "of_factor", "held"),
    [
        pytest.param(True, True, 1.0, 1.05, 0.9, id="megatron"),
        # A machine that is off as a whole, of which only the model of its GPUs is known.
        pytest.param(True, False, 0.4, 0.9, 0.85, id="a machine that is off"),
        # Two hosts, one of which waits for its CPU: a run on the other host does not show that. Few runs, and far off.
        pytest.param(False, True, 1.01, 0.8, 0.7, id="other trainers"),
    ],
)
def test_a_measured_run_makes_predictions_of_others_on_its_machine_better(
    is_megatron: bool, own_kernels: bool, of_before: float, of_factor: float, held: float
) -> None:
    """The 90th percentile of errors is at most a fraction of what it was, and of what a single factor gives."""
    groups = {name: runs for name, runs in _groups().items() if (runs[0].layout.backend == "megatron") == is_megatron}
    pairs = [pair for name, runs in groups.items() for pair in _pairs(name, own_kernels or not runs[0].spec.profile)]
    before, factor, after = ([getattr(one, key) for one in pairs] for key in ("before", "factor", "after"))
    assert len(pairs) > (50 if is_megatron else 5)
    assert statistics.median(after) < statistics.median(before)
    assert at_90_percent(after) < of_before * at_90_percent(before)
    assert at_90_percent(after) < of_factor * at_90_percent(factor)
    assert statistics.mean(one.held for one in pairs) >= held


@functools.cache
def _groups() -> dict[str, list[Run]]:
    """Return runs of one machine, model and job with different layouts, in groups of two or more."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in shipped_runs():
        if run.rank_group and not run.left_out:
            groups[run.rank_group] += _runs(run)
    return {name: runs for name, runs in groups.items() if len(runs) > 1}


@functools.cache
def _pairs(group: str, own_kernels: bool) -> list[Pair]:
    runs = [one if own_kernels else replace(one, spec=replace(one.spec, profile=None)) for one in _groups()[group]]
    ratio = {one.name: one.step_s / predicted_s(one.spec, one.layout, {}) for one in runs}
    found = []
    for one in runs:
        learnt = calibrate([one])
        for other in runs:
            if other is one:
                continue
            after = abs(other.step_s / predicted_s(other.spec, other.layout, learnt.factors) - 1.0)
            held = after < learnt.band(other.spec, other.layout)
            found.append(
                Pair(abs(ratio[other.name] - 1.0), abs(ratio[other.name] / ratio[one.name] - 1.0), after, held)
            )
    return found


def _runs(run: MeasuredRun) -> list[Run]:
    """Return the runs with their measured steps, if the source has a speed."""
    spec, measured = spec_of_run(run), run.measured
    plan = predict(spec, run.document["layout"])
    if measured.tokens_per_s_per_gpu:
        step_s = plan.time.step_s * plan.tokens_per_s_per_gpu / measured.tokens_per_s_per_gpu
    elif measured.step_s:
        step_s = measured.step_s
    elif measured.tflops_per_gpu:
        step_s = plan.time.step_s * plan.model_flops_per_s_per_gpu / 1e12 / measured.tflops_per_gpu
    else:
        return []
    return [Run(spec=spec, layout=plan.layout, step_s=step_s, name=run.id)]


def test_the_order_of_the_runs_does_not_count() -> None:
    off = zip(LAYOUTS, (1.1, 1.3, 1.2), strict=True)
    runs = [run_of(layout, factor * predicted_s(SPEC, layout, {})) for layout, factor in off]
    one, other = calibrate(runs), calibrate(runs[::-1])
    assert all(math.isclose(one.factors[name], other.factors[name], rel_tol=1e-3) for name in one.factors)
