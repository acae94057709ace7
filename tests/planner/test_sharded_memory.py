"""The terms of a plan's memory add up to what was predicted, where data alone is split."""

from typing import Any

import pytest

from tests.planner.sharded_cases import CASES, DENSE, HOST, ZERO3_AWAY, plan_of
from topoplan.planner.sharded_memory import sharded_breakdown


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_states_are_the_parts_of_the_gpu_and_of_the_host(
    model: str, form: dict[str, Any], other: dict[str, Any]
) -> None:
    spec, plan = plan_of(model, form, other)
    account = sharded_breakdown(spec, plan)
    parts = plan.memory.by_stage[0].parts_bytes
    for part in ("weights", "gradients", "optimizer"):
        held = sum(row.held_bytes for row in account.states if row.part == part and not row.on_host)
        assert held == pytest.approx(parts[part])
    host = sum(row.held_bytes for row in account.states if row.on_host) * account.processes
    assert host == pytest.approx(plan.memory.host_bytes)


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_parameters_by_place_are_those_by_fate(model: str, form: dict[str, Any], other: dict[str, Any]) -> None:
    account = sharded_breakdown(*plan_of(model, form, other))
    assert sum(row.elements for row in account.parameters) == account.elements.total


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_layers_keep_the_activations(model: str, form: dict[str, Any], other: dict[str, Any]) -> None:
    spec, plan = plan_of(model, form, other)
    account = sharded_breakdown(spec, plan)
    kept = sum(rows.count * rows.kept_bytes for rows in account.layers)
    assert kept == pytest.approx(plan.memory.by_stage[0].parts_bytes["activations"])
    assert account.without_backward + sum(rows.count for rows in account.layers) == spec.model.num_layers
    for rows in account.layers:
        assert sum(row.saved_bytes for row in rows.saved) == pytest.approx(rows.saved_bytes)
        if plan.layout.recompute.granularity == "none":
            assert rows.kept_bytes == pytest.approx(rows.saved_bytes)
        else:
            assert rows.kept_bytes < rows.saved_bytes


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_the_largest_moment_is_the_peak_and_the_rest_leads_to_the_card(
    model: str, form: dict[str, Any], other: dict[str, Any]
) -> None:
    spec, plan = plan_of(model, form, other)
    account, memory = sharded_breakdown(spec, plan), plan.memory
    parts = memory.by_stage[0].parts_bytes
    assert parts[f"peak ({account.moments[0].name})"] == pytest.approx(account.moments[0].total_bytes)
    beyond = account.context_bytes + sum(one.device_bytes for one in account.communicators)
    assert memory.reserved_bytes == pytest.approx(memory.allocated_bytes * (1 + account.fragmentation))
    assert memory.device_bytes == pytest.approx(memory.reserved_bytes + beyond)


def test_stage_3_with_both_offloads_leaves_nothing_on_the_gpu_all_step() -> None:
    account = sharded_breakdown(*plan_of(DENSE, ZERO3_AWAY, HOST))
    assert all(row.on_host for row in account.states)
    assert {row.part for row in account.states} == {"weights", "gradients", "optimizer"}
    assert account.processes == 8


def test_packed_and_frozen_weights_and_adapters_are_told_apart() -> None:
    form = {"backend": "ddp", "recompute": "full"}
    other = {"finetuning": "qlora", "quantization_bit": 4, "nodes": 1, "gpus_per_node": 1}
    account = sharded_breakdown(*plan_of(DENSE, form, other))
    weights = {row.name: row.element_bytes for row in account.states if row.part == "weights"}
    assert weights == {"adapters": 4, "frozen": 2, "packed": pytest.approx(0.516, abs=0.001)}
    assert account.communicators == ()


def test_frozen_layers_before_the_first_trained_one_keep_nothing() -> None:
    other = {"finetuning": "freeze", "freeze_trainable_layers": 4}
    account = sharded_breakdown(*plan_of(DENSE, {"backend": "deepspeed", "zero_stage": 2}, other))
    assert account.without_backward == 32
