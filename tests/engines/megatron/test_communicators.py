"""Which communicators a layout has, and the memory of each."""

from dataclasses import replace

import pytest

from tests.engines.samples import DENSE, MIXED, TIED, layout_of, memory_of, spec_of
from topoplan.engines.megatron.communicators import communicators, communicators_bytes
from topoplan.layout.layout import Layout
from topoplan.network.nccl_buffers import Communicator
from topoplan.specs.gpu_profile import profile_of
from topoplan.specs.load import spec_from_document
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.units import GIB

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
    everywhere = ["world", "gradient norm"]
    assert names(dense, layout_of(dense)) == [*everywhere, "dp x cp", "dp"]
    split = layout_of(dense, tp=2, pp=2, cp=2)
    assert names(dense, split) == [*everywhere, "tp", "cp", "dp x cp", "dp", "pp", "tp x pp"]
    assert sizes_by_name(dense, split)["tp x pp"] == 4
    assert "tp x pp" not in names(dense, replace(split, backend="mca"))
    experts = ["ep", "etp x ep", "expert dp"]
    assert names(mixed, layout_of(mixed, ep=8)) == [*everywhere, "dp x cp", "dp", *experts]
    assert "tp x cp" in names(mixed, layout_of(mixed, tp=2, ep=8))


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
    assert sizes["pp"] == 4  # for scalars
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
    assert min(sizes, key=sizes.__getitem__) == "tp x pp"
    assert sizes["ep"] > 2500 * MIB
    assert sizes["pp"] < 192 * MIB


@pytest.mark.parametrize(
    ("gpu", "gpus", "model", "form", "beside_gib"),
    [
        # Out-of-memory messages: what the process holds, less what torch allocated and reserved.
        ("h200-sxm-141gb", 4, "Qwen/Qwen3-4B", {"tp": 2}, 4.22),  # THUDM/slime issue 1951
        ("h100-sxm-80gb", 4, "Qwen/Qwen3-4B", {"tp": 2}, 3.83),  # THUDM/slime issue 1767
        ("h200-sxm-141gb", 8, "Qwen/Qwen3-30B-A3B", {"tp": 4, "ep": 4, "etp": 1}, 9.66),  # a report on slime, 2026-05
        # nvidia-smi beside max_memory_reserved: basetenlabs/ml-cookbook, qwen3.6-27b-msswift
        ("h200-sxm-141gb", 8, "Qwen/Qwen3.5-27B", {"tp": 8}, 6.6),
        # What suspending NCCL frees (verl pull request 6408), and a context.
        ("h100-sxm-80gb", 8, "Qwen/Qwen3-8B", {"tp": 2, "pp": 2}, 7.0 + 0.67),
        ("h100-sxm-80gb", 8, "Qwen/Qwen3-30B-A3B", {"tp": 2, "pp": 2, "ep": 4, "etp": 1}, 9.5 + 0.67),
    ],
)
def test_what_processes_hold_beside_torch(
    gpu: str, gpus: int, model: str, form: dict[str, int], beside_gib: float
) -> None:
    """Predictions are low, as docs/accuracy.md says: by less than two thirds."""
    spec = spec_from_document(
        {
            "cluster": {"gpu": gpu, "nodes": 1, "gpus_per_node": gpus},
            "model": {"name": model},
            "job": {"seq_len": 4096, "global_batch_size": 16},
        },
        where="test",
    )
    memory = memory_of(spec, layout_of(spec, sequence_parallel=True, **form))
    beside = (memory.device_bytes - memory.reserved_bytes) / GIB
    assert 0.4 * beside_gib < beside < 1.02 * beside_gib


def test_micro_batches_and_recomputation_change_nothing() -> None:
    spec = spec_of(DENSE)
    plain, other = layout_of(spec, tp=2), layout_of(spec, tp=2, micro_batch_size=2, recompute="full")
    assert bytes_by_name(spec, plain) == bytes_by_name(spec, other)


def test_the_flex_dispatcher_does_without_nccls_all_to_all() -> None:
    spec = spec_of(MIXED)
    sends = bytes_by_name(spec, layout_of(spec, ep=8, moe_token_dispatcher_type="alltoall"))["ep"]
    kernels = bytes_by_name(spec, layout_of(spec, ep=8, moe_token_dispatcher_type="flex"))["ep"]
    assert sends > 4 * kernels > 0
