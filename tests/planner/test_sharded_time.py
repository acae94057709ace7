"""The terms of a step add up to what was predicted, where data alone is split."""

from collections import Counter
from typing import Any

import pytest

from tests.planner.sharded_cases import A100, CASES, DENSE, HOST, plan_of
from topoplan.planner.sharded_time import sharded_time_breakdown


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_the_rows_of_a_part_add_up_to_it(model: str, form: dict[str, Any], other: dict[str, Any]) -> None:
    spec, plan = plan_of(model, form, other)
    account = sharded_time_breakdown(spec, plan)
    parts: Counter[str] = Counter()
    for row in account.rows:
        parts[row.part] += row.step_s  # type: ignore[assignment]
    assert {part: seconds for part, seconds in parts.items() if seconds} == pytest.approx(plan.time.parts_s, rel=1e-9)


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_every_layer_is_there_once(model: str, form: dict[str, Any], other: dict[str, Any]) -> None:
    spec, plan = plan_of(model, form, other)
    account = sharded_time_breakdown(spec, plan)
    assert sum(times.count for times in account.layers) == spec.model.num_layers
    assert account.microbatches == plan.layout.gradient_accumulation_steps


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_a_flow_takes_as_long_as_its_calls(model: str, form: dict[str, Any], other: dict[str, Any]) -> None:
    account = sharded_time_breakdown(*plan_of(model, form, other))
    for row in (*account.flows, *account.collectives):
        assert row.step_s == pytest.approx(row.times * row.calls * row.call.call_s)
        assert row.shape.size == row.call.ranks > 1


def test_frozen_layers_before_the_first_trained_one_have_no_backward() -> None:
    other = {"finetuning": "freeze", "freeze_trainable_layers": 4}
    account = sharded_time_breakdown(*plan_of(DENSE, {"backend": "deepspeed", "zero_stage": 2}, other))
    assert [times.count for times in account.layers] == [4, 32]
    assert sum(row.backward_s for row in account.layers[0].operators) > 0
    assert not any(row.backward_s or row.recompute_s for row in account.layers[1].operators)


def test_hybrid_sharding_sends_over_the_node_and_between_nodes() -> None:
    form = {"backend": "fsdp2", "sharding": "hybrid"}
    account = sharded_time_breakdown(*plan_of(DENSE, form, {}))
    assert [(row.moment, row.call.kind, row.call.ranks, row.call.nodes) for row in account.flows] == [
        ("forward", "all-gather", 8, 1),
        ("backward", "all-gather", 8, 1),
        ("backward", "reduce-scatter", 8, 1),
        ("backward", "all-reduce", 4, 4),
    ]


def test_ulysses_calls_once_a_pass_and_layer() -> None:
    form = {"backend": "fsdp2", "ulysses": 4, "recompute": "full"}
    account = sharded_time_breakdown(*plan_of(DENSE, form, A100))
    (row,) = account.collectives
    assert (row.call.kind, row.call.ranks, row.calls) == ("all-to-all", 4, 3 * 36)


def test_offload_has_adam_on_the_host_and_copies() -> None:
    form = {"backend": "deepspeed", "zero_stage": 2, "offload_optimizer": True}
    account = sharded_time_breakdown(*plan_of(DENSE, form, HOST))
    assert [row.name for row in account.optimizer] == ["Adam on the host", "host work of a step"]
    assert account.copied_s > sum(row.step_s for row in account.offload) > 0
