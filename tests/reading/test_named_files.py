"""Where the files are that other files name: of a bundle, in its own working directory."""

import json
from pathlib import Path

import pytest

from topoplan.reading.named_files import beside, find, own_first
from topoplan.reading.parts import Part


def part_in(directory: Path) -> Part:
    directory.mkdir(exist_ok=True)
    return Part(kind="yaml", name=str(directory / "train.yaml"), text="")


def data_in(directory: Path) -> Path:
    path = directory / "data" / "dataset_info.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    return path


def hosts(*workdirs: str | None) -> str:
    return json.dumps({"schema": "topoplan.hosts/1", "nodes": [{"workdir": one} for one in workdirs]})


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    data_in(tmp_path)
    return tmp_path


def test_a_file_of_no_bundle_starts_in_the_working_directory(elsewhere: Path) -> None:
    part = part_in(elsewhere / "job")
    data_in(elsewhere / "job")

    assert find(part, "data/dataset_info.json") == Path("data/dataset_info.json")
    assert beside(part) == (elsewhere, elsewhere / "job")


def test_a_bundle_starts_in_itself(elsewhere: Path) -> None:
    part = part_in(elsewhere / "run")
    (elsewhere / "run" / "hosts.json").write_text(hosts(None, None))

    assert find(part, "data/dataset_info.json") is None
    own = data_in(elsewhere / "run")
    assert find(part, "data/dataset_info.json") == own
    assert beside(part) == own_first(part)[:1] == (elsewhere / "run",)


def test_a_bundle_with_a_workdir_starts_there(elsewhere: Path) -> None:
    part = part_in(elsewhere / "run")
    (elsewhere / "run" / "hosts.json").write_text(hosts(str(elsewhere / "shared"), None))
    there = data_in(elsewhere / "shared")

    assert find(part, "data/dataset_info.json") == there


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "a/1"}', '{"schema": "topoplan.hosts/1", "nodes": 1}'])
def test_another_hosts_json_makes_no_bundle(elsewhere: Path, text: str) -> None:
    part = part_in(elsewhere / "job")
    (elsewhere / "job" / "hosts.json").write_text(text)

    assert find(part, "data/dataset_info.json") == Path("data/dataset_info.json")
