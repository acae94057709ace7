import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.run.test_bundle_reader import FOUR, bundle_at


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return bundle_at(tmp_path / "bundle")


def test_a_dry_run_prints_every_file_and_command_and_touches_nothing(cli: Cli, bundle: Path, tmp_path: Path) -> None:
    result = cli("launch", bundle, "--dry-run")
    assert (result.code, result.err) == (0, "")
    for node in range(4):
        assert f"node-{node:02d}: ssh ada@10.0.0.{node + 1}" in result.out
        assert f"setsid bash -- node-{node:02d}.sh" in result.out
        for name in (f"node-{node:02d}.sh", "train.yaml", "plan.json", "hosts.json", "README.md"):
            size = (bundle / name).stat().st_size
            assert f"/node-{node:02d}/<run id>-<random>/{name} ({size:,} bytes)" in result.out
    assert "PROGRAMS" in result.out
    assert not (tmp_path / "state").exists()
    assert cli("launch", bundle, "--dry-run").out == result.out


def test_a_dry_run_without_hosts_shows_placeholders_and_says_that_hosts_are_missing(cli: Cli, tmp_path: Path) -> None:
    bundle = bundle_at(tmp_path / "hostless", cluster=replace(FOUR, hosts=()))
    result = cli("launch", bundle, "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("Cannot launch ")
    assert "Note: " in result.out
    assert "its plan names no hosts, and 4 are needed; add `hosts: [" in result.out
    for node in range(4):
        assert f"\nnode-{node:02d}: ssh USER@HOST-{node:02d}\n" in result.out
        assert f"/topoplan-runs-USER/node-{node:02d}/<run id>-<random>/train.yaml (" in result.out
        assert f"MASTER_ADDR=HOST-00 setsid bash -- node-{node:02d}.sh" in result.out
    document = json.loads(cli("launch", bundle, "--dry-run", "--json").out)
    assert document["hosts_known"] is False
    assert cli("launch", bundle).is_refused("its plan names no hosts, and 4 are needed")


def test_the_bundle_is_worked_out_once(cli: Cli, bundle: Path, worked_out: Counter[str]) -> None:
    assert cli("launch", bundle, "--dry-run").code == 0
    assert worked_out == {"plan": 1, "files": 1}


def test_a_dry_run_has_a_json_twin(cli: Cli, bundle: Path) -> None:
    document = json.loads(cli("launch", bundle, "--dry-run", "--json").out)
    assert document["schema"] == "topoplan.launch/1"
    assert [node["ssh"] for node in document["nodes"]] == [f"ssh ada@10.0.0.{number}" for number in range(1, 5)]
    assert {"put", "start", "keep", "stop"} < {program["name"] for program in document["programs"]}
    assert set(document["nodes"][1]["files"]) == {"node-01.sh", "train.yaml", "plan.json", "hosts.json", "README.md"}


def test_a_dry_run_says_which_secrets_are_set_and_a_launch_without_one_is_refused(
    cli: Cli, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_them = bundle_at(tmp_path / "with", cluster=replace(FOUR, secrets=("HF_TOKEN", "WANDB_API_KEY")))
    monkeypatch.setenv("HF_TOKEN", "hf_hunter22")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    result = cli("launch", with_them, "--dry-run")
    assert "Secret HF_TOKEN: set here; its value is passed to `start` on standard input" in result.out
    assert "Secret WANDB_API_KEY: NOT SET here, so a launch would be refused" in result.out
    document = cli("launch", with_them, "--dry-run", "--json").out
    assert json.loads(document)["secrets"] == [
        {"name": "HF_TOKEN", "set": True},
        {"name": "WANDB_API_KEY", "set": False},
    ]
    assert "hunter22" not in result.out + document
    refused = cli("launch", with_them)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("topoplan: secrets: WANDB_API_KEY is not set here, and the spec names it; export it")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--exclude", "10.0.0.3"], "3 of 4 hosts (without 10.0.0.3)"),
        (["--nodes", "7"], "is not one of the bundle's hosts"),
        (["--grace", "-1"], "--grace"),
        (["--retries", "2", "--detach"], "--retries: nobody is there to start it again; leave out --detach"),
        (["--lost-host-after", "30"], "--lost-host-after: '30' is no time; expected one such as 90s, 30min or 2h"),
    ],
)
def test_bad_choices_get_one_message(cli: Cli, bundle: Path, options: list[str], words: str) -> None:
    assert cli("launch", bundle, *options).is_refused(words)


def test_help_and_page_say_the_same_of_ranks_that_are_killed(cli: Cli) -> None:
    said = " ".join(cli("launch", "--help").out.split())
    assert "A rank that was killed is restarted unless the logs say that memory ran out." in said
    page = (Path(__file__).parents[2] / "docs" / "launch.md").read_text()
    assert "| a rank that was killed (SIGKILL), and no log says that memory ran out | yes" in page
