"""The step as every pipeline rank sees it adds up to the step that is ranked."""

from typing import Any

import pytest

from tests.engines.samples import DENSE, MIXED, VISION, spec_of
from topoplan.engines.timeline import Timeline
from topoplan.planner.account import time_account, timeline
from topoplan.planner.predict import predict

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (DENSE, {}, {"tp": 2}),
    (DENSE, {}, {"tp": 2, "pp": 4, "recompute": "full"}),
    (DENSE, {}, {"tp": 2, "pp": 4, "vpp": 3}),
    (DENSE, {"nodes": 8}, {"tp": 2, "pp": 8}),
    (VISION, {}, {"tp": 2, "pp": 2}),
    (MIXED, {}, {"tp": 2, "pp": 4, "ep": 8, "recompute": {"granularity": "selective", "modules": ["moe"]}}),
    (DENSE, {"stage": "dpo"}, {"tp": 2, "pp": 2}),
]


def drawn(model: str, job: dict[str, Any], form: dict[str, Any]) -> tuple[Any, Timeline]:
    spec = spec_of(model, **job)
    plan = predict(spec, {"backend": "megatron", **form})
    return plan, timeline(spec, plan)


@pytest.mark.parametrize(("model", "job", "form"), CASES)
def test_the_step_is_the_ranked_one_but_for_the_closed_forms_deviation(
    model: str, job: dict[str, Any], form: dict[str, Any]
) -> None:
    plan, line = drawn(model, job, form)
    assert line.total_s - line.pipeline_s + line.closed_form_s == pytest.approx(plan.time.step_s, rel=1e-9)
    assert abs(line.deviation) < 0.05
    before_and_after = sum(phase.end_s - phase.start_s for phase in line.phases)
    assert before_and_after + line.pipeline_s == pytest.approx(line.total_s)


@pytest.mark.parametrize(("model", "job", "form"), CASES)
def test_every_rank_accounts_for_the_whole_pipeline(model: str, job: dict[str, Any], form: dict[str, Any]) -> None:
    _, line = drawn(model, job, form)
    assert len(line.busy) == line.ranks
    for rank in range(line.ranks):
        assert sum(line.busy[rank].values()) == pytest.approx(line.pipeline_s)
        assert 0.0 <= line.idle_shares[rank] < 1.0
    for event in line.events:
        assert line.pipeline_start_s - 1e-9 <= event.start_s < event.end_s <= line.pipeline_end_s + 1e-9


@pytest.mark.parametrize(("model", "job", "form"), CASES[:-1])
def test_what_is_sent_is_that_of_the_account(model: str, job: dict[str, Any], form: dict[str, Any]) -> None:
    spec = spec_of(model, **job)
    plan = predict(spec, {"backend": "megatron", **form})
    line, account = timeline(spec, plan), time_account(spec, plan)
    sent: dict[str, float] = {}
    for one in account.sent:
        if one.moment != "stages":
            kinds = {"layers": "layer collectives", "last": "gradient reduce", "after": "parameter gather"}
            sent[kinds[one.moment]] = sent.get(kinds[one.moment], 0.0) + one.step_s
    drawn = {kind: seconds for one in line.communications for kind, seconds in one.seconds.items()}
    assert drawn == pytest.approx(sent)
    assert {one.rank for one in line.communications if one.name == "in layers"} <= {account.slowest_stage}
    for span in (span for one in line.communications for span in one.spans):
        assert line.pipeline_start_s - 1e-9 <= span.start_s < span.end_s <= line.total_s + 1e-9


def test_collectives_in_layers_are_within_the_work_of_their_rank() -> None:
    _, line = drawn(DENSE, {}, {"tp": 2, "pp": 2})
    in_layers = next(one for one in line.communications if one.name == "in layers")
    work = [event for event in line.events if event.rank == in_layers.rank]
    for span in in_layers.spans:
        assert any(event.start_s - 1e-9 <= span.start_s and span.end_s <= event.end_s + 1e-9 for event in work)


def test_phases_stand_where_they_belong() -> None:
    _, line = drawn(DENSE, {"stage": "dpo"}, {"tp": 2, "pp": 2})
    names = [phase.name for phase in line.phases]
    assert names == ["reference", "gradient reduce", "optimizer", "parameter gather"]
    assert line.phases[0].end_s == line.pipeline_start_s
    assert line.phases[1].start_s == line.pipeline_end_s
    assert line.phases[-1].end_s == line.total_s


def test_recomputation_stands_apart_in_its_full_length() -> None:
    plan, line = drawn(DENSE, {}, {"tp": 2, "pp": 4, "recompute": "full"})
    assert max(mine["recompute"] for mine in line.busy) == pytest.approx(plan.time.parts_s["recompute"])


def test_the_fill_ends_before_the_drain_starts_in_a_long_step() -> None:
    _, line = drawn(DENSE, {"global_batch_size": 512}, {"tp": 2, "pp": 4})
    assert 0.0 < line.fill_s < line.drain_s < line.total_s
