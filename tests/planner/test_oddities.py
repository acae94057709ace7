"""What a ranking says about links that its spec leaves out."""

import pytest

from tests.specs.test_build_cluster import cluster
from topoplan.planner.oddities import machine_note

H100, A4090 = "h100-sxm-80gb", "rtx4090-24gb"


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        (
            {"gpu": H100, "nodes": 2, "gpus_per_node": 8},
            "NVLink of 900GB/s per GPU, NICs of 400Gb/s, 8 NICs per node; if the GPUs communicate over PCIe, set"
            " nvlink_bandwidth: none",
        ),
        (
            {"gpu": H100, "nodes": 2, "gpus_per_node": 8, "ib_bandwidth": "100Gb/s", "nics_per_node": 1},
            "NVLink of 900GB/s per GPU; if the GPUs communicate over PCIe, set nvlink_bandwidth: none",
        ),
        (
            {"gpu": "h100", "nodes": 1},
            "8 GPUs per node, NVLink of 900GB/s per GPU; if the GPUs communicate over PCIe, set nvlink_bandwidth: none",
        ),
        ({"gpu": A4090, "nodes": 1, "gpus_per_node": 4}, "no NVLink (PCIe of 31.5GB/s each way)"),
        ({"gpu": A4090, "nodes": 1, "gpus_per_node": 4, "pcie_bandwidth": "12GB/s"}, "no NVLink"),
    ],
)
def test_they_are_named_with_their_machine(keys: dict[str, object], note: str) -> None:
    found = cluster(**keys)
    assert machine_note(found) == f"assumed, as usual for machines with {found.gpu.name}: {note}"


def test_nothing_is_said_where_the_spec_says_all() -> None:
    given = {"nvlink_bandwidth": "none", "ib_bandwidth": "400Gb/s", "nics_per_node": 8}
    assert machine_note(cluster(gpu=H100, nodes=2, gpus_per_node=8, **given)) == ""
