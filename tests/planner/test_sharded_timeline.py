"""The simulated step of a plan that splits data alone."""

from typing import Any

import pytest

from tests.planner.sharded_cases import ALONE, CASES, DENSE, HOST, ZERO3_AWAY, plan_of
from topoplan.planner.sharded_time import sharded_time_breakdown
from topoplan.planner.sharded_timeline import GPU, NETWORK, PCIE, sharded_run
from topoplan.planner.sharded_timeline import HOST as HOST_LANE
from topoplan.planner.timeline import timeline


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_nothing_overlaps_in_a_lane_and_nothing_is_behind_the_end(
    model: str, form: dict[str, Any], other: dict[str, Any]
) -> None:
    run = sharded_run(*plan_of(model, form, other))
    ends = [0.0] * len(run.lanes)
    for event in run.events:
        assert event.start_s >= ends[event.rank] - 1e-9
        ends[event.rank] = event.end_s
    assert max(ends) == pytest.approx(run.total_s)


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_the_step_takes_as_long_as_the_formula_says_where_work_hides_what_is_sent(
    model: str, form: dict[str, Any], other: dict[str, Any]
) -> None:
    spec, plan = plan_of(model, form, other)
    account = sharded_time_breakdown(spec, plan)
    work = account.microbatches * (account.forward_s + account.backward_s)
    run = sharded_run(spec, plan)
    near = 1e-6 if account.sent_s < 0.5 * work else 0.15
    assert run.total_s == pytest.approx(plan.time.step_s, rel=near)


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_all_that_is_sent_and_copied_is_drawn(model: str, form: dict[str, Any], other: dict[str, Any]) -> None:
    spec, plan = plan_of(model, form, other)
    account, run = sharded_time_breakdown(spec, plan), sharded_run(spec, plan)
    lanes = dict.fromkeys((GPU, NETWORK, PCIE, HOST_LANE), 0.0)
    for event in run.events:
        lanes[run.lanes[event.rank]] += event.end_s - event.start_s
    assert lanes[NETWORK] == pytest.approx(account.sent_s)
    assert lanes[PCIE] == pytest.approx(account.copied_s)
    # On the card: at least the work itself.
    work = account.microbatches * (account.forward_s + account.backward_s)
    assert work * (1 - 1e-9) <= lanes[GPU] <= run.total_s * (1 + 1e-9)


def test_lanes_without_work_are_left_out() -> None:
    assert sharded_run(*plan_of(DENSE, {"backend": "ddp"}, {**ALONE, "finetuning": "lora"})).lanes == (GPU, HOST_LANE)
    assert sharded_run(*plan_of(DENSE, ZERO3_AWAY, HOST)).lanes == (GPU, NETWORK, PCIE, HOST_LANE)


def test_weights_are_gathered_while_the_layer_before_is_computed() -> None:
    run = sharded_run(*plan_of(DENSE, {"backend": "fsdp2"}, {}))
    gathers = [event for event in run.events if event.kind == "parameter gather" and event.microbatch == 0]
    forward = next(event for event in run.events if event.kind == "forward")
    # The first one has nothing to hide behind, and the second follows at once.
    assert gathers[0].start_s == 0.0 < forward.start_s < gathers[0].end_s
    assert sum(forward.start_s <= one.start_s < forward.end_s for one in gathers) == 35


def test_a_timeline_of_lanes_has_busy_and_idle_time_of_each() -> None:
    spec, plan = plan_of(DENSE, ZERO3_AWAY, HOST)
    drawn = timeline(spec, plan)
    assert drawn.lanes == (GPU, NETWORK, PCIE, HOST_LANE)
    for mine in drawn.busy:
        assert sum(mine.values()) == pytest.approx(drawn.total_s)
    assert drawn.closed_form_s == plan.time.step_s
    assert 0 < drawn.fill_s <= drawn.total_s
