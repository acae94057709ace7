from dataclasses import replace
from typing import Any

import pytest

from tests.hosts.fleets import GIB, cluster, facts, fleet, needs, outcome, see, with_path
from topoplan.hosts.facts import HostFacts
from topoplan.hosts.preflight.fleet import Check, Fleet
from topoplan.hosts.preflight.storage import data, disk, model, output, output_shared, workdir
from topoplan.trainers.checkpoint_size import CheckpointSize

SAVES = "/work/saves/a-run"


def spoilt(name: str, **changes: Any) -> Fleet:
    """Return a scene in which the second of three hosts differs."""
    return fleet(facts(0), with_path(facts(1), name, **changes), facts(2), wanted=needs())


def everywhere(name: str, **changes: Any) -> Fleet:
    return fleet(*(with_path(facts(number), name, **changes) for number in range(2)), wanted=needs())


@pytest.mark.parametrize(
    ("check", "name", "changes", "expected"),
    [
        (workdir, "/work", {}, "ok"),
        (workdir, "/work", {"exists": False}, "failure"),
        (workdir, "/work", {"is_writable": False}, "failure"),
        (workdir, "/work", {"is_writable": None}, "ok"),
        (model, "/work/models/m", {}, "ok"),
        (model, "/work/models/m", {"exists": False}, "failure"),
        (model, "/work/models/m", {"files": 0}, "failure"),
        (model, "/work/models/m", {"fingerprint": "other"}, "failure"),
        (model, "/work/models/m", {"fingerprint": ""}, "ok"),
        (model, "/work/models/m", {"size_bytes": 9 * GIB}, "warning"),
        (model, "/work/models/m", {"size_bytes": None, "files": None}, "ok"),
        (data, "/work/data", {}, "ok"),
        (data, "/work/data", {"exists": False}, "failure"),
        (data, "/work/data", {"fingerprint": "other"}, "warning"),
        (output, SAVES, {}, "ok"),
        (output, SAVES, {"is_writable": False}, "failure"),
        (output, SAVES, {"exists": True, "files": 12}, "warning"),
        (output_shared, SAVES, {}, "ok"),
        (output_shared, SAVES, {"mount": "other:/store"}, "warning"),
        (output_shared, SAVES, {"file_system": "ext4", "mount": "/dev/sda1"}, "warning"),
        (disk, SAVES, {}, "ok"),
        (disk, SAVES, {"free_bytes": 10 * GIB}, "failure"),
        (disk, SAVES, {"free_bytes": 150 * GIB}, "warning"),
        (disk, SAVES, {"free_bytes": None}, "skipped"),
    ],
)
def test_a_directory_of_one_host(check: Check, name: str, changes: dict[str, Any], expected: str) -> None:
    assert outcome(check, spoilt(name, **changes), 1) == expected


@pytest.mark.parametrize("check", [workdir, model, data, output, output_shared, disk])
def test_a_host_that_says_nothing_of_a_path_is_skipped(check: Check) -> None:
    assert outcome(check, fleet(facts(paths={}), facts(1), wanted=needs())) == "skipped"


@pytest.mark.parametrize("check", [model, data, output, output_shared, disk])
def test_without_a_plan_there_is_nothing_to_look_for(check: Check) -> None:
    assert outcome(check, fleet(facts())) is None


def test_different_files_are_told_on_the_host_that_is_alone() -> None:
    found = see(model, spoilt("/work/models/m", fingerprint="other"), 1)
    assert found.what == "/work/models/m has other files than on n0, n2"
    assert outcome(model, spoilt("/work/models/m", fingerprint="other"), 0) == "ok"


def nowhere() -> Fleet:
    place = cluster(nodes=1)
    return fleet(facts(paths={}), wanted=needs(), of=replace(place, hosts=(replace(place.hosts[0], workdir=None),)))


def test_a_relative_path_without_a_working_directory_is_below_one_that_is_new_each_time() -> None:
    assert outcome(model, nowhere()) == "failure"
    assert outcome(data, nowhere()) == "failure"
    assert outcome(output, nowhere()) == "warning"
    assert outcome(output_shared, nowhere()) is None
    assert outcome(disk, nowhere()) is None
    assert outcome(workdir, nowhere()) is None


