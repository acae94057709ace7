"""Each rule on layouts of ddp, deepspeed and fsdp2, with a layout that breaks it and one just within it."""

from dataclasses import replace
from typing import Any

import pytest

from tests.layout.specs import DENSE, LINEAR, MLA, make_layout, make_spec, with_attention
from topoplan.engines.data_parallel.rules import SHARDED_RULES
from topoplan.engines.rule import broken_rule
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

ZERO2, ZERO3 = {"backend": "deepspeed", "zero_stage": 2}, {"backend": "deepspeed", "zero_stage": 3}
DDP, FSDP2 = {"backend": "ddp"}, {"backend": "fsdp2"}


def rule_of(spec: Spec, **keys: Any) -> str | None:
    world = spec.cluster.world_size
    keys.setdefault("dp", max(1, world // (keys.get("ulysses", 1) * keys.get("cp", 1))))
    layout = make_layout(spec, distributed_optimizer=False, **keys)
    found = broken_rule(case_of(spec, layout.backend), layout, SHARDED_RULES)
    return found.rule if found else None


@pytest.mark.parametrize("way", [DDP, ZERO2, ZERO3, FSDP2])
def test_the_plain_layouts_of_every_backend_are_legal(way: dict[str, Any]) -> None:
    assert rule_of(make_spec(), **way) is None


# (rule, layout that breaks it, layout just within it)
PAIRS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("degrees", DDP | {"tp": 2}, DDP | {"tp": 1}),
    ("degrees", ZERO3 | {"pp": 2}, ZERO3 | {"pp": 1}),
    ("degrees", FSDP2 | {"ep": 2}, FSDP2 | {"ep": 1}),
    ("degrees", ZERO3 | {"cp": 2}, FSDP2 | {"cp": 2}),
    ("zero-stage", ZERO3 | {"zero_stage": 0}, ZERO3 | {"zero_stage": 1}),
    ("zero-stage", ZERO3 | {"zero_stage": 4}, ZERO3),
    ("states", DDP | {"zero_stage": 3}, ZERO3),
    ("states", ZERO3 | {"sharding": "hybrid"}, FSDP2 | {"sharding": "hybrid"}),
    ("states", ZERO3 | {"offload": True}, FSDP2 | {"offload": True}),
    (
        "offload-param",
        ZERO2 | {"offload_optimizer": True, "offload_param": True},
        ZERO3 | {"offload_optimizer": True, "offload_param": True},
    ),
    ("offload-param", ZERO3 | {"offload_param": True}, ZERO3 | {"offload_optimizer": True}),
    ("batch", DDP | {"micro_batch_size": 4}, DDP | {"micro_batch_size": 2}),
    ("ulysses", DDP | {"ulysses": 2}, ZERO3 | {"ulysses": 2}),
    ("ulysses", FSDP2 | {"ulysses": 3, "dp": 1}, FSDP2 | {"ulysses": 4}),
]


@pytest.mark.parametrize(("rule", "outside", "inside"), PAIRS)
def test_a_rule_stands_between_two_layouts(rule: str, outside: dict[str, Any], inside: dict[str, Any]) -> None:
    spec = make_spec()  # 32 GPUs, a batch of 64
    assert rule_of(spec, **outside) == rule
    assert rule_of(spec, **inside) is None


def test_hybrid_sharding_needs_a_second_node() -> None:
    hybrid = FSDP2 | {"sharding": "hybrid"}
    assert rule_of(make_spec(nodes=1), **hybrid) == "hybrid-sharding"
    assert rule_of(make_spec(nodes=2), **hybrid) is None


@pytest.mark.parametrize(("way", "key"), [(FSDP2, "offload"), (ZERO2, "offload_optimizer")])
def test_offload_needs_stated_host_memory_in_a_spec_file(way: dict[str, Any], key: str) -> None:
    silent = replace(make_spec(), path="spec.yaml")
    stated = replace(silent, cluster=replace(silent.cluster, host_memory_bytes=2**40))
    assert rule_of(silent, **way, **{key: True}) == "host-memory"
    assert rule_of(silent, **way) is None
    assert rule_of(stated, **way, **{key: True}) is None


@pytest.mark.parametrize(
    ("model", "gpus_per_node", "ulysses", "rule"),
    [
        (DENSE, 8, 8, None),  # 8 KV heads
        (DENSE, 16, 16, None),  # two ranks a KV head, two heads a rank
        (DENSE, 12, 12, "ulysses"),  # 32 heads
        (MLA, 8, 8, None),
        (LINEAR, 8, 2, "ulysses"),
    ],
)
def test_ulysses_divides_the_heads(model: str, gpus_per_node: int, ulysses: int, rule: str | None) -> None:
    spec = make_spec(model, nodes=1, gpus_per_node=gpus_per_node, seq_len=48 * 1024, global_batch_size=8)
    assert rule_of(spec, **FSDP2, ulysses=ulysses) == rule


@pytest.mark.parametrize(("ulysses", "rule"), [(2, None), (4, "ulysses"), (8, "ulysses")])
def test_ranks_and_kv_heads_divide_one_another(ulysses: int, rule: str | None) -> None:
    spec = make_spec(with_attention(DENSE, heads=24, kv_heads=6), nodes=1)
    assert rule_of(spec, **FSDP2, ulysses=ulysses) == rule


@pytest.mark.parametrize(("ulysses", "rule"), [(4, None), (8, "ulysses")])
def test_no_group_of_a_sequence_lies_across_the_edge_of_a_node(ulysses: int, rule: str | None) -> None:
    spec = make_spec(nodes=2, gpus_per_node=12, global_batch_size=6)
    assert rule_of(spec, **FSDP2, ulysses=ulysses) == rule


def test_ulysses_divides_the_sequence_and_the_world() -> None:
    assert rule_of(make_spec(seq_len=4098), **FSDP2, ulysses=4) == "ulysses"
    assert rule_of(make_spec(seq_len=4100), **FSDP2, ulysses=4) is None
    # 24 GPUs in nodes of 8: groups of 16 would leave half a group.
    odd = make_spec(nodes=3, global_batch_size=1)
    assert rule_of(odd, **FSDP2, ulysses=16, dp=1) == "ulysses"


@pytest.mark.parametrize("way", [DDP, ZERO2, ZERO3, FSDP2])
def test_weights_packed_into_four_bits_may_be_cut_and_those_of_eight_may_not(way: dict[str, Any]) -> None:
    shards = way in (ZERO3, FSDP2)
    assert rule_of(make_spec(finetuning="qlora", quantization_bit=8), **way) == ("quantised" if shards else None)
    for bits in (None, 4):
        assert rule_of(make_spec(finetuning="qlora", quantization_bit=bits), **way) is None
    assert rule_of(make_spec(finetuning="lora"), **way) is None


@pytest.mark.parametrize(("way", "rule"), [(DDP, None), (FSDP2, None), (ZERO2, "tuning"), (ZERO3, "tuning")])
def test_deepspeed_keeps_fp32_weights(way: dict[str, Any], rule: str | None) -> None:
    assert rule_of(make_spec(pure_bf16=True), **way) == rule


@pytest.mark.parametrize("way", [DDP, ZERO3, FSDP2])
def test_tokens_further_ahead_are_not_predicted(way: dict[str, Any]) -> None:
    assert rule_of(make_spec(mtp_num_layers=1), **way) == "tuning"


def test_every_rule_says_what_to_do_and_where_it_comes_from() -> None:
    names = [rule.name for rule in SHARDED_RULES]
    assert len(set(names)) == len(names)
    assert all(rule.fix and rule.source for rule in SHARDED_RULES)
    met = {rule for rule, _, _ in PAIRS} | {"hybrid-sharding", "host-memory", "quantised", "tuning"}
    assert met == set(names)
