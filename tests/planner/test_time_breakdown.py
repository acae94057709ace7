"""The terms of a step add up to what was predicted."""

from collections import Counter
from typing import Any

import pytest

from tests.engines.samples import DENSE, LATENT, MIXED, TIED, VISION, spec_of
from topoplan.operators.te_compute import PARTS
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.planner.time_breakdown import TimeBreakdown, time_breakdown

SELECTIVE = {"granularity": "selective", "modules": ["moe"]}
BLOCK = {"granularity": "full", "method": "block", "num_layers": 4}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (DENSE, {}, {}),
    (DENSE, {"tp": 4, "pp": 4, "vpp": 3}, {}),
    (DENSE, {"tp": 2, "cp": 2, "recompute": "full"}, {"precision": "fp8"}),
    (DENSE, {"pp": 2, "recompute": BLOCK}, {"stage": "dpo"}),
    (DENSE, {"tp": 2, "optimizer_offload_fraction": 0.5}, {}),
    (DENSE, {"tp": 2, "distributed_optimizer": False, "overlap_grad_reduce": False}, {}),
    (MIXED, {"tp": 2, "pp": 4, "ep": 8, "recompute": SELECTIVE}, {}),
    (MIXED, {"tp": 2, "ep": 4, "etp": 2}, {"token_imbalance": 1.5}),
    (LATENT, {"pp": 4, "ep": 8}, {}),
    (VISION, {"tp": 2, "pp": 2, "vpp": 2}, {"freeze_vision_tower": False}),
    (TIED, {"pp": 2}, {}),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"pp": 2, "ep": 8}, {}),
    ("openai/gpt-oss-20b", {"ep": 8}, {}),
    (MIXED, {"tp": 2, "ep": 4, "recompute": SELECTIVE}, {"finetuning": "lora", "lora_rank": 32}),
    (LATENT, {"tp": 4, "pp": 4, "ep": 8}, {"finetuning": "lora", "mtp_num_layers": 1}),
    (TIED, {"pp": 2}, {"finetuning": "lora", "lora_target": ["linear_qkv"]}),
]


def account_of(model: str, form: dict[str, Any], job: dict[str, Any] | None = None) -> tuple[Plan, TimeBreakdown]:
    spec = spec_of(model, **(job or {}))
    plan = predict(spec, {"backend": "megatron", **form})
    return plan, time_breakdown(spec, plan)


@pytest.mark.parametrize(("model", "form", "job"), CASES)
def test_the_rows_add_up_to_the_step(model: str, form: dict[str, Any], job: dict[str, Any]) -> None:
    plan, account = account_of(model, form, job)
    assert sum(row.step_s for row in account.rows) == pytest.approx(plan.time.step_s, rel=1e-9)


@pytest.mark.parametrize(("model", "form", "job"), CASES)
def test_the_rows_of_a_part_add_up_to_it(model: str, form: dict[str, Any], job: dict[str, Any]) -> None:
    plan, account = account_of(model, form, job)
    parts: Counter[str] = Counter()
    for row in account.rows:
        parts[row.part] += row.step_s  # type: ignore[assignment]
    assert {part: seconds for part, seconds in parts.items() if seconds} == pytest.approx(plan.time.parts_s, rel=1e-9)


@pytest.mark.parametrize(("model", "form", "job"), CASES)
def test_an_operator_takes_its_time_in_every_layer_and_micro_batch(
    model: str, form: dict[str, Any], job: dict[str, Any]
) -> None:
    _, account = account_of(model, form, job)
    for times in account.layers:
        for row in times.operators:
            assert row.part in PARTS
            one = row.forward_s + row.backward_s
            assert row.step_s == pytest.approx(account.microbatches * times.count * one, rel=1e-9)
            again = account.microbatches * times.recomputed * row.recompute_s
            assert row.step_recompute_s == pytest.approx(again, rel=1e-9)


def test_the_slowest_stage_is_the_one_that_takes_longest() -> None:
    _, account = account_of(LATENT, {"pp": 4, "ep": 8, "pipeline_layout": "Et*15|t*15|t*15|t*16L"})
    slowest = max(account.stages, key=lambda row: row.forward_s + row.backward_s)
    assert account.slowest in slowest.stages
    assert [stage for row in account.stages for stage in row.stages] == [0, 1, 2, 3]


def test_equal_stages_share_a_row() -> None:
    _, account = account_of(DENSE, {"pp": 4})
    assert [row.stages for row in account.stages] == [(0,), (1, 2), (3,)]


def test_full_recomputation_repeats_every_forward_and_a_block_only_its_own_layers() -> None:
    _, account = account_of(DENSE, {"recompute": "full"})
    (times,) = account.layers
    assert times.recomputed == times.count
    assert all(row.recompute_s == row.forward_s for row in times.operators)
    _, account = account_of(DENSE, {"pp": 2, "recompute": BLOCK})
    assert account.layers[0].recomputed == pytest.approx(4)


def test_selective_recomputation_repeats_only_its_modules() -> None:
    _, account = account_of(MIXED, {"ep": 8, "recompute": {"granularity": "selective", "modules": ["core_attn"]}})
    (times,) = account.layers
    assert {row.name for row in times.operators if row.recompute_s} == {"core_attn"}


def test_ends_are_those_of_the_stage() -> None:
    _, account = account_of(VISION, {"tp": 2})
    assert [row.name for row in account.ends] == ["embedding", "vision tower", "output layer, loss"]
    _, account = account_of(DENSE, {"pp": 4})
    assert "embedding" not in [row.name for row in account.ends] or account.slowest == 0


def test_collectives_name_their_group_and_their_rate() -> None:
    _, account = account_of(MIXED, {"tp": 2, "pp": 2, "ep": 4})
    rows = {row.name: row for row in account.collectives}
    assert rows["attention collectives"].ranks == 2
    assert rows["dispatch, combine (alltoall)"].kind == "all-to-all"
    assert rows["stage to stage"].ranks == 2
    assert {"dense gradients of a step", "expert gradients of a step", "expert weights of a step"} <= set(rows)
    assert rows["attention collectives"].nodes == 1
    assert rows["dense gradients of a step"].nodes == 2  # a stage's 16 GPUs
    for row in account.collectives:
        assert row.bytes_per_s * row.call_s == pytest.approx(row.sent_bytes)
        assert row.ranks > 1


def test_one_gpu_has_no_collectives() -> None:
    spec = spec_of("Qwen/Qwen3-0.6B", nodes=1, gpus_per_node=1)
    account = time_breakdown(spec, predict(spec, {"backend": "megatron"}))
    assert account.collectives == ()
    assert account.gradients_s == account.weights_s == 0


def test_what_data_parallel_exposes_is_no_more_than_all_of_it() -> None:
    _, account = account_of(DENSE, {})
    exposed = sum(row.step_s for row in account.data_parallel)
    assert 0 < exposed < account.gradients_s + account.weights_s