def test_data_that_nobody_named() -> None:
    assert outcome(data, fleet(facts(), wanted=needs(has_dataset=False))) == "failure"
    assert outcome(data, fleet(facts(), wanted=needs(dataset_dir=None))) is None


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "lustre", "gpfs", "fuse.juicefs", "fuse.ceph", "ceph", "beegfs", "wekafs"]
)
def test_storage_is_shared_where_all_mount_the_same_file_server(kind: str) -> None:
    assert outcome(output_shared, everywhere(SAVES, file_system=kind)) == "ok"


@pytest.mark.parametrize("kind", ["ext4", "xfs", "overlay", "tmpfs", "btrfs", ""])
def test_the_same_name_of_a_local_disk_is_no_shared_storage(kind: str) -> None:
    assert outcome(output_shared, everywhere(SAVES, file_system=kind, mount="/dev/nvme0n1p1")) == "warning"


def test_one_node_needs_no_shared_storage() -> None:
    host: HostFacts = with_path(facts(), SAVES, file_system="ext4", mount="/dev/sda1")
    assert outcome(output, fleet(host, wanted=needs())) == "ok"
    assert outcome(output_shared, fleet(host, wanted=needs())) is None


def test_checkpoints_that_cannot_be_resumed_from_are_in_the_way() -> None:
    host = with_path(facts(), SAVES, exists=True, files=3)
    found = see(output, fleet(host, wanted=needs(resumable=False)))
    assert "cannot be resumed" in found.what


@pytest.mark.parametrize(
    ("numbered", "said"),
    [
        ((), " and no checkpoint: there is nothing to go on from"),
        (("runs-2024", "my-checkpoint-7"), " and no checkpoint: there is nothing to go on from"),
        (("checkpoint-50",), " with 1 checkpoint, checkpoint-50: the run goes on from the last complete one, and"),
        (("checkpoint-100", "checkpoint-50"), " with 2 checkpoints, the last checkpoint-100: the run goes on from the"),
        (None, ": the run goes on from a complete checkpoint in it, and without one starts anew"),
    ],
)
def test_a_used_place_is_told_with_the_checkpoints_in_it(numbered: tuple[str, ...] | None, said: str) -> None:
    host = with_path(facts(), SAVES, exists=True, files=3, numbered=numbered)
    found = see(output, fleet(host, wanted=needs()))
    assert found.what.startswith(f"{SAVES} holds 3 files{said}")
    if numbered == ():
        assert outcome(output, fleet(host, wanted=needs(resumable=False))) == "warning"


def test_a_place_in_use_and_on_own_disks_is_told_as_both_and_the_latter_of_all_hosts_alike() -> None:
    local = everywhere(SAVES, file_system="ext4", mount="/dev/sda1")
    first, *others = local.nodes
    used = replace(first, facts=with_path(first.facts, SAVES, exists=True, files=1, numbered=()))
    of = replace(local, nodes=(used, *others))
    assert [outcome(output, of, number) for number in range(2)] == ["warning", "ok"]
    assert len({(see(output_shared, of, number).what, outcome(output_shared, of, number)) for number in range(2)}) == 1
    assert "each node keeps its part" in see(output_shared, of).what


def test_own_disks_take_a_share_of_a_checkpoint_each() -> None:
    """100 GiB per checkpoint over two nodes: 60 GiB are enough for one part, but not for those that are kept."""
    local = everywhere(SAVES, file_system="ext4", free_bytes=60 * GIB)
    assert outcome(disk, local) == "warning"
    shared = everywhere(SAVES, free_bytes=60 * GIB)
    assert outcome(disk, shared) == "failure"


def test_weights_at_the_end_alone_need_no_room_for_more() -> None:
    final = CheckpointSize(megatron_bytes=16 * GIB, hf_bytes=0, optimizer_bytes=0, at_once=0)
    host = with_path(facts(), SAVES, free_bytes=17 * GIB)
    assert outcome(disk, fleet(host, wanted=needs(checkpoint=final))) == "ok"
