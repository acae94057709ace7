from dataclasses import replace

from tests.samples import make_plan, make_ranking, make_spec
from topoplan.errors import LayoutError
from topoplan.planner.plan import Ranking
from topoplan.planner.size import Sizing, size
from topoplan.specs.spec import Spec

STEPS_OF_JOB = 1000
"""Enough steps that start-up and checkpoints, 76 and 246 s, are negligible."""

# Seconds per step by number of nodes; None: nothing fits. Three nodes are slower than two.
STEPS: dict[int, float | None] = {1: None, 2: 4.0, 3: 5.0, 4: 2.0, 5: 3.0, 6: 1.0}


def spec_of(nodes: int) -> Spec:
    return make_spec(nodes=nodes)


def search(spec: Spec) -> Ranking:
    step_s = STEPS[spec.cluster.nodes]
    plans = [] if step_s is None else [make_plan(tp=2, step_s=step_s)]
    return replace(make_ranking(*plans), spec=spec)


def sized(limit_s: float, *, max_nodes: int = 6, is_sure: bool = False) -> Sizing:
    return size(spec_of, search, steps=STEPS_OF_JOB, limit_s=limit_s, max_nodes=max_nodes, is_sure=is_sure)


def test_the_answer_is_the_first_number_of_nodes_in_time() -> None:
    sizing = sized(2500.0)
    assert sizing.answer.nodes == 4
    assert [row.nodes for row in sizing.rows] == [1, 2, 3, 4]


def test_none_is_skipped_though_more_nodes_may_be_slower() -> None:
    assert [row.nodes for row in sized(1500.0).rows] == [1, 2, 3, 4, 5, 6]


def test_the_fewest_on_which_it_fits_are_known_too() -> None:
    smallest = sized(2500.0).smallest
    assert smallest.nodes == 2


def test_to_be_sure_the_upper_end_of_the_band_counts() -> None:
    likely = sized(2400.0)
    assert likely.answer is likely.rows[3]
    sure = sized(2400.0, is_sure=True)
    assert sure.answer.nodes == 6  # four nodes take 2,322 s, but 2,562 s at the upper end


def test_exactly_in_time_is_in_time() -> None:
    effort = sized(9000.0).rows[1].effort
    sizing = sized(effort.hours * 3600)
    assert sizing.answer.nodes == 2


def test_there_may_be_no_answer() -> None:
    sizing = sized(1.0, max_nodes=3)
    assert sizing.answer is None
    assert len(sizing.rows) == 3


def test_a_pin_that_a_number_of_nodes_cannot_meet_is_a_reason() -> None:
    def picky(nodes: int) -> Spec:
        if nodes < 4:
            raise LayoutError("pin: dp 16")
        return spec_of(nodes)

    sizing = size(picky, search, steps=STEPS_OF_JOB, limit_s=2500.0, max_nodes=6, is_sure=False)
    assert sizing.rows[0].found.reason == "pin: dp 16"
    assert sizing.answer.nodes == 4
