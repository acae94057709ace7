from collections.abc import Iterable
from typing import Any

import pytest

from tests.engines.samples import DENSE, MIXED, TIED, spec_of
from tests.network.clusters import cluster_of
from tests.planner.sharded_cases import CASES, plan_of
from topoplan.layout.layout import Layout
from topoplan.network.collectives import ring_cost
from topoplan.network.placement import group
from topoplan.planner.communication import GroupLinks, StepFlow, group_links, step_flows
from topoplan.planner.predict import predict
from topoplan.specs.gpu_profile import profile_of

FULL = {"granularity": "full", "method": "uniform", "num_layers": 1}


def layout_of(**degrees: int) -> Layout:
    return Layout.of(**degrees)  # type: ignore[arg-type]


def test_every_kind_of_more_than_one_member_has_a_row() -> None:
    rows = group_links(cluster_of(nodes=4), layout_of(tp=4, pp=2, cp=2, dp=2, ep=4))
    assert [row.name for row in rows] == ["tp", "cp", "dp", "dp_cp", "ep", "edp", "pp"]
    assert [row.shape.size for row in rows] == [4, 2, 2, 4, 4, 4, 2]
    assert [row.groups for row in rows] == [8, 16, 16, 8, 8, 8, 16]
    assert group_links(cluster_of(nodes=1), layout_of(dp=8))[0].name == "dp"
    assert group_links(cluster_of(nodes=1, gpus_per_node=1), layout_of(dp=1)) == ()


def test_a_row_tells_what_the_group_crosses() -> None:
    tp, dp = group_links(cluster_of(nodes=4), layout_of(tp=8, dp=4))
    assert [one.kind for one in tp.links] == ["nvlink"]
    assert (tp.domains, dp.domains) == (1, 4)
    assert [one.kind for one in dp.links] == ["pcie", "nic"]
    assert dp.tightest.kind == "nic"
    assert dp.first == dp.worst == (0, 8, 16, 24)


def test_the_worst_group_is_named() -> None:
    (row,) = [
        row for row in group_links(cluster_of(nodes=2, gpus_per_node=6), layout_of(tp=4, dp=3)) if row.name == "tp"
    ]
    assert (row.first, row.worst) == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize("layout", [layout_of(tp=4, dp=8), layout_of(tp=2, pp=4, dp=4), layout_of(tp=8, dp=4)])
def test_the_rate_is_the_one_that_the_step_is_predicted_with(layout: Layout) -> None:
    cluster = cluster_of(nodes=4, rails=8, nodes_per_leaf=2, oversubscription=2.0)
    for row in group_links(cluster, layout):
        if row.pattern == "ring":
            way = ring_cost(group(layout, row.name), cluster, profile_of(cluster.gpu))
            assert row.member_bytes_per_s == pytest.approx(way.rate_bytes_per_s)


def rows_of(form: dict[str, Any], other: dict[str, Any]) -> tuple[tuple[GroupLinks, ...], tuple[StepFlow, ...]]:
    spec, plan = plan_of(DENSE, form, other)
    rows = group_links(spec.cluster, plan.layout)
    return rows, step_flows(spec, plan, rows)


def test_ranks_that_share_a_sequence_are_neighbours_and_all_ranks_share_states() -> None:
    rows, _ = rows_of({"backend": "fsdp2", "ulysses": 4}, {})
    assert [(row.name, row.shape.size, row.shape.stride, row.groups) for row in rows] == [
        ("ulysses", 4, 1, 8),
        ("shards", 32, 1, 1),
    ]


def test_hybrid_sharding_shares_in_a_node_and_has_replicas_across() -> None:
    rows, _ = rows_of({"backend": "fsdp2", "sharding": "hybrid"}, {})
    assert [(row.name, row.first) for row in rows] == [("shards", tuple(range(8))), ("replicas", (0, 8, 16, 24))]
    assert {one.kind for one in rows[0].links} == {"nvlink"}
    assert "nic" in {one.kind for one in rows[1].links}


