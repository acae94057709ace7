"""The terms of a plan's memory add up to what was predicted."""

from typing import Any

import pytest

from tests.engines.samples import DENSE, LATENT, MIXED, TIED, VISION, spec_of
from topoplan.planner.breakdown import Breakdown, breakdown
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict

SELECTIVE = {"granularity": "selective", "modules": ["moe"]}
CASES: list[tuple[str, dict[str, Any]]] = [
    (DENSE, {}),
    (DENSE, {"tp": 4, "pp": 4, "vpp": 3}),
    (DENSE, {"tp": 2, "cp": 2, "recompute": "full"}),
    (DENSE, {"pp": 2, "recompute": {"granularity": "full", "method": "block", "num_layers": 4}}),
    (MIXED, {"tp": 2, "pp": 4, "ep": 8, "recompute": SELECTIVE}),
    (LATENT, {"pp": 4, "ep": 8}),
    (VISION, {"tp": 2, "pp": 2, "vpp": 2}),
    (TIED, {}),
    (TIED, {"pp": 2}),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"pp": 2, "ep": 8}),
    ("openai/gpt-oss-20b", {"ep": 8}),
]


def account_of(model: str, form: dict[str, Any], **job: Any) -> tuple[Plan, Breakdown]:
    spec = spec_of(model, **job)
    plan = predict(spec, {"backend": "megatron", **form})
    return plan, breakdown(spec, plan)


@pytest.mark.parametrize(("model", "form"), CASES)
def test_weights_by_tensor_are_all_weights_of_the_rank(model: str, form: dict[str, Any]) -> None:
    _, account = account_of(model, form)
    layers = sum(rows.count * row.rank_elements for rows in account.layers for row in rows.weights)
    assert layers + sum(row.rank_elements for row in account.ends) == account.parameters.total


@pytest.mark.parametrize(
    ("model", "form"), [(DENSE, {"tp": 2}), (MIXED, {"tp": 2, "ep": 4}), (LATENT, {"tp": 2, "pp": 4, "ep": 8})]
)
def test_adapters_are_among_the_weights_and_what_they_save_among_the_tensors(model: str, form: dict[str, Any]) -> None:
    _, account = account_of(model, form, finetuning="lora", lora_rank=32)
    rows = [(kind.count, row) for kind in account.layers for row in kind.weights]
    total = sum(count * row.rank_elements for count, row in rows)
    assert total + sum(row.rank_elements for row in account.ends) == account.parameters.total
    trained = sum(count * row.rank_elements for count, row in rows if ".lora_" in row.name)
    assert trained == account.parameters.dense + account.parameters.expert
    for kind in account.layers:
        assert sum(row.saved_bytes for row in kind.saved) == pytest.approx(kind.saved_bytes)
        assert any("adapter input, mask" in row.name for row in kind.saved)


@pytest.mark.parametrize(("model", "form"), CASES)
def test_what_is_in_flight_times_what_is_kept_is_the_activations(model: str, form: dict[str, Any]) -> None:
    plan, account = account_of(model, form, freeze_vision_tower=False)
    stage = next(stage for stage in plan.memory.by_stage if stage.stage == account.worst)
    assert stage.allocated_bytes == plan.memory.allocated_bytes
    kept = sum(chunk.kept_bytes * chunk.in_flight for chunk in account.chunks)
    assert kept == pytest.approx(stage.parts_bytes["activations"])
    tower = account.vision_kept_bytes * account.chunks[0].in_flight
    assert tower == pytest.approx(stage.parts_bytes.get("vision activations", 0.0))


@pytest.mark.parametrize(("model", "form"), CASES)
def test_saved_tensors_add_up_to_what_a_layer_saves_and_keeps(model: str, form: dict[str, Any]) -> None:
    plan, account = account_of(model, form)
    for rows in account.layers:
        assert sum(row.saved_bytes for row in rows.saved) == pytest.approx(rows.saved_bytes)
        if plan.layout.recompute.granularity == "full":
            assert not any(row.kept for row in rows.saved)
            assert 0 < rows.kept_bytes < rows.saved_bytes
        else:
            assert sum(row.saved_bytes for row in rows.saved if row.kept) == pytest.approx(rows.kept_bytes)


@pytest.mark.parametrize(("model", "form"), CASES)
def test_reserved_and_device_memory_follow_from_the_terms(model: str, form: dict[str, Any]) -> None:
    plan, account = account_of(model, form)
    memory = plan.memory
    assert memory.reserved_bytes == pytest.approx(memory.allocated_bytes * (1 + account.fragmentation))
    beyond = account.context_bytes + sum(one.device_bytes for one in account.communicators)
    assert memory.device_bytes == pytest.approx(memory.reserved_bytes + beyond)
    assert (account.communicators[0].name, account.communicators[0].size) == ("world", 32)
    assert all(one.size > 1 for one in account.communicators)


@pytest.mark.parametrize("recompute", ["none", "full", {"granularity": "full", "method": "block", "num_layers": 3}])
def test_token_prediction_is_a_kind_of_layer_of_its_own(recompute: Any) -> None:
    form = {"pp": 2, "tp": 8, "pipeline_layout": "Et*3|t*33mL", "recompute": recompute}
    plan, account = account_of(DENSE, form, mtp_num_layers=1)
    assert account.worst == 1
    assert [(rows.layer.predicts_next, rows.count) for rows in account.layers] == [(False, 33), (True, 1)]
    layers = sum(rows.count * row.rank_elements for rows in account.layers for row in rows.weights)
    assert layers + sum(row.rank_elements for row in account.ends) == account.parameters.total
    kept = sum(chunk.kept_bytes * chunk.in_flight for chunk in account.chunks)
    assert kept == pytest.approx(plan.memory.by_stage[1].parts_bytes["activations"])


def test_each_stage_is_in_one_row_and_equal_neighbours_share_it() -> None:
    plan, account = account_of(DENSE, {"pp": 4, "tp": 8}, global_batch_size=1)  # one micro batch: none waits
    assert [stage for row in account.stages for stage in row.stages] == list(range(plan.layout.pp))
    assert [row.stages for row in account.stages] == [(0,), (1, 2), (3,)]


def test_kinds_of_layers_are_told_apart_and_counted() -> None:
    _, account = account_of("Qwen/Qwen3-Next-80B-A3B-Instruct", {"pp": 2, "ep": 8})
    assert sorted(rows.count for rows in account.layers) == [6, 18]


def test_selective_recomputation_drops_what_its_modules_free() -> None:
    _, account = account_of(MIXED, {"ep": 8, "recompute": SELECTIVE})
    (rows,) = account.layers
    for row in rows.saved:
        assert row.kept == ("moe" not in row.freed_by)


def test_the_margin_is_the_users_or_the_band() -> None:
    spec = spec_of(DENSE)
    assert not breakdown(spec, predict(spec, {"tp": 2})).margin_stated
    spec = spec_of(DENSE, cluster={"margin": 0.1})
    assert breakdown(spec, predict(spec, {"tp": 2})).margin_stated
