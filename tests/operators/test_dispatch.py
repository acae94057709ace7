"""Flex dispatch: which ranks a token reaches, and how long that takes."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.samples import LATENT, MIXED, layout_of, spec_of
from tests.sizes import examples
from topoplan.network.collectives import all_to_all_s
from topoplan.network.placement import Group
from topoplan.operators.flex import flex_copies, flex_s, parts_reached
from topoplan.operators.shard import Shard, shard_of
from topoplan.specs.cluster import Fabric
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.model import Moe
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of


def routing(experts: int, top_k: int, groups: int = 1, chosen: int = 1) -> Moe:
    return Moe(experts=experts, experts_per_token=top_k, intermediate_size=1, groups=groups, groups_per_token=chosen)


def simulated(moe: Moe, parts: int, tokens: int = 20_000) -> float:
    """Return the mean number of parts that the experts of random tokens are in."""
    draw = random.Random(7)
    size, part = moe.experts // moe.groups, moe.experts // parts
    reached = 0
    for _ in range(tokens):
        groups = draw.sample(range(moe.groups), moe.groups_per_token)
        allowed = [expert for group in groups for expert in range(group * size, (group + 1) * size)]
        reached += len({expert // part for expert in draw.sample(allowed, moe.experts_per_token)})
    return reached / tokens


@pytest.mark.parametrize(
    ("moe", "parts"),
    [
        (routing(128, 8), 16),
        (routing(128, 8), 2),
        (routing(8, 2), 8),
        (routing(256, 8, 8, 4), 64),
        (routing(256, 8, 8, 4), 8),
        (routing(256, 8, 8, 4), 4),
        (routing(160, 6, 8, 3), 32),
        (routing(160, 6, 8, 3), 20),  # runs of 8 experts across groups of 20
        (routing(160, 6, 8, 3), 5),
    ],
)
def test_parts_reached_are_those_of_random_routing(moe: Moe, parts: int) -> None:
    assert parts_reached(moe, parts) == pytest.approx(simulated(moe, parts), rel=0.01)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_parts_reached_stay_between_one_and_what_there_is(data: st.DataObject) -> None:
    groups, size, parts_each = (data.draw(st.integers(1, 8)) for _ in range(3))
    experts = groups * size * parts_each
    chosen = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, chosen * size * parts_each))
    moe = routing(experts, top_k, groups, chosen)
    assert parts_reached(moe, 1) == pytest.approx(1)
    assert parts_reached(moe, experts) == pytest.approx(top_k)
    assert 1 - 1e-9 <= parts_reached(moe, groups) <= min(chosen, top_k) + 1e-9
    assert parts_reached(moe, groups) <= parts_reached(moe, groups * parts_each) + 1e-9


def sharded(spec: Spec, **form: Any) -> Shard:
    layout = layout_of(spec, **form)
    return shard_of(case_of(spec, layout.backend), layout)


def moe_of(spec: Spec) -> Moe:
    found = spec.model.layers[-1].ffn
    assert isinstance(found, Moe)
    return found


@pytest.mark.parametrize("name", [MIXED, LATENT])
@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (8, 1), (16, 1), (64, 1), (8, 2), (1, 8)])
def test_flex_never_brings_more_copies_than_alltoall(name: str, ep: int, etp: int) -> None:
    spec = spec_of(name, nodes=8)
    moe, shard = moe_of(spec), sharded(spec, tp=etp, ep=ep, etp=etp)
    assert 0 < flex_copies(moe, shard) <= shard.routed_tokens(moe)


@pytest.mark.parametrize("ep", [8, 16, 32, 64])
def test_flex_is_not_slower_than_alltoall(ep: int) -> None:
    spec = spec_of(LATENT, nodes=8)
    moe, shard, profile = moe_of(spec), sharded(spec, ep=ep), profile_of(spec.cluster.gpu)
    sent = 2 * 7168 * shard.routed_tokens(moe)
    case = case_of(spec, "megatron")
    assert flex_s(case, moe, 2 * 7168, shard) <= all_to_all_s(Group(ep, 1), sent, spec.cluster, profile)


def test_a_limit_on_groups_saves_traffic_between_nodes_only() -> None:
    spec = spec_of(LATENT, nodes=8)
    limited = moe_of(spec)
    free = replace(limited, groups=1, groups_per_token=1)
    assert (limited.groups, limited.groups_per_token) == (8, 4)
    across, inside = sharded(spec, ep=64), sharded(spec, ep=8)

    case = case_of(spec, "megatron")

    def seconds(moe: Moe, shard: Shard) -> float:
        return flex_s(case, moe, 2 * 7168, shard)

    assert seconds(limited, across) < 0.75 * seconds(free, across)
    assert seconds(limited, inside) < seconds(free, inside)


@pytest.mark.parametrize(
    ("gpu", "nodes", "tokens", "measured"),
    # GB/s: what DeepEP calls RDMA bandwidth, including tokens that stay in a node. docs/legacy.md, README.
    [
        ("h800-sxm-80gb", 4, 4096, 57.5),
        ("h800-sxm-80gb", 8, 4096, 50.5),
        ("h100-sxm-80gb", 2, 8192, 85.5),
        ("h100-sxm-80gb", 4, 8192, 61.0),
        ("b200-sxm-180gb", 2, 8192, 90.5),
    ],
)
def test_the_network_carries_what_deepep_published(gpu: str, nodes: int, tokens: int, measured: float) -> None:
    spec = spec_of(LATENT, gpu=gpu, nodes=nodes, seq_len=tokens)
    # DeepEP's benchmark limits a token to four nodes; the groups are the nodes.
    moe = replace(moe_of(spec), groups=nodes, groups_per_token=min(nodes, 4))
    case = case_of(spec, "megatron")
    seconds = flex_s(case, moe, 2 * 7168, sharded(spec, ep=8 * nodes))
    assert tokens * 2 * 7168 * parts_reached(moe, nodes) / seconds / 1e9 == pytest.approx(measured, rel=0.1)


def test_the_usual_dispatcher_is_flex_where_experts_span_nodes() -> None:
    spec = spec_of(MIXED, nodes=4)
    found = {ep: sharded(spec, ep=ep).dispatcher for ep in (1, 2, 8, 16, 32)}
    assert found == {1: "alltoall", 2: "alltoall", 8: "alltoall", 16: "flex", 32: "flex"}
    assert sharded(spec, tp=2, ep=8, etp=2).dispatcher == "flex"
    assert sharded(spec, backend="mca", ep=32).dispatcher == "alltoall"
    rack = spec_of(MIXED, gpu="gb200-nvl72-186gb", nodes=4, gpus_per_node=4)
    assert sharded(rack, ep=4).dispatcher == "alltoall"
    assert sharded(rack, ep=8).dispatcher == "flex"


def test_what_the_layout_says_goes_before_the_usual_dispatcher() -> None:
    spec = spec_of(MIXED, nodes=4)
    for ep in (8, 16):
        for dispatcher in ("alltoall", "flex"):
            assert sharded(spec, ep=ep, moe_token_dispatcher_type=dispatcher).dispatcher == dispatcher


@pytest.mark.parametrize(
    ("gpu", "changes"),
    [
        ("h100-sxm-80gb", {"fabric": Fabric(kind="ethernet")}),
        ("h100-pcie-80gb", {}),
        ("v100-sxm-32gb", {}),
    ],
)
def test_without_what_flex_needs_the_usual_dispatcher_is_alltoall(gpu: str, changes: dict[str, Any]) -> None:
    spec = spec_of(MIXED, gpu=gpu, precision="fp16")
    assert sharded(replace(spec, cluster=replace(spec.cluster, **changes)), ep=16).dispatcher == "alltoall"


def test_a_group_inside_one_domain_crosses_no_network() -> None:
    spec = spec_of(MIXED, nodes=4)
    moe = moe_of(spec)
    inside, across = sharded(spec, ep=8), sharded(spec, ep=16)
    case = case_of(spec, "megatron")
    slow = replace(case, cluster=replace(spec.cluster, nic_bytes_per_s=1e9))
    assert flex_s(slow, moe, 4096, inside) == flex_s(case, moe, 4096, inside)
    assert flex_s(slow, moe, 4096, across) > 10 * flex_s(case, moe, 4096, across)
