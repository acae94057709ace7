"""Which plans are tried, and when tuning ends."""

import random
from dataclasses import replace

import pytest

from tests.samples import make_spec
from topoplan.layout.layout import Layout
from topoplan.planner.calibrate import KNOBS, Run, calibrate, predicted_s
from topoplan.planner.choosing import CLEAR, Contender, Standing, family, may_be_over, standing
from topoplan.planner.plan import Plan, Plans, Ranking
from topoplan.planner.rank import TIE
from topoplan.planner.search import rank
from topoplan.planner.tuning import Tried, Tuning, expected, hang_after_s, trial_steps

SPEC = make_spec()


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    return rank(SPEC)


def search(ranking: Ranking, hidden: dict[str, float], most: int, failed: tuple[int, ...] = ()) -> list[Standing]:
    """Run trials of plans whose steps follow hidden factors plus 2% of their own; some trials report no step."""
    draw, found, runs = random.Random(1), [], list[Run]()
    measured: dict[str, Contender] = {}
    lost: set[str] = set()
    for number in range(most + 1):
        calibration = calibrate(runs) if runs else None
        now = ranking if not calibration else rank_with(ranking, dict(calibration.factors))
        found.append(known := standing(SPEC, now, calibration, measured, lost))
        assert known is not None
        if known.next is None or known.is_clear:
            break
        if number in failed:
            lost.add(known.next.id)
            continue
        step_s = predicted_s(SPEC, known.next.layout, hidden) * draw.uniform(0.98, 1.02)
        measured[known.next.id] = Contender(plan=known.next, step_s=step_s, error=0.01)
        runs.append(Run(spec=SPEC, layout=known.next.layout, step_s=step_s, error=0.01))
    return found


def rank_with(ranking: Ranking, factors: dict[str, float]) -> Ranking:
    """Return the ranking's best plans in the order that other constants give."""
    steps = {one.id: predicted_s(SPEC, one, factors) for one in ranking.plans.layouts[:40]}
    places = sorted(range(len(steps)), key=lambda place: steps[ranking.plans.layouts[place].id])

    def plan(place: int) -> Plan:
        one = ranking.plans[places[place]]
        return replace(one, time=replace(one.time, step_s=steps[one.id]))

    return replace(ranking, plans=Plans([ranking.plans.layouts[place] for place in places], plan))


@pytest.mark.parametrize(
    "hidden",
    [{}, {KNOBS[0].name: 1.3}, {KNOBS[2].name: 2.5}, {KNOBS[0].name: 0.8, KNOBS[1].name: 1.5, KNOBS[3].name: 1.4}],
    ids=["as predicted", "kernels", "network", "several"],
)
def test_few_trials_find_the_best_and_end(ranking: Ranking, hidden: dict[str, float]) -> None:
    found = search(ranking, hidden, 6)
    last = found[-1]
    best_s = min(predicted_s(SPEC, one, hidden) for one in ranking.plans.layouts[:40])
    assert predicted_s(SPEC, last.leader.plan.layout, hidden) <= 1.04 * best_s  # each is off by 2% of its own
    tried = [one.next.layout for one in found[:-1] if one.next]
    steps = [predicted_s(SPEC, layout, {}) for layout in (tried[0], ranking.plans.layouts[0])]
    assert steps[0] <= steps[1] <= (1.0 + TIE) * steps[0]  # of equally fast plans the ranking has the lighter one first
    assert len({layout.id for layout in tried}) == len(tried)
    assert family(tried[1]) != family(tried[0])


def test_it_ends_when_no_band_reaches_below_the_leader(ranking: Ranking) -> None:
    """If all others are far behind, one trial is enough; a close rival has to be tried."""
    first = ranking.plans[0]
    measured = {first.id: Contender(plan=first, step_s=first.time.step_s, error=0.01)}
    run = Run(spec=SPEC, layout=first.layout, step_s=first.time.step_s, error=0.01)
    far = far_behind(ranking, 2.0)
    known = standing(SPEC, far, calibrate([run]), measured)
    assert (known.leader.plan.id, known.is_clear, known.next) == (first.id, True, None)
    near = standing(SPEC, far_behind(ranking, 1.0), calibrate([run]), measured)
    assert near.next is not None
    assert not near.is_clear
    assert near.chance > CLEAR > known.chance


def far_behind(ranking: Ranking, times: float) -> Ranking:
    def plan(place: int) -> Plan:
        one = ranking.plans[place]
        return one if place == 0 else replace(one, time=replace(one.time, step_s=times * one.time.step_s))

    return replace(ranking, plans=Plans(ranking.plans.layouts, plan))


def test_what_failed_is_not_tried_again(ranking: Ranking) -> None:
    found = search(ranking, {}, 3, failed=(0,))
    first = found[0].next
    assert all(first.id not in {one.plan.id for one in known.contenders} for known in found[1:])


def test_what_may_be_over_the_card_comes_last(ranking: Ranking) -> None:
    def plan(place: int) -> Plan:
        one = ranking.plans[place]
        small = replace(one.memory, capacity_bytes=one.memory.device_bytes) if place < 3 else one.memory
        return replace(one, memory=small)

    known = standing(SPEC, replace(ranking, plans=Plans(ranking.plans.layouts, plan)), None, {})
    assert known.next is not None
    assert may_be_over(known.contenders[0].plan)
    assert not may_be_over(known.next)


def test_a_lost_host_is_not_the_fault_of_its_plan_the_first_time(ranking: Ranking) -> None:
    tuning = Tuning(SPEC, ranking)
    first = next_of(tuning)
    tuning.add(Tried(plan=first, why="gone", is_lost=True, took_s=360.0))
    assert next_of(tuning).id == first.id
    tuning.add(Tried(plan=first, why="gone", is_lost=True, took_s=360.0))
    assert next_of(tuning).id != first.id
    assert tuning.gpu_hours == pytest.approx(2 * 0.1 * SPEC.cluster.world_size)
    assert tuning.measured == 0


def next_of(tuning: Tuning) -> Plan:
    known = tuning.standing
    assert known.next is not None
    return known.next


def test_a_trial_has_steps_enough_and_a_time(ranking: Ranking) -> None:
    plan = ranking.plans[0]
    short = replace(plan, time=replace(plan.time, step_s=0.5, band_s=(0.4, 0.6)))
    assert (trial_steps(short, 20), trial_steps(short, 200)) == (150, 200)
    takes = expected(SPEC, plan, 200)
    assert takes.steps == 200
    assert takes.seconds > 200 * plan.time.step_s
    assert takes.at_most_s > takes.seconds + 200 * (plan.time.band_s[1] - plan.time.step_s)
    assert hang_after_s(SPEC, plan) < takes.at_most_s


def test_the_trials_ahead_are_of_different_degrees(ranking: Ranking) -> None:
    plans = Tuning(SPEC, ranking).ahead(3, at_once=True)
    layouts: list[Layout] = [plan.layout for plan in plans]
    assert 1 < len({family(one) for one in layouts}) == len(layouts)


def test_where_no_others_may_be_the_best_the_second_trial_is_of_a_similar_plan(ranking: Ranking) -> None:
    first = ranking.plans.layouts[0]
    alike = [place for place, one in enumerate(ranking.plans.layouts) if family(one) == family(first)]
    plans = Plans([ranking.plans.layouts[place] for place in alike], lambda place: ranking.plans[alike[place]])
    ahead = Tuning(SPEC, replace(ranking, plans=plans)).ahead(2)
    assert [family(plan.layout) for plan in ahead] == [family(first)] * 2
