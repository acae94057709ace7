from __future__ import annotations

from pathlib import Path

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
