"""Layouts that split data alone: what the pin leaves of them."""

from typing import Any

import pytest

from tests.cost.samples import DENSE, spec_of
from topoplan.layout.enumerate_sharded import sharded_families
from topoplan.specs.spec import Spec


def spec_with(**pin: Any) -> Spec:
    return spec_of(DENSE, gpu="a100-sxm-80gb", nodes=1, pin=pin)


def refusals(backend: str, **pin: Any) -> list[str]:
    return [broken[1] for _, broken in sharded_families(spec_with(**pin), backend) if broken]


@pytest.mark.parametrize("backend", ["ddp", "deepspeed", "fsdp2"])
def test_without_a_pin_every_layout_is_of_the_cluster_and_none_twice(backend: str) -> None:
    found = [layout for layouts, _ in sharded_families(spec_with(), backend) for layout in layouts]
    assert found
    assert len({layout.id for layout in found}) == len(found)
    assert all(layout.world_size == 8 and layout.backend == backend for layout in found)


@pytest.mark.parametrize("key", ["tp", "pp", "vpp", "ep"])
def test_degrees_of_megatron_are_refused_with_their_rule(key: str) -> None:
    assert refusals("fsdp2", **{key: 2}) == [f"{key} 2 with backend fsdp2"]


@pytest.mark.parametrize(
    ("backend", "key", "value"),
    [("fsdp2", "zero_stage", 2), ("ddp", "ulysses", 2), ("deepspeed", "sharding", "hybrid"), ("ddp", "offload", True)],
)
def test_keys_of_another_backend_are_refused(backend: str, key: str, value: Any) -> None:
    (words,) = refusals(backend, **{key: value})
    assert words == f"{key} {value} with backend {backend}, which does not have it"


def test_a_pin_that_is_as_usual_holds_in_every_backend() -> None:
    for backend in ("ddp", "deepspeed", "fsdp2"):
        pin = {"ulysses": 1, "tp": 1, "sequence_parallel": False}
        assert not any("does not have" in words for words in refusals(backend, **pin))


def test_context_parallelism_takes_its_share_of_the_ranks() -> None:
    found = [
        layout for layouts, broken in sharded_families(spec_with(cp=2), "fsdp2") if not broken for layout in layouts
    ]
    assert found
    assert all(layout.cp == 2 and layout.dp * layout.ulysses == 4 for layout in found)


def test_a_pin_that_leaves_nothing_says_so() -> None:
    assert refusals("fsdp2", dp=4, ulysses=4) == ["no layout of 8 GPUs has dp 4, ulysses 4"]
