"""What calibration is worth: simulated clusters whose true constants are not the catalog's, and a few of their steps.

    python tests/bench/calibrating.py --draws 200 --plans 4

Each draw is a cluster, a model and a job. The true constants are up to 40% off, of kernels, links, fixed times, each
alone or together; a straggler slows some clusters down; bandwidth depends on size otherwise than predicted; each layout
is off by up to 5% of its own; steps scatter by 3%, and the first is slow. The plans that `tune` chooses, each knowing
what those before took, run for 20 steps. Then all other plans are predicted, and the best is chosen as `tune` does.

What a layout is off by of its own is drawn for each apart; with --alike, neighbours that differ in micro batch,
recomputation or chunks alone are off by the same.

Beside it stands what can be reached: whoever knew every constant, and not what layouts are off by of their own, tries
as many, the best by these constants, and chooses in the same way.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from topoplan.engines.registry import engine_of
from topoplan.errors import TopoplanError
from topoplan.layout.layout import Layout
from topoplan.planner.calibrate import KNOBS, Calibration, Run, calibrate
from topoplan.planner.choosing import WITHIN, Contender, family, standing
from topoplan.planner.logged import Interval, steady
from topoplan.planner.plan import Plan, Plans, Ranking
from topoplan.planner.rank import CAVEAT_COST
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
    ran: int
    """Trials."""
    lost_before: float
    """What the chosen plan takes longer than the truly best, by prediction alone."""
    lost: float
    lost_at_least: float
    """The same where every constant is known."""
    luck: float
    """How much faster the best is of its own than its constants say."""
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


def drawn_job(draw: random.Random) -> Ranking:
    """Of a job of which eight plans fit: the best of them, and some of the others."""
    while True:
        document = {
            "cluster": {"gpu": draw.choice(GPUS), "nodes": draw.choice((1, 2, 4, 8)), "gpus_per_node": 8},
            "model": {"name": draw.choice(MODELS)},
            "job": {
                "seq_len": draw.choice((2048, 4096, 8192, 16384)),
                "global_batch_size": draw.choice((32, 64, 128, 256)),
            },
        }
        try:
            found = rank(spec_from_document(document, where="a draw"))
        except TopoplanError:
            continue
        if len(found.plans) >= 8:
            rest = range(BEST, len(found.plans))
            return taking(found, [*range(len(found.plans))][:BEST] + draw.sample(rest, min(OTHERS, len(rest))))


def taking(ranking: Ranking, places: Sequence[int], seconds: Sequence[float] | None = None) -> Ranking:
    """The plans at these places alone, in this order; with other steps, given by place."""

    def plan(place: int) -> Plan:
        one = ranking.plans[places[place]]
        return one if seconds is None else replace(one, time=replace(one.time, step_s=seconds[places[place]]))

    return replace(ranking, plans=Plans([ranking.plans.layouts[place] for place in places], plan))


def measured_s(true_s: float, draw: random.Random) -> float:
    """The mean of the steps that count, of a run of 20."""
    each = [true_s * max(0.5, draw.gauss(1.0, SCATTER)) * (5.0 if step == 1 else 1.0) for step in range(1, STEPS + 1)]
    kept, _ = steady([Interval(step, 1, seconds, aside=False) for step, seconds in enumerate(each, 1)])
    return statistics.mean(one.seconds for one in kept)


@dataclass
class Tuned:
    """Trials, each by its place among the layouts."""

    measured: dict[int, float]
    chosen: int
    calibration: Calibration | None
    predicted: Sequence[float]
    """Of all layouts, with what was learnt."""


def tuned(ranking: Ranking, before: Sequence[float], true: Sequence[float], plans: int, draw: random.Random) -> Tuned:
    """As `tune` does it, but for the search after each trial, which here is of the same layouts."""
    spec, layouts = ranking.spec, ranking.plans.layouts
    place_of = {layout.id: place for place, layout in enumerate(layouts)}
    contenders: dict[str, Contender] = {}
    runs: list[Run] = []
    now, found, predicted = ranking, None, before
    while True:
        known = standing(spec, now, found, contenders)
        assert known is not None
        if len(runs) == plans or known.next is None or known.is_clear:
            measured = {place_of[name]: one.step_s for name, one in contenders.items()}
            return Tuned(measured, place_of[known.leader.plan.id], found, predicted)
        plan = known.next
        step_s = measured_s(true[place_of[plan.id]], draw)
        contenders[plan.id] = Contender(plan=plan, step_s=step_s, error=NOISE)
        runs.append(Run(spec=spec, layout=plan.layout, step_s=step_s, error=NOISE))
        found = calibrate(runs)
        predicted = steps_s(with_constants(spec, dict(found.constants)), layouts)
        now = taking(ranking, sorted(range(len(layouts)), key=predicted.__getitem__), predicted)


def reached(
    worth: Sequence[float], true: Sequence[float], plans: int, draw: random.Random
) -> tuple[int, Mapping[int, float]]:
    """The choice where all constants are known, by what layouts are worth by them; and the best, which ran."""
    order = sorted(range(len(true)), key=worth.__getitem__)
    ran = {place: measured_s(true[place], draw) for place in order[:plans]}
    return min(order, key=lambda place: ran.get(place, worth[place] * (1.0 + WITHIN))), ran


def one_draw(seed: int, plans: int, *, alike: bool = False) -> Draw:
    draw = random.Random(seed)
    ranking = drawn_job(draw)
    spec, layouts = ranking.spec, ranking.plans.layouts
    by_constants = steps_s(with_constants(spec, true_constants(spec, draw)), layouts)
    own: dict[object, float] = {}
    keys = [family(layout) if alike else layout.id for layout in layouts]
    offs = [own.setdefault(key, draw.uniform(1.0 - OWN, 1.0 + OWN)) for key in keys]
    true = [seconds * off for seconds, off in zip(by_constants, offs, strict=True)]
    before = steps_s(spec, layouts)
    done = tuned(ranking, before, true, plans, draw)
    others = [place for place in range(len(layouts)) if place not in done.measured]
    shown = draw.sample(others, min(BANDS, len(others)))
    bands = {place: done.calibration.band(spec, layouts[place]) for place in shown}

    def error(found: Sequence[float]) -> float:
        return statistics.median(abs(found[place] / true[place] - 1.0) for place in others)

    # Known trouble of a plan has to be paid for until it has run, as `tune` and `rank` have it.
    trouble = [1.0 + CAVEAT_COST * bool(plan.caveats) for plan in ranking.plans]
    reachable, ran = reached([a * b for a, b in zip(by_constants, trouble, strict=True)], true, plans, draw)

    def worth(ran: Mapping[int, float]) -> list[float]:
        return [seconds * (1.0 if one in ran else trouble[one]) for one, seconds in enumerate(true)]

    def lost(place: int, ran: Mapping[int, float]) -> float:
        return worth(ran)[place] / min(worth(ran)) - 1.0

    return Draw(
        before=error(before),
        after=error(done.predicted),
        ran=len(done.measured),
        lost_before=lost(min(range(len(layouts)), key=lambda place: before[place] * trouble[place]), {}),
        lost=lost(done.chosen, done.measured),
        lost_at_least=lost(reachable, ran),
        luck=1.0 - offs[min(range(len(true)), key=worth(done.measured).__getitem__)],
        held=statistics.mean(abs(true[place] / done.predicted[place] - 1.0) <= band for place, band in bands.items()),
        width=statistics.median(bands.values()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--plans", type=int, default=4, help="how many run at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alike", action="store_true", help="neighbours are off by the same of their own")
    asked = parser.parse_args()
    draws = [one_draw(asked.seed + number, asked.plans, alike=asked.alike) for number in range(asked.draws)]
    before, after = (statistics.median(getattr(one, name) for one in draws) for name in ("before", "after"))
    within = sum(one.after <= 0.06 for one in draws) / len(draws)
    print(f"calibration, {len(draws)} simulated clusters: median error of the other plans {100 * before:.1f}% before,")
    ran = statistics.mean(one.ran for one in draws)
    print(f"  {100 * after:.1f}% after {ran:.1f} plans of {STEPS} steps; at most 6% in {100 * within:.0f}% of them")
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
    if missed := [100 * one.luck for one in draws if one.lost > 0.02]:
        middle, least = statistics.median(missed), min(missed)
        print(f"  where it is not, the best is faster of its own by {middle:.1f}%, and by {least:.1f}% at least")


if __name__ == "__main__":
    main()
