"""The simulated step of a plan that splits data only."""

from typing import Any

import pytest

from tests.planner.sharded_cases import ALONE, CASES, DENSE, HOST, ZERO3_AWAY, plan_of
from topoplan.engines.data_parallel.step import ShardedTerms, sharded_terms
from topoplan.engines.data_parallel.timeline import GPU, NETWORK, PCIE
from topoplan.engines.data_parallel.timeline import HOST as HOST_LANE
from topoplan.planner.account import time_account, timeline
from topoplan.planner.plan import Plan
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of


def whole(spec: Spec, plan: Plan) -> tuple[ShardedTerms, float, float]:
    """Return the terms of the step, all sends of weights and gradients, and all copies, in seconds."""
    account = time_account(spec, plan)
    sent = sum(one.step_s for one in account.sent if one.moment != "layers")
    return sharded_terms(case_of(spec, plan.layout.backend), plan.layout), sent, account.copied_s


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_nothing_overlaps_in_a_lane_and_nothing_is_behind_the_end(
    model: str, form: dict[str, Any], other: dict[str, Any]
) -> None:
    run = timeline(*plan_of(model, form, other))
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
    terms, sent, _ = whole(spec, plan)
    work = terms.count * (terms.passes.forward_s + terms.passes.backward_s)
    near = 1e-6 if sent < 0.5 * work else 0.15
    assert timeline(spec, plan).total_s == pytest.approx(plan.time.step_s, rel=near)


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_all_that_is_sent_and_copied_is_drawn(model: str, form: dict[str, Any], other: dict[str, Any]) -> None:
    spec, plan = plan_of(model, form, other)
    (terms, sent, copied), run = whole(spec, plan), timeline(spec, plan)
    lanes = dict.fromkeys((GPU, NETWORK, PCIE, HOST_LANE), 0.0)
    for event in run.events:
        lanes[run.lanes[event.rank]] += event.end_s - event.start_s
    assert lanes[NETWORK] == pytest.approx(sent)
    assert lanes[PCIE] == pytest.approx(copied)
    # Time on the card: at least the work itself.
    work = terms.count * (terms.passes.forward_s + terms.passes.backward_s)
    assert work * (1 - 1e-9) <= lanes[GPU] <= run.total_s * (1 + 1e-9)


def test_lanes_without_work_are_left_out() -> None:
    assert timeline(*plan_of(DENSE, {"backend": "ddp"}, {**ALONE, "finetuning": "lora"})).lanes == (GPU, HOST_LANE)
    assert timeline(*plan_of(DENSE, ZERO3_AWAY, HOST)).lanes == (GPU, NETWORK, PCIE, HOST_LANE)


def test_weights_are_gathered_while_the_layer_before_is_computed() -> None:
    run = timeline(*plan_of(DENSE, {"backend": "fsdp2"}, {}))
    gathers = [event for event in run.events if event.kind == "parameter gather" and event.microbatch == 0]
    forward = next(event for event in run.events if event.kind == "forward")
    # The first gather has nothing to hide behind, and the second follows immediately.
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
