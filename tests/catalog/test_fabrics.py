import json
from importlib.resources import files
from typing import get_args

import pytest

from topoplan.catalog.fabrics import kind_of_link_layer, link_layers, machine_of, machines, needs_of_kind, profile_of
from topoplan.specs.cluster import FabricKind

KINDS: tuple[FabricKind, ...] = get_args(FabricKind)


def test_every_kind_of_fabric_is_in_the_table_and_says_where_its_needs_are_from() -> None:
    table = json.loads(files("topoplan.catalog").joinpath("fabrics.json").read_text(encoding="utf-8"))
    assert tuple(table["kinds"]) == KINDS
    assert all(row["source"] for row in table["machines"])
    for kind in KINDS:
        for need in needs_of_kind(kind):
            assert need.source
            assert all(path.startswith("/") for path in need.paths)
            assert not need.what.endswith(".")


def test_a_link_layer_is_of_one_kind() -> None:
    for kind in KINDS:
        assert {kind_of_link_layer(layer) for layer in link_layers(kind)} <= {kind}


@pytest.mark.parametrize(
    ("firmware", "pci", "found"),
    [
        ({"sys_vendor": "Amazon EC2", "product_name": "p5en.48xlarge"}, ["1d0f:efa2"], "an AWS machine with EFA"),
        ({"sys_vendor": "Amazon EC2"}, ["1d0f:ec20"], None),
        ({"sys_vendor": "Google"}, ["1ae0:0084"], "an A3 Mega machine of Google Cloud"),
        ({"sys_vendor": "Google"}, ["1ae0:0042"], None),
        ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, ["10de:2321"], None),
        ({"sys_vendor": "Microsoft Corporation"}, ["10de:2330"], None),
        ({}, ["10de:2330", "1d0f:efa1"], None),
    ],
)
def test_machines_are_known_by_firmware_and_pci_devices_together(
    firmware: dict[str, str], pci: list[str], found: str | None
) -> None:
    machine = machine_of(firmware, pci)
    assert (machine.name if machine else None) == found


def test_each_machine_is_the_one_that_its_own_signs_give() -> None:
    for machine in machines():
        assert machine_of(dict(machine.firmware), machine.pci[:1]) == machine
        assert bool(machine.kind) != bool(machine.topology_file)
        assert bool(machine.topology_file) == bool(machine.remedy)


def test_a_vendors_profile_is_known_by_its_own_variables() -> None:
    assert "NCCL_BUFFSIZE" in profile_of(["NCCL_FASTRAK_NUM_FLOWS"])
    assert profile_of(["NCCL_BUFFSIZE"]) == frozenset()
