"""The account of a plan: its terms add up to the prediction, and each names the location of its formula."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import topoplan
from tests.engines.samples import DENSE, LATENT, MIXED, TIED, VISION, spec_of
from tests.planner.sharded_cases import A100, ALONE, HOST, ZERO3_AWAY
from tests.planner.sharded_cases import CASES as SHARDED
from tests.samples import make_plan
from topoplan.engines.account import MemoryAccount, TimeAccount
from topoplan.engines.prediction import BEYOND
from topoplan.planner.account import Comparison, compare, comparison, memory_account, time_account
from topoplan.planner.calibrate import with_constants
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.terms import Term, sum_of

PACKAGE = Path(topoplan.__file__).parent
MOE = {"granularity": "selective", "modules": ["moe"]}
BLOCK = {"granularity": "full", "method": "block", "num_layers": 4}
MEGATRON: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (DENSE, {}, {}),
    (DENSE, {"tp": 4, "pp": 4, "vpp": 3}, {}),
    (DENSE, {"tp": 2, "cp": 2, "recompute": "full"}, {"precision": "fp8"}),
    (DENSE, {"pp": 2, "recompute": BLOCK}, {"stage": "dpo"}),
    (DENSE, {"pp": 2, "recompute": BLOCK}, {"mtp_num_layers": 1}),
    (DENSE, {"tp": 2, "optimizer_offload_fraction": 0.5}, {"cluster": {"host_memory": "2TiB", "margin": 0.1}}),
    (DENSE, {"tp": 2, "distributed_optimizer": False, "overlap_grad_reduce": False}, {}),
    (MIXED, {"tp": 2, "pp": 4, "ep": 8, "recompute": MOE}, {}),
    (MIXED, {"tp": 2, "ep": 4, "etp": 2}, {"token_imbalance": 1.5}),
    (LATENT, {"pp": 4, "ep": 8}, {}),
    (LATENT, {"pp": 4, "ep": 8, "pipeline_layout": "Et*15|t*15|t*15|t*16L"}, {}),
    (VISION, {"tp": 2, "pp": 2, "vpp": 2}, {"freeze_vision_tower": False}),
    (TIED, {"pp": 2}, {}),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"pp": 2, "ep": 8}, {}),
    ("openai/gpt-oss-20b", {"ep": 8}, {}),
    (MIXED, {"tp": 2, "ep": 4, "recompute": MOE}, {"finetuning": "lora", "lora_rank": 32}),
    (LATENT, {"tp": 4, "pp": 4, "ep": 8}, {"finetuning": "lora", "mtp_num_layers": 1}),
    (TIED, {"pp": 2}, {"finetuning": "lora", "lora_target": ["linear_qkv"]}),
    ("Qwen/Qwen3-0.6B", {}, {"nodes": 1, "gpus_per_node": 1}),
]
CASES = [(model, {"backend": "megatron", **form}, job) for model, form, job in MEGATRON] + SHARDED


def accounts(model: str, form: dict[str, Any], other: dict[str, Any]) -> tuple[Plan, MemoryAccount, TimeAccount]:
    spec = spec_of(model, **other)
    plan = predict(spec, form)
    return plan, memory_account(spec, plan), time_account(spec, plan)


def trees(memory: MemoryAccount, time: TimeAccount) -> Iterator[Term]:
    yield from (memory.device, memory.margin, memory.parameters, time.step)
    yield from (*memory.stages, *memory.moments, *memory.layers, *time.stages, *time.layers)
    yield from [memory.host] if memory.host else []


def parts(term: Term) -> dict[str, float]:
    return {one.name: one.value for one in term.children}


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_the_terms_add_up_to_the_plan(model: str, form: dict[str, Any], other: dict[str, Any]) -> None:
    plan, memory, time = accounts(model, form, other)
    for term in (one for tree in trees(memory, time) for one in tree.walk() if one.children):
        assert sum(one.value for one in term.children) == pytest.approx(term.value, rel=1e-9, abs=1e-9)
    assert time.step.value == pytest.approx(plan.time.step_s, rel=1e-9)
    assert parts(time.step) == pytest.approx(plan.time.parts_s, rel=1e-9)
    assert memory.device.value == pytest.approx(plan.memory.device_bytes, rel=1e-9)
    assert memory.device.at("reserved").value == pytest.approx(plan.memory.reserved_bytes, rel=1e-9)
    worst = max(plan.memory.by_stage, key=lambda stage: stage.allocated_bytes)
    predicted = {name.partition(" (")[0]: size for name, size in worst.parts_bytes.items()}
    assert parts(memory.device.at("reserved", "allocated")) == pytest.approx(predicted, rel=1e-9)
    assert (memory.host.value if memory.host else 0.0) == pytest.approx(plan.memory.host_bytes, rel=1e-9)


@pytest.mark.parametrize(("model", "form", "other"), [CASES[1], SHARDED[1], SHARDED[9]])
def test_tensors_that_a_run_out_of_memory_showed_are_a_term_of_their_own(
    model: str, form: dict[str, Any], other: dict[str, Any]
) -> None:
    spec = spec_of(model, **other)
    once, twice = (
        memory_account(one, predict(one, form)).device.at("reserved", "allocated")
        for one in (spec, with_constants(spec, {"tensors_beyond": 0.5}))
    )
    assert BEYOND not in parts(once)
    beyond = twice.at(BEYOND)
    assert sum(parts(twice).values()) == pytest.approx(twice.value) == pytest.approx(once.value + beyond.value)
    assert beyond.value > 0
    assert beyond.what.startswith("50% of what comes and goes")


@cache
def names_defined_in(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{one.name}" for one in ast.walk(node) if isinstance(one, ast.FunctionDef)}
    return names


def test_every_term_names_a_function_of_the_package() -> None:
    for case in CASES:
        _, memory, time = accounts(*case)
        sources = {one.source for tree in trees(memory, time) for one in tree.walk()} | {s.source for s in time.sent}
        for source in sources:
            file, function = source.split(";")[0].split("::")
            assert function in names_defined_in(PACKAGE / file), source


def account_of(model: str = DENSE, form: Any = None, **other: Any) -> tuple[Plan, MemoryAccount, TimeAccount]:
    return accounts(model, {"backend": "megatron", **(form or {})}, other)


def children(term: Term) -> list[str]:
    return [one.name for one in term.children]


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_a_call_takes_its_part_of_what_is_sent_at_a_moment(
    model: str, form: dict[str, Any], other: dict[str, Any]
) -> None:
    _, _, time = accounts(model, form, other)
    for one in time.sent:
        assert one.call.group.size > 1
        assert one.moment_s == pytest.approx(one.calls * one.call.call_s, rel=0.02)  # some calls are of other sizes
        assert one.bytes_per_s * one.call.call_s == pytest.approx(one.call.sent_bytes)


def test_stages_that_need_the_same_are_one() -> None:
    _, memory, time = account_of(form={"pp": 4, "tp": 8}, global_batch_size=1)  # one micro batch: none waits
    for stages in (memory.stages, time.stages):
        assert [one.facts["stages"] for one in stages] == [(0,), (1, 2), (3,)]


def test_the_slowest_stage_is_the_one_that_takes_longest() -> None:
    _, _, time = account_of(LATENT, {"pp": 4, "ep": 8, "pipeline_layout": "Et*15|t*15|t*15|t*16L"})
    assert time.slowest_stage in max(time.stages, key=lambda one: one.value).facts["stages"]


def test_full_recomputation_repeats_every_forward_and_a_block_only_its_own_layers() -> None:
    _, _, time = account_of(form={"recompute": "full"})
    (layer,) = time.layers
    assert layer.facts["recomputed"] == layer.facts["count"]
    assert all(one.facts["recompute_s"] == one.facts["forward_s"] for one in layer.children)
    _, _, time = account_of(form={"pp": 2, "recompute": BLOCK})
    assert time.layers[0].facts["recomputed"] == pytest.approx(4)


def test_selective_recomputation_drops_and_repeats_its_modules_alone() -> None:
    _, memory, _ = account_of(MIXED, {"ep": 8, "recompute": MOE})
    for one in memory.layers[0].children:
        assert one.facts["kept"] == ("moe" not in one.facts["freed_by"])
    _, _, time = account_of(MIXED, {"ep": 8, "recompute": {**MOE, "modules": ["core_attn"]}})
    assert {one.name for one in time.layers[0].children if one.child("recompute")} == {"core_attn"}


def test_ends_and_weights_are_those_of_the_stage() -> None:
    plan, memory, time = account_of(VISION, {"tp": 2})
    assert children(time.step.at("ends")) == ["embedding", "vision tower", "output layer, loss"]
    assert "vision encoder" in children(memory.parameters)
    assert memory.parameters.facts["frozen"] == plan.memory.by_stage[0].parts_bytes["weights"] / 2 - sum(
        memory.parameters.facts[name] for name in ("dense", "expert")
    )


@pytest.mark.parametrize("recompute", ["none", "full", BLOCK])
def test_token_prediction_is_a_kind_of_layer_of_its_own(recompute: Any) -> None:
    form = {"pp": 2, "tp": 8, "pipeline_layout": "Et*3|t*33mL", "recompute": recompute}
    _, memory, _ = account_of(form=form, mtp_num_layers=1)
    assert memory.worst == 1
    names = {"attention + mlp": 33, "multi-token prediction of attention + mlp": 1}
    assert {one.name: one.facts["count"] for one in memory.layers} == names


def test_adapters_are_among_the_weights_and_what_they_save_among_the_tensors() -> None:
    _, memory, _ = account_of(MIXED, {"tp": 2, "ep": 4}, finetuning="lora", lora_rank=32)
    trained = sum(one.value for one in memory.parameters.walk() if ".lora_" in one.name)
    assert trained == sum(memory.parameters.facts[name] for name in ("dense", "expert"))
    assert any("adapter input, mask" in one.name for one in memory.layers[0].children)


def test_what_is_sent_names_its_group_and_its_rate() -> None:
    _, _, time = account_of(MIXED, {"tp": 2, "pp": 2, "ep": 4})
    rows = {one.name: one for one in time.sent}
    assert (rows["attention collectives"].call.group.size, rows["attention collectives"].nodes) == (2, 1)
    assert rows["dispatch, combine (alltoall)"].call.kind == "all-to-all"
    assert rows["stage to stage"].call.group.size == 2
    assert rows["dense gradients to their shards"].nodes == 2  # a stage's 16 GPUs
    assert {"expert gradients to their shards", "expert weights after the step"} <= set(rows)


def test_one_gpu_sends_nothing() -> None:
    _, _, time = account_of("Qwen/Qwen3-0.6B", nodes=1, gpus_per_node=1)
    assert time.sent == ()
    assert time.step.child("dp_comm") is None


def test_the_dispatcher_is_named_beside_what_it_costs() -> None:
    _, _, time = account_of(MIXED, {"ep": 16})
    (kind,) = time.step.at("ep_comm").children
    assert children(kind) == ["dispatch, combine (flex)"]
    assert kind.children[0].source.startswith("operators/moe.py::Flex; arXiv 2412.19437")


def test_the_margin_is_the_users_or_the_band() -> None:
    assert account_of()[1].margin.facts["from"] == "band"
    assert account_of(cluster={"margin": 0.1})[1].margin.facts["from"] == "spec"


def test_both_offloads_of_stage_3_leave_nothing_on_the_gpu_all_step() -> None:
    _, memory, time = accounts(DENSE, ZERO3_AWAY, HOST)
    allocated = memory.device.at("reserved", "allocated")
    assert not any(allocated.at(part).value for part in ("weights", "gradients", "optimizer"))
    assert memory.host.facts["processes"] == 8
    assert children(time.step.at("optimizer")) == ["Adam on the host", "host work of a step"]
    assert time.copied_s > time.step.at("offload").value > 0


def test_packed_and_frozen_weights_and_adapters_stand_apart() -> None:
    other = {**ALONE, "finetuning": "qlora", "quantization_bit": 4}
    _, memory, _ = accounts(DENSE, {"backend": "ddp", "recompute": "full"}, other)
    weights = memory.device.at("reserved", "allocated", "weights").children
    sizes = {one.name: one.facts["element_bytes"] for one in weights}
    assert sizes == {"adapters": 4, "frozen": 2, "packed": pytest.approx(0.516, abs=0.001)}
    assert memory.device.child("NCCL") is None


def test_frozen_layers_before_the_first_trained_one_keep_nothing_and_have_no_backward() -> None:
    other = {"finetuning": "freeze", "freeze_trainable_layers": 4}
    _, memory, time = accounts(DENSE, {"backend": "deepspeed", "zero_stage": 2}, other)
    assert [one.facts["count"] for one in memory.layers] == [4]
    assert [one.facts["count"] for one in time.layers] == [4, 32]
    assert not any(one.facts["backward_s"] for one in time.layers[1].children)


def test_hybrid_sharding_sends_over_the_node_and_between_nodes() -> None:
    _, _, time = accounts(DENSE, {"backend": "fsdp2", "sharding": "hybrid"}, {})
    assert [(one.moment, one.call.kind, one.call.group.size, one.nodes) for one in time.sent] == [
        ("forward", "all-gather", 8, 1),
        ("backward", "all-gather", 8, 1),
        ("backward", "reduce-scatter", 8, 1),
        ("backward", "all-reduce", 4, 4),
    ]


def test_ulysses_calls_once_a_pass_and_layer() -> None:
    _, _, time = accounts(DENSE, {"backend": "fsdp2", "ulysses": 4, "recompute": "full"}, A100)
    (one,) = [one for one in time.sent if one.moment == "layers"]
    assert (one.call.kind, one.call.group.size, one.calls) == ("all-to-all", 4, 3 * 36)


SPEC = spec_of(DENSE)


def plan_of(**form: Any) -> Plan:
    return predict(SPEC, {"backend": "megatron", **form})


def tree(name: str, parts: Mapping[str, float]) -> Term:
    rows = [Term(part, value, "s", "") for part, value in parts.items()]
    return sum_of(name, rows, "", "s")


def compared(first: Plan, second: Plan) -> Comparison:
    """Compare made-up plans, whose figures no account adds up to."""
    devices = []
    for memory in (first.memory, second.memory):
        reserved = replace(tree("reserved", {}), children=(tree("allocated", memory.by_stage[0].parts_bytes),))
        devices.append(replace(tree("device", {}), value=memory.device_bytes, children=(reserved,)))
    return comparison(first, second, [tree("step", plan.time.parts_s) for plan in (first, second)], devices)


def test_differences_add_up_to_those_of_the_plans() -> None:
    first, second = plan_of(tp=2), plan_of(tp=1, pp=4)
    found = compare(SPEC, first, second)
    assert sum(row.more for row in found.time) == pytest.approx(second.time.step_s - first.time.step_s)
    assert sum(row.first for row in found.time) == pytest.approx(first.time.step_s)
    assert sum(row.second for row in found.memory) == pytest.approx(second.memory.device_bytes)


def test_the_largest_difference_is_first() -> None:
    found = compare(SPEC, plan_of(tp=2), plan_of(tp=1, pp=4))
    for rows in (found.time, found.memory):
        sizes = [abs(row.more) for row in rows]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] > 0


def test_only_layout_keys_that_differ_are_listed() -> None:
    found = compare(SPEC, plan_of(tp=2), plan_of(tp=4))
    assert found.layout == {"tp": (2, 4), "dp": (16, 8), "gradient_accumulation_steps": (4, 8)}


def test_the_faster_plan_wins_whichever_is_first() -> None:
    fast, slow = make_plan(tp=2, step_s=3.0), make_plan(tp=4, step_s=4.0)
    for found in (compared(fast, slow), compared(slow, fast)):
        assert found.winner is fast
        assert found.loser is slow
        assert not found.is_tie


def test_a_plan_that_fits_wins_over_a_faster_one_that_does_not() -> None:
    fast, slow = make_plan(tp=2, step_s=3.0, device_gib=99.0), make_plan(tp=4, step_s=4.0)
    assert compared(fast, slow).winner is slow


def test_within_one_percent_memory_decides() -> None:
    full, spare = make_plan(tp=2, step_s=3.0, device_gib=70.0), make_plan(tp=4, step_s=3.01, device_gib=40.0)
    found = compared(full, spare)
    assert found.is_tie
    assert found.winner is spare


def test_plans_of_two_kinds_of_backends_are_compared_in_what_both_have_or_is_not_as_usual() -> None:
    sharded = predict(SPEC, {"backend": "deepspeed", "zero_stage": 3})
    found = compare(SPEC, plan_of(tp=2), sharded)
    assert found.layout == {
        "backend": ("megatron", "deepspeed"),
        "tp": (2, 1),
        "dp": (16, 32),
        "gradient_accumulation_steps": (4, 2),
        "sequence_parallel": (True, None),
        "zero_stage": (None, 3),
        "cross_entropy_fusion": (True, None),
        "cross_entropy_fusion_impl": ("native", None),
    }
    assert not found.share_a_model
    assert sum(row.second for row in found.time) == pytest.approx(sharded.time.step_s)
    assert sum(row.second for row in found.memory) == pytest.approx(sharded.memory.device_bytes)


def test_plans_of_deepspeed_and_fsdp2_share_a_cost_model() -> None:
    one, two = (
        predict(spec_of(DENSE), {"backend": name, **more})
        for name, more in (("fsdp2", {}), ("deepspeed", {"zero_stage": 3}))
    )
    found = compare(SPEC, one, two)
    assert found.share_a_model
    assert found.layout == {"backend": ("fsdp2", "deepspeed"), "zero_stage": (None, 3)}
