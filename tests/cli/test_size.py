import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import SPEC, Cli

PIN = ("--pin", "tp=2,pp=1,cp=1")


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(SPEC + "  samples: 100000\n  epochs: 1\n")
    return path


def test_the_fewest_nodes_in_time_are_found(cli: Cli, job_file: Path) -> None:
    result = cli("size", job_file, *PIN, "--max-hours", "0.8", "--gpu-hour-price", "2", "--json")
    assert result.code == 0, result.err
    view = json.loads(result.out)
    assert view["schema"] == "topoplan.size/1"
    hours = {row["nodes"]: row["job_time"]["hours"] for row in view["rows"] if row["plan"]}
    assert list(range(1, view["answer"] + 1)) == [row["nodes"] for row in view["rows"]]
    assert hours[view["answer"]] <= 0.8
    assert all(value > 0.8 for nodes, value in hours.items() if nodes < view["answer"])


def test_to_be_sure_takes_as_many_nodes_or_more(cli: Cli, job_file: Path) -> None:
    likely, sure = (
        json.loads(cli("size", job_file, *PIN, "--max-hours", "0.85", "--json", *more).out)
        for more in ((), ("--sure",))
    )
    assert sure["answer"] > likely["answer"]
    assert sure["rows"][-1]["hours_band"][1] <= 0.85


def test_constants_of_ones_own_count(cli: Cli, job_file: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("gpu: h100-sxm-80gb\ngemm_efficiency: 0.4\n")
    usual, slow = (
        json.loads(cli("size", job_file, *PIN, "--max-hours", "0.85", "--json", *more).out)["answer"]
        for more in ((), ("--profile", own))
    )
    assert slow > usual


def test_tokens_take_the_place_of_samples(cli: Cli, spec_file: Path) -> None:
    view = json.loads(cli("size", spec_file, *PIN, "--max-hours", "9", "--tokens", "2B", "--json").out)
    assert view["steps"] == 7630  # 2e9 tokens in steps of 64 x 4,096
    assert view["job"]["samples"] is None


def test_none_in_time_is_exit_code_1(cli: Cli, job_file: Path) -> None:
    result = cli("size", job_file, *PIN, "--max-hours", "0.001", "--max-nodes", "2")
    assert result.code == 1
    assert "With up to 2 nodes" in result.out
    assert max(map(len, result.out.splitlines())) <= 100


def test_the_machines_of_a_spec_do_not_hold_the_number_of_nodes(cli: Cli, job_file: Path) -> None:
    hosts = "hosts: [{address: a}, {address: b}, {address: c}, {address: d}]\n"
    job_file.write_text(job_file.read_text() + hosts)
    assert cli("size", job_file, *PIN, "--max-hours", "9").code == 0


def test_the_backends_that_are_named_are_searched(cli: Cli, spec_file: Path, fake_search: list[Any]) -> None:
    cli("size", spec_file, "--backend", "fsdp2", "--tokens", "1M", "--max-hours", "1000", "--max-nodes", "1")
    assert [call["spec"].backends for call in fake_search] == [("fsdp2",)]
