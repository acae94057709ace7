"""Which communicators a rank has if its trainer splits data only, and that the memory includes them."""

from typing import Any

import pytest

from tests.engines.data_parallel.samples import sharded, small_spec
from topoplan.engines.data_parallel.communicators import communicators, communicators_bytes, used_groups
from topoplan.engines.data_parallel.memory import sharded_memory
from topoplan.network.nccl_buffers import UsedGroup
from topoplan.trainers.case import case_of

MIB = 2**20


def members(backend: str, nodes: int = 2, **form: Any) -> list[UsedGroup]:
    spec = small_spec(nodes=nodes, global_batch_size=64)
    return used_groups(case_of(spec, backend), sharded(spec, backend, **form))


def groups(backend: str, nodes: int = 2, **form: Any) -> dict[str, tuple[int, int]]:
    """Return name -> (number of ranks, stride)."""
    return {one.name: (one.group.size, one.group.stride) for one in members(backend, nodes, **form)}


def test_ddp_and_full_sharding_have_the_default_group_alone() -> None:
    assert groups("ddp") == {"all ranks, gradients": (16, 1)}
    assert groups("fsdp2") == {"all ranks, weights and gradients": (16, 1)}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_has_a_clone_of_the_default_group(stage: int) -> None:
    assert groups("deepspeed", zero_stage=stage) == {"all ranks": (16, 1), "weights and gradients": (16, 1)}


def test_hybrid_sharding_has_a_group_in_the_node_and_one_of_replicas() -> None:
    assert groups("fsdp2", sharding="hybrid") == {
        "all ranks": (16, 1),
        "weights and gradients": (8, 1),
        "replicas in other nodes": (2, 8),
    }


@pytest.mark.parametrize(("backend", "form"), [("fsdp2", {}), ("deepspeed", {"zero_stage": 3})])
def test_ulysses_has_an_all_to_all_of_neighbours(backend: str, form: dict[str, Any]) -> None:
    assert groups(backend, ulysses=4, **form)["ulysses"] == (4, 1)
    one = members(backend, ulysses=4, **form)[-1]
    assert one.uses == {"gather", "all-to-all"}


def test_context_parallel_ranks_gather_keys_and_values() -> None:
    assert groups("fsdp2", cp=2)["cp"] == (2, 1)


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_a_single_gpu_has_none(backend: str) -> None:
    spec = small_spec(gpus_per_node=1, global_batch_size=4)
    assert communicators(case_of(spec, backend), sharded(spec, backend)) == ()


def test_they_are_what_the_card_has_beyond_the_allocator_and_the_context() -> None:
    spec = small_spec(nodes=2, global_batch_size=64)
    case = case_of(spec, "fsdp2")
    sizes = []
    for ulysses in (1, 2, 8):
        layout = sharded(spec, "fsdp2", ulysses=ulysses)
        memory = sharded_memory(case, layout)
        beyond = memory.device_bytes - memory.reserved_bytes - case.profile.context_bytes
        assert beyond == pytest.approx(communicators_bytes(case, layout))
        sizes.append(beyond)
    assert sizes == sorted(sizes)
    assert sizes[2] - sizes[0] > 100 * MIB
