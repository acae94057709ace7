from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bed.bed import probe
from tests.bed.ready_hosts import NAMES, ready_hosts, spec_of
from tests.cli.conftest import SPEC, Cli


def test_a_spec_without_hosts_is_refused(cli: Cli, spec_file: Path) -> None:
    result = cli("preflight", spec_file)
    assert result.code == 2
    assert "names no hosts" in result.err
    assert "topoplan probe" in result.err


def test_a_bundle_without_hosts_is_refused(cli: Cli) -> None:
    result = cli("preflight", "generated/h100-4x8")
    assert result.code == 2
    assert "names no hosts" in result.err


def test_a_host_named_twice_is_refused(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text(SPEC.replace("nodes: 4", "nodes: 2") + "hosts: [a, a]\n")
    result = cli("preflight", file)
    assert result.code == 2
    assert "twice" in result.err


def test_an_unknown_check_is_refused(cli: Cli, spec_file: Path) -> None:
    result = cli("preflight", spec_file, "--skip", "gpu")
    assert result.code == 2
    assert "did you mean 'gpus'?" in result.err


def test_what_is_no_file_is_refused(cli: Cli, tmp_path: Path) -> None:
    assert cli("preflight", tmp_path / "none.yaml").code == 2
    assert cli("preflight", tmp_path).code == 2


def test_real_hosts(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if probe()[0] != "namespaces":
        pytest.skip(f"no network namespaces here: {probe()[1]}")
    with ready_hosts(tmp_path) as bed:
        spec_of(bed, tmp_path)
        monkeypatch.setenv("HOME", str(bed.home))
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        spec = tmp_path / "cluster.yaml"
        result = cli("preflight", spec)
        assert (result.code, result.err) == (0, ""), result.out
        assert "4 hosts: ready." in result.out
        made = cli("generate", spec, "--pin", "tp=2,pp=1,micro_batch_size=1", "-o", tmp_path / "bundle")
        assert made.code == 0, made.err
        (tmp_path / "n2/work/data/dataset_info.json").unlink()
        result = cli("preflight", tmp_path / "bundle", "--json")
        document = json.loads(result.out)
        failed = [(one["name"], one["host"]) for one in document["checks"] if one["outcome"] == "failure"]
        name = document["hosts"][2]
        assert failed == [("data", name)]
        assert (result.code, len(document["hosts"])) == (1, len(NAMES))
        assert cli("preflight", tmp_path / "bundle" / "plan.json", "--skip", "data").code == 0
