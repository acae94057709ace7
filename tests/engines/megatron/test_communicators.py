"""Which communicators a layout has, and the memory of each."""

import pytest

from tests.engines.samples import DENSE, MIXED, TIED, layout_of, memory_of, spec_of
from topoplan.engines.megatron.communicators import communicators, communicators_bytes
from topoplan.layout.layout import Layout
from topoplan.network.nccl_buffers import Communicator
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

MIB = 2**20


def found(spec: Spec, layout: Layout) -> tuple[Communicator, ...]:
    case = case_of(spec, layout.backend)
    return communicators(case, layout)


def names(spec: Spec, layout: Layout) -> list[str]:
    return list(sizes_by_name(spec, layout))


def sizes_by_name(spec: Spec, layout: Layout) -> dict[str, int]:
    return {one.name: one.size for one in found(spec, layout)}


def bytes_by_name(spec: Spec, layout: Layout) -> dict[str, int]:
    return {one.name: one.device_bytes for one in found(spec, layout)}


def test_only_groups_of_more_than_one_rank_have_a_communicator() -> None:
    dense, mixed = spec_of(DENSE), spec_of(MIXED)
    one = spec_of(DENSE, nodes=1, gpus_per_node=1)
    assert names(one, layout_of(one)) == ["world"]
    assert names(dense, layout_of(dense)) == ["world", "gradient norm", "dp x cp"]
    assert names(dense, layout_of(dense, tp=2, pp=2, cp=2)) == ["world", "gradient norm", "tp", "cp", "dp x cp", "pp"]
    experts = ["ep", "etp x ep", "expert dp"]
    assert names(mixed, layout_of(mixed, ep=8)) == ["world", "gradient norm", "dp x cp", *experts]


def test_copies_of_the_embedding_have_a_communicator() -> None:
    tied, untied = spec_of(TIED), spec_of(DENSE)
    deep = spec_of(DENSE, mtp_num_layers=1)
    name = "embedding (first and last stage)"
    assert sizes_by_name(tied, layout_of(tied, pp=2))[name] == 2
    assert sizes_by_name(deep, layout_of(untied, pp=2))[name] == 2
    assert name not in names(untied, layout_of(untied, pp=2))
    assert name not in names(tied, layout_of(tied))


def test_single_sends_go_over_communicators_of_two_ranks() -> None:
    spec = spec_of(DENSE)
    sizes = sizes_by_name(spec, layout_of(spec, tp=2, pp=4, vpp=2))
    assert "pp" not in sizes
    assert sizes["pp, rank before"] == sizes["pp, rank after"] == 2
    assert "cp, rank after" in names(spec, layout_of(spec, cp=4))


def test_they_add_up_and_are_what_the_card_has_beyond_the_context() -> None:
    spec = spec_of(MIXED)
    layout = layout_of(spec, tp=2, pp=2, ep=4)
    case = case_of(spec, layout.backend)
    total = communicators_bytes(case, layout)
    assert total == sum(bytes_by_name(spec, layout).values())
    memory = memory_of(spec, layout)
    context = profile_of(spec.cluster.gpu).context_bytes
    assert memory.device_bytes - memory.reserved_bytes == pytest.approx(total + context)


def test_an_all_to_all_inside_a_node_takes_most_and_a_pipeline_across_nodes_least() -> None:
    spec = spec_of(MIXED)
    sizes = bytes_by_name(spec, layout_of(spec, pp=2, ep=8))
    assert max(sizes, key=sizes.__getitem__) == "ep"
    assert min(sizes, key=sizes.__getitem__) == "pp"
    assert sizes["ep"] > 2500 * MIB
    assert sizes["pp"] < 64 * MIB


def test_micro_batches_and_recomputation_change_nothing() -> None:
    spec = spec_of(DENSE)
    plain, other = layout_of(spec, tp=2), layout_of(spec, tp=2, micro_batch_size=2, recompute="full")
    assert bytes_by_name(spec, plain) == bytes_by_name(spec, other)


def test_the_flex_dispatcher_does_without_nccls_all_to_all() -> None:
    spec = spec_of(MIXED)
    sends = bytes_by_name(spec, layout_of(spec, ep=8, moe_token_dispatcher_type="alltoall"))["ep"]
    kernels = bytes_by_name(spec, layout_of(spec, ep=8, moe_token_dispatcher_type="flex"))["ep"]
    assert sends > 4 * kernels > 0
