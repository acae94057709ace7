from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import SPEC, Cli
from tests.run.test_bundle_reader import bundle_at

FEW = ("--set", "nodes=1", "--pin", "pp=1,micro_batch_size=1")


@pytest.fixture
def with_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "cluster.yaml"
    path.write_text(SPEC.replace("nodes: 4", "nodes: 1") + "hosts: [{address: 127.0.0.1, port: 9}]\n")
    return path


def test_a_dry_run_shows_the_trials_and_their_cost(cli: Cli, with_hosts: Path, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    document = json.loads(cli("tune", with_hosts, *FEW, "--dry-run", "--json", "--no-cache").out)
    assert (document["schema"], document["made_up_samples"]) == ("topoplan.tune/1", True)
    first = document["trials"][0]
    assert first["at_most_s"] > first["seconds"] > first["steps"] * first["step_s"]
    assert first["gpu_hours"] == pytest.approx(8 * first["seconds"] / 3600, rel=1e-4)
    shown = cli("tune", with_hosts, *FEW, "--dry-run", "--no-cache").out
    assert first["plan"].replace("-", " ") in shown
    assert "GPU hours together" in shown
    assert set(tmp_path.iterdir()) == before


def test_hosts_that_cannot_be_reached_end_it_before_anything_is_written(
    cli: Cli, with_hosts: Path, tmp_path: Path
) -> None:
    result = cli("tune", with_hosts, *FEW)
    assert result.code == 1
    assert "127.0.0.1:9: nothing listens there" in result.err or "127.0.0.1" in result.err
    assert "the hosts could not be used; nothing was measured" in " ".join(result.out.split())
    assert not list(tmp_path.glob("*-profile.yaml"))


def test_what_is_refused_before_anything_is_spent(cli: Cli, with_hosts: Path, tmp_path: Path) -> None:
    (tmp_path / "there.yaml").write_text("mine\n")
    assert cli("tune", with_hosts, *FEW, "-o", "there.yaml").is_refused("there.yaml: exists; name another with -o")
    assert cli("tune", with_hosts, *FEW, "-o", "no/where.yaml").is_refused("no: no such directory")
    bundle = bundle_at(tmp_path / "bundle")
    assert cli("tune", bundle, *FEW, "--dry-run").is_refused("a bundle says its job and its cluster")
    with_hosts.write_text(SPEC + "slurm: {partition: gpu}\n")
    assert cli("tune", with_hosts, *FEW).is_refused("its machines are Slurm's, and trials are launched over SSH")
    with_hosts.write_text(SPEC)
    assert cli("tune", with_hosts, *FEW).is_refused("the spec names no hosts")