def test_under_ddp_all_ranks_are_replicas() -> None:
    rows, flows = rows_of({"backend": "ddp"}, {"finetuning": "lora"})
    assert [(row.name, row.shape.size) for row in rows] == [("replicas", 32)]
    (flow,) = flows
    gradients = 4 * 21_823_488  # fp32, of adapters of rank 8 on all linear layers
    assert flow.member_bytes == pytest.approx(2 * 31 / 32 * gradients)


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_every_flow_of_a_step_has_its_group_and_bytes(model: str, form: dict[str, Any], other: dict[str, Any]) -> None:
    spec, plan = plan_of(model, form, other)
    rows = group_links(spec.cluster, plan.layout)
    flows = step_flows(spec, plan, rows)
    assert bool(flows) == (plan.layout.world_size > 1)
    assert {one.group for one in flows} <= {row.name for row in rows}
    check_bytes(flows)


def check_bytes(flows: Iterable[StepFlow]) -> None:
    for one in flows:
        assert one.member_bytes > 0
        assert all(size > 0 for size in one.link_bytes.values())


def test_full_sharding_sends_weights_twice_and_gradients_once_a_micro_batch() -> None:
    _, flows = rows_of({"backend": "deepspeed", "zero_stage": 3}, {})
    whole = 2 * 8_190_735_360
    assert [one.member_bytes for one in flows] == pytest.approx([2 * 31 / 32 * whole] * 3)  # two micro batches


def test_an_exchange_puts_on_nvlink_what_each_gpu_sends() -> None:
    _, flows = rows_of({"backend": "fsdp2", "ulysses": 4}, {})
    (one,) = (flow for flow in flows if flow.group == "ulysses")
    assert one.link_bytes == {"nvlink": pytest.approx(one.member_bytes)}


def megatron_flows(model: str, form: dict[str, Any], **job: Any) -> dict[tuple[str, str], StepFlow]:
    """Return the flows of a Megatron plan by group and kind of call."""
    spec = spec_of(model, **job)
    plan = predict(spec, {"backend": "megatron", **form})
    flows = step_flows(spec, plan, group_links(spec.cluster, plan.layout))
    return {(one.group, one.flow.call.kind): one for one in flows}


def test_tensor_parallel_ranks_gather_and_scatter_twice_forward_and_three_times_backward() -> None:
    form = {"tp": 4, "micro_batch_size": 2}
    flow = megatron_flows(DENSE, form, global_batch_size=64)["tp", "all-gather"]
    whole = 2 * (2 * 4096) * 4096  # a micro batch of two sequences in bf16, around attention or the MLP
    assert flow.member_bytes == pytest.approx(4 * 36 * 5 * 3 / 4 * whole)
    again = megatron_flows(DENSE, form | {"recompute": FULL}, global_batch_size=64)["tp", "all-gather"]
    assert again.member_bytes == pytest.approx(4 * 36 * 7 * 3 / 4 * whole)
    summed = megatron_flows(DENSE, form | {"sequence_parallel": False}, global_batch_size=64)["tp", "all-reduce"]
    assert summed.member_bytes == pytest.approx(4 * 36 * 2 * 2 * 3 / 4 * whole)


def test_stages_send_every_micro_batch_forward_and_its_gradient_backward() -> None:
    message = 2 * 4096 * 4096
    form = {"pp": 4, "micro_batch_size": 1}
    plain = megatron_flows(DENSE, form, global_batch_size=64)["pp", "send"]
    assert plain.member_bytes in (8 * message, 2 * 8 * message)  # a stage at an end sends one way
    interleaved = megatron_flows(DENSE, form | {"vpp": 3}, global_batch_size=64)["pp", "send"]
    assert interleaved.member_bytes in (8 * 5 * message, 8 * 6 * message)


