"""What calibration is worth: simulated clusters whose true constants are not the catalog's, and a few of their steps.

    python tests/bench/calibrating.py --draws 200 --plans 3

Each draw is a cluster, a model and a job. The true constants are up to 40% off, of kernels, links, fixed times, each
alone or together; a straggler slows some clusters down; bandwidth depends on size otherwise than predicted; each layout
is off by up to 5% of its own; steps scatter by 3%, and the first is slow. The best plans, each as the last calibration
has it, run for 20 steps. Then all other plans are predicted, and the best is chosen.

Beside it stands what can be reached: whoever knew every constant, and not what layouts are off by of their own, tries
as many, the best by these constants, and chooses in the same way.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from topoplan.engines.registry import engine_of
from topoplan.errors import TopoplanError
from topoplan.layout.layout import Layout
from topoplan.planner.calibrate import KNOBS, Calibration, Run, calibrate
from topoplan.planner.logged import Interval, steady
from topoplan.planner.search import rank
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.load import spec_from_document
from topoplan.specs.profile import OwnProfile
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

GPUS = ("a100-sxm-80gb", "a100-pcie-80gb", "h20-sxm-96gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb")
MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-70B")
KINDS = (
    ("kernels",),
    ("links inside a machine", "links between machines"),
    ("fixed times of kernels and messages",),
    (),
)
"""Knobs that are off; none stands for all."""
MOST_OFF, OWN, SCATTER = math.log(1.4), 0.05, 0.03
STEPS = 20
NOISE = SCATTER / math.sqrt(STEPS - 1)
BANDS = 8
"""Plans that did not run, at random, whose bands are looked at."""
BEST, OTHERS = 60, 40
"""Layouts that are looked at: so many of the best, and of the rest at random."""


@dataclass(frozen=True)
class Draw:
    """What came of one."""

    before: float
    """Median error over all plans that did not run, as the constants were."""
    after: float
    lost_before: float
    """What the chosen plan takes longer than the truly best, by prediction alone."""
    lost: float
    lost_at_least: float
    """The same where every constant is known."""
    held: float
    """Share of the bands that hold the truth."""
    width: float
    """Half of it, as a fraction: their median."""


def steps_s(spec: Spec, layouts: Sequence[Layout]) -> list[float]:
    cases = {backend: case_of(spec, backend) for backend in {layout.backend for layout in layouts}}
    return [engine_of(one.backend).time(cases[one.backend], one).step_s for one in layouts]


def with_constants(spec: Spec, constants: dict[str, float]) -> Spec:
    return replace(spec, profile=OwnProfile(gpu=spec.cluster.gpu.name, constants=constants, source="", path=""))


def true_constants(spec: Spec, draw: random.Random) -> dict[str, float]:
    base, found = profile_of(spec.cluster.gpu), dict[str, float]()
    off = draw.choice(KINDS)
    straggler = draw.choice((1.0, 1.0, draw.uniform(1.05, 1.2)))
    for knob in KNOBS:
        factor = math.exp(draw.uniform(-MOST_OFF, MOST_OFF)) if not off or knob.name in off else 1.0
        factor *= straggler if knob.name == "kernels" else 1.0
        for key in knob.rates:
            value = getattr(base, key)
            found[key] = min(1.0, value / factor) if value <= 1.0 else value / factor
        found |= {key: getattr(base, key) * factor for key in knob.times}
    for key in ("tree_efficiency", "ll_efficiency"):
        found[key] = min(1.0, getattr(base, key) * draw.uniform(0.7, 1.3))
    found["network_hop_latency_s"] *= draw.uniform(1.0, 2.0)
    return found


def drawn_job(draw: random.Random) -> tuple[Spec, list[Layout]]:
    """A job of which eight plans fit, and its layouts, best first."""
    while True:
        document = {
            "cluster": {"gpu": draw.choice(GPUS), "nodes": draw.choice((1, 2, 4, 8)), "gpus_per_node": 8},
            "model": {"name": draw.choice(MODELS)},
            "job": {
                "seq_len": draw.choice((2048, 4096, 8192, 16384)),
                "global_batch_size": draw.choice((32, 64, 128, 256)),
            },
        }
        spec = spec_from_document(document, where="a draw")
        try:
            layouts = list(rank(spec).plans.layouts)
        except TopoplanError:
            continue
        if len(layouts) >= 8:
            rest = layouts[BEST:]
            return spec, layouts[:BEST] + draw.sample(rest, min(OTHERS, len(rest)))


def measured_s(true_s: float, draw: random.Random) -> float:
    """The mean of the steps that count, of a run of 20."""
    each = [true_s * max(0.5, draw.gauss(1.0, SCATTER)) * (5.0 if step == 1 else 1.0) for step in range(1, STEPS + 1)]
    kept, _ = steady([Interval(step, 1, seconds, aside=False) for step, seconds in enumerate(each, 1)])
    return statistics.mean(one.seconds for one in kept)


def measured_best(
    true: Sequence[float], predict: Callable[[Mapping[int, float]], Sequence[float]], plans: int, draw: random.Random
) -> tuple[dict[int, float], list[float]]:
    """(steps of those that ran, what is known of all): each time the best of those that did not run is tried."""
    measured: dict[int, float] = {}
    predicted = predict(measured)
    for _ in range(plans):
        best = min((place for place in range(len(true)) if place not in measured), key=predicted.__getitem__)
        measured[best] = measured_s(true[best], draw)
        predicted = predict(measured)
    return measured, [measured.get(place, seconds) for place, seconds in enumerate(predicted)]


def one_draw(seed: int, plans: int) -> Draw:
    draw = random.Random(seed)
    spec, layouts = drawn_job(draw)
    by_constants = steps_s(with_constants(spec, true_constants(spec, draw)), layouts)
    true = [seconds * draw.uniform(1.0 - OWN, 1.0 + OWN) for seconds in by_constants]
    before = steps_s(spec, layouts)

    def calibrated(measured: Mapping[int, float]) -> Calibration:
        return calibrate([Run(spec=spec, layout=layouts[one], step_s=s, error=NOISE) for one, s in measured.items()])

    def predict(measured: Mapping[int, float]) -> list[float]:
        return steps_s(with_constants(spec, dict(calibrated(measured).constants)), layouts) if measured else before

    measured, known = measured_best(true, predict, plans, draw)
    _, reachable = measured_best(true, lambda _: by_constants, plans, draw)
    others = [place for place in range(len(layouts)) if place not in measured]
    found = calibrated(measured)
    bands = {place: found.band(spec, layouts[place]) for place in draw.sample(others, min(BANDS, len(others)))}

    def error(found: Sequence[float]) -> float:
        return statistics.median(abs(found[place] / true[place] - 1.0) for place in others)

    def lost(found: Sequence[float]) -> float:
        return true[min(range(len(layouts)), key=found.__getitem__)] / min(true) - 1.0

    return Draw(
        before=error(before),
        after=error(known),
        lost_before=lost(before),
        lost=lost(known),
        lost_at_least=lost(reachable),
        held=statistics.mean(abs(true[place] / known[place] - 1.0) <= band for place, band in bands.items()),
        width=statistics.median(bands.values()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--plans", type=int, default=3, help="how many run")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    draws = [one_draw(asked.seed + number, asked.plans) for number in range(asked.draws)]
    before, after = (statistics.median(getattr(one, name) for one in draws) for name in ("before", "after"))
    within = sum(one.after <= 0.06 for one in draws) / len(draws)
    print(f"calibration, {len(draws)} simulated clusters: median error of the other plans {100 * before:.1f}% before,")
    print(f"  {100 * after:.1f}% after {asked.plans} plans of {STEPS} steps; at most 6% in {100 * within:.0f}% of them")
    held, width = statistics.mean(one.held for one in draws), statistics.median(one.width for one in draws)
    print(f"  their bands hold {100 * held:.0f}%, and are {100 * width:.0f}% either way")
    ways = {
        "lost_before": "by prediction alone",
        "lost": "after calibration",
        "lost_at_least": "where all constants are known",
    }
    for name, words in ways.items():
        good = sum(getattr(one, name) <= 0.02 for one in draws) / len(draws)
        worst = max(getattr(one, name) for one in draws)
        print(f"  chosen plan within 2% of the best in {100 * good:.0f}% {words}; worst {100 * worst:.1f}%")


if __name__ == "__main__":
    main()
