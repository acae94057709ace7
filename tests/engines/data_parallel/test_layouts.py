"""The search space of ddp, deepspeed and fsdp2, compared with layouts enumerated independently."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.specs import DENSE, LINEAR, make_spec
from topoplan.engines.data_parallel.layouts import MIN_TOKENS_PER_ULYSSES_RANK, sharded_families
from topoplan.engines.data_parallel.rules import SHARDED_RULES
from topoplan.engines.engine import MAX_MICRO_BATCH_SIZE
from topoplan.engines.rule import broken_rule
from topoplan.layout.layout import DEFAULTS, SHARDED_BACKENDS, Layout, Recompute, changed
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

FULL = Recompute(granularity="full", method="uniform", num_layers=1)
DEEPSPEED_STATES = [
    *((stage, False, False) for stage in (1, 2, 3)),
    *((stage, True, False) for stage in (1, 2, 3)),
    (3, True, True),
]


def spec_with(*, host_memory: bool = False, model: str = DENSE, **keys: Any) -> Spec:
    spec = make_spec(model, **keys)
    return replace(spec, cluster=replace(spec.cluster, host_memory_bytes=2**41 if host_memory else None))


def legal(spec: Spec, backend: str) -> list[Layout]:
    return [
        layout
        for family, broken in sharded_families(case_of(spec, backend), backend)
        if broken is None
        for layout in family
    ]


def brute_force(spec: Spec, backend: str) -> Iterator[Layout]:
    """Return every layout that a user could write and that a search should consider."""
    cluster, job, case = spec.cluster, spec.job, case_of(spec, backend)
    states: list[dict[str, Any]] = [{}]
    if backend == "deepspeed":
        states = [
            {"zero_stage": stage, "offload_optimizer": optimizer, "offload_param": param}
            for stage, optimizer, param in DEEPSPEED_STATES
        ]
    elif backend == "fsdp2":
        states = [
            {"sharding": sharding, "offload": offload} for sharding in ("full", "hybrid") for offload in (False, True)
        ]
    for state, ulysses, micro_batch, recompute, expandable in product(
        states,
        [ranks for ranks in range(1, cluster.gpus_per_node + 1) if cluster.world_size % ranks == 0],
        range(1, MAX_MICRO_BATCH_SIZE + 1),
        (Recompute(), FULL),
        (False, True),
    ):
        dp = cluster.world_size // ulysses
        layout = Layout.of(
            backend=backend,
            dp=dp,
            ulysses=ulysses,
            micro_batch_size=micro_batch,
            gradient_accumulation_steps=max(1, job.global_batch_size // (micro_batch * dp)),
            recompute=recompute,
            expandable_segments=expandable,
            distributed_optimizer=False,
            grad_reduce_in_fp32=backend != "fsdp2" or state["sharding"] == "hybrid",
            **state,
        )
        offloads = layout.offload or layout.offload_optimizer or layout.offload_param
        if (
            job.seq_len >= ulysses * (MIN_TOKENS_PER_ULYSSES_RANK if ulysses > 1 else 1)
            and not (offloads and cluster.host_memory_bytes is None)
            and broken_rule(case, layout, SHARDED_RULES) is None
        ):
            yield layout


@pytest.mark.parametrize("backend", SHARDED_BACKENDS)
@given(
    nodes=st.integers(1, 3),
    gpus_per_node=st.sampled_from([1, 2, 4, 6, 8]),
    batch=st.integers(1, 96),
    seq_len=st.sampled_from([512, 2048, 4096, 8190]),
    finetuning=st.sampled_from(["full", "lora", "qlora"]),
    host_memory=st.booleans(),
    model=st.sampled_from([DENSE, LINEAR]),
)
def test_the_search_space_is_all_that_is_legal(
    backend: str,
    nodes: int,
    gpus_per_node: int,
    batch: int,
    seq_len: int,
    finetuning: str,
    host_memory: bool,
    model: str,
) -> None:
    keys = {"global_batch_size": batch, "seq_len": seq_len, "finetuning": finetuning}
    spec = spec_with(nodes=nodes, gpus_per_node=gpus_per_node, host_memory=host_memory, model=model, **keys)
    found = legal(spec, backend)
    assert len(found) == len(set(found))
    assert set(found) == set(brute_force(spec, backend))


@pytest.mark.parametrize("backend", SHARDED_BACKENDS)
def test_what_is_refused_breaks_the_rule_that_is_named(backend: str) -> None:
    spec = spec_with(finetuning="qlora", global_batch_size=6, nodes=1)
    refused = [(family, broken) for family, broken in sharded_families(case_of(spec, backend), backend) if broken]
    assert refused
    for (layout,), broken in refused:
        assert broken == broken_rule(case_of(spec, backend), layout, SHARDED_RULES)


@pytest.mark.parametrize("backend", SHARDED_BACKENDS)
def test_layouts_of_a_family_differ_in_what_a_search_may_choose_for_them(backend: str) -> None:
    chosen = ("recompute", "expandable_segments", "offload", "offload_optimizer", "offload_param")
    usual = {name: DEFAULTS[name] for name in chosen}
    for family, _ in sharded_families(case_of(spec_with(host_memory=True), backend), backend):
        assert len({changed(layout, **usual) for layout in family}) == 1


# A pinned key must hold in every layout, and the layouts left out must be exactly those that contradict it.
@pytest.mark.parametrize(
    ("backend", "pin"),
    [
        ("deepspeed", {"zero_stage": 2}),
        ("deepspeed", {"zero_stage": 3, "offload_param": True}),
        ("deepspeed", {"offload_param": False}),
        ("deepspeed", {"offload_optimizer": True}),
        ("deepspeed", {"offload_optimizer": False}),
        ("fsdp2", {"sharding": "hybrid"}),
        ("fsdp2", {"offload": True}),
        ("fsdp2", {"offload": False, "expandable_segments": True}),
        ("fsdp2", {"ulysses": 2}),
        ("fsdp2", {"dp": 32}),
        ("fsdp2", {"gradient_accumulation_steps": 2}),
        ("ddp", {"micro_batch_size": 2, "recompute": "full"}),
        ("ddp", {"tp": 1, "pp": 1, "recompute": "none"}),
    ],
)
def test_a_pin_leaves_exactly_what_agrees_with_it(backend: str, pin: dict[str, Any]) -> None:
    spec = spec_with(host_memory=True, pin=pin)
    values = pin | ({"recompute": {"full": FULL, "none": Recompute()}[pin["recompute"]]} if "recompute" in pin else {})
    free = legal(spec_with(host_memory=True), backend)
    expected = {layout for layout in free if all(getattr(layout, key) == value for key, value in values.items())}
    assert set(legal(spec, backend)) == expected
    assert expected


@pytest.mark.parametrize(
    ("backend", "pin", "rule"),
    [
        ("ddp", {"zero_stage": 3}, "states"),
        ("fsdp2", {"offload_optimizer": True}, "states"),
        ("deepspeed", {"sharding": "hybrid"}, "states"),
        ("deepspeed", {"offload_param": True, "offload_optimizer": False}, "offload-param"),
        ("ddp", {"tp": 2}, "degrees"),
        ("fsdp2", {"ulysses": 3}, "ulysses"),
        ("ddp", {"micro_batch_size": 4}, "batch"),
    ],
)
def test_a_pin_that_a_backend_cannot_keep_is_refused_by_a_rule(backend: str, pin: dict[str, Any], rule: str) -> None:
    spec = spec_with(host_memory=True, global_batch_size=60, nodes=1, gpus_per_node=4, pin=pin)
    found = list(sharded_families(case_of(spec, backend), backend))
    assert found
    assert {broken.rule if broken else None for _, broken in found} == {rule}


def test_a_pinned_offload_holds_where_host_memory_is_not_stated() -> None:
    found = legal(spec_with(pin={"offload": True}), "fsdp2")
    assert found
    assert all(layout.offload for layout in found)


def test_a_pinned_offload_in_a_spec_file_without_host_memory_is_refused() -> None:
    spec = replace(spec_with(pin={"offload": True}), path="spec.yaml")
    assert {broken.rule for _, broken in sharded_families(case_of(spec, "fsdp2"), "fsdp2") if broken} == {"host-memory"}
    assert not legal(spec, "fsdp2")


def test_the_fused_loss_is_taken_only_where_it_is_pinned() -> None:
    assert not any(layout.fused_linear_cross_entropy for layout in legal(spec_with(), "ddp"))
    pinned = legal(spec_with(pin={"fused_linear_cross_entropy": True}), "ddp")
    assert pinned
    assert all(layout.fused_linear_cross_entropy for layout in pinned)


def test_fsdp2_reduces_in_the_type_that_the_trainer_has() -> None:
    spec = spec_with(global_batch_size=8, nodes=1, gpus_per_node=8, model=DENSE)
    for trainer, in_fp32 in ((None, False), ("llamafactory", False), ("swift", False), ("trinity", True)):
        found = legal(replace(spec, trainer=trainer), "fsdp2")
        assert found
        assert {layout.grad_reduce_in_fp32 for layout in found} == {in_fp32}