def test_the_reference_model_of_dpo_goes_through_the_stages_and_groups_forward_once_more() -> None:
    form = {"tp": 4, "pp": 2, "micro_batch_size": 1}
    alone, beside = (megatron_flows(DENSE, form, stage=stage) for stage in ("sft", "dpo"))
    gathered, message = beside["tp", "all-gather"].flow.calls, beside["pp", "send"].flow.calls
    assert gathered == alone["tp", "all-gather"].flow.calls * 7 / 5
    assert message - alone["pp", "send"].flow.calls in (0, 1)  # the last stage sends nothing forward


def test_gradients_go_to_their_shards_in_fp32_and_weights_come_back_in_bf16() -> None:
    flows = megatron_flows(DENSE, {"tp": 1})
    gradients, weights = flows["dp", "reduce-scatter"], flows["dp", "all-gather"]
    assert gradients.member_bytes == pytest.approx(31 / 32 * 4 * 8_190_735_360)
    assert weights.member_bytes == pytest.approx(gradients.member_bytes / 2)
    plain = megatron_flows(DENSE, {"tp": 1, "distributed_optimizer": False})
    assert {key for key in plain if key[0] == "dp"} == {("dp", "all-reduce")}
    assert plain["dp", "all-reduce"].member_bytes == pytest.approx(2 * gradients.member_bytes)


def test_tokens_go_to_their_experts_and_back_forward_and_backward() -> None:
    form = {"ep": 8, "micro_batch_size": 1, "moe_token_dispatcher_type": "alltoall"}
    flow = megatron_flows(MIXED, form, global_batch_size=128)["ep", "all-to-all"]
    sent = 2 * 4096 * 8 * 2048  # tokens, experts a token, hidden size
    assert flow.member_bytes == pytest.approx(4 * 48 * 4 * 7 / 8 * sent)


def test_a_ring_hands_on_keys_and_values_and_backward_their_gradients_beside() -> None:
    flow = megatron_flows(DENSE, {"cp": 4, "micro_batch_size": 1}, global_batch_size=32)["cp", "send"]
    hop = 2 * 1024 * 8 * (128 + 128)
    assert flow.member_bytes == pytest.approx(4 * 36 * 3 * 3 * hop)


def test_the_stages_of_a_tied_embedding_are_a_group_of_their_own() -> None:
    flow = megatron_flows(TIED, {"pp": 2, "tp": 1})["embd", "all-reduce"]
    assert flow.flow.call.group.size == 2
    assert flow.member_bytes == pytest.approx(flow.flow.call.sent_bytes)


def test_adapters_send_tensors_as_wide_as_their_rank_and_no_weights_of_the_model() -> None:
    flows = megatron_flows(DENSE, {"tp": 4, "micro_batch_size": 1}, finetuning="lora", lora_rank=16)
    assert flows["dp", "reduce-scatter"].member_bytes < 4 * 8_190_735_360 / 100
    assert flows["tp", "all-reduce"].flow.name == "gradients of replicated adapters"
    spec = spec_of(DENSE, finetuning="lora", lora_rank=16)
    plan = predict(spec, {"backend": "megatron", "tp": 4, "micro_batch_size": 1})
    named = {one.flow.name: one for one in step_flows(spec, plan, group_links(spec.cluster, plan.layout))}
    one, layers = plan.layout.gradient_accumulation_steps * 3 / 4 * 2 * 4096 * 16, 36
    assert named["linear_qkv adapter's collectives"].member_bytes == pytest.approx(3 * layers * one)
    assert named["linear_proj adapter's collectives"].member_bytes == pytest.approx(2 * layers * one)


@pytest.mark.parametrize(
    ("model", "form"), [(DENSE, {"tp": 2, "pp": 2, "cp": 2}), (MIXED, {"tp": 4, "ep": 4, "etp": 2})]
)
def test_every_flow_of_megatron_has_its_group_and_loads_its_links(model: str, form: dict[str, Any]) -> None:
    flows = megatron_flows(model, form)
    assert {group for group, _ in flows} >= set(form)
    check_bytes(flows.values())
