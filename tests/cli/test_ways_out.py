"""The ways out that `rank` prints, followed one by one."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.cli.conftest import Cli
from tests.cli.test_rank import SCHEMA
from topoplan.cli.options import SpecOptions
from topoplan.cli.ways_out import changed
from topoplan.planner.plan import Change

MACHINES = {
    "h100": ("h100-sxm-80gb", "Qwen/Qwen3-8B", 1),
    "rtx4090": ("rtx4090-24gb", "Qwen/Qwen3-4B", 2),
}


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lift the limit on the layouts that searches for ways out may evaluate, so that every one of them is finished."""
    monkeypatch.setattr("topoplan.planner.ways_out.MOST_LAYOUTS", 1e9)
    monkeypatch.setattr("topoplan.planner.ways_out.MOST_LAYOUTS_WHERE_TIGHT", 1e9)


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Write a spec file for each machine to the working directory; return their names."""
    monkeypatch.chdir(tmp_path)
    for name, (gpu, model, batch) in MACHINES.items():
        job = f"{{seq_len: 4096, global_batch_size: {batch}}}"
        Path(f"{name}.yaml").write_text(f"{{nodes: 1, gpus_per_node: 2, gpu: {gpu}, model: {model}, job: {job}}}")
    return {name: f"{name}.yaml" for name in MACHINES}


def ranked(cli: Cli, *arguments: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(cli("rank", *arguments, "--json").out)
    return document


@pytest.mark.parametrize(
    ("machine", "options", "kinds"),
    [
        ("rtx4090", [], ["host_memory", "nodes", "gpu", "lora", "qlora"]),
        (
            "h100",
            ["--seq-len", "8192", "--batch", "2"],
            ["host_memory", "nodes", "gpu", "lora", "qlora", "seq_len"],
        ),
        (
            "h100",
            ["--model", "Qwen/Qwen3-14B", "--set", "gpus_per_node=4", "--batch", "4", "--pin", "tp=2,pp=1"],
            ["pins", "host_memory", "nodes", "gpu", "lora"],
        ),
    ],
)
def test_every_way_out_of_a_job_that_does_not_fit_leads_to_the_plan_that_it_names(
    cli: Cli, specs: dict[str, str], machine: str, options: list[str], kinds: list[str]
) -> None:
    document = ranked(cli, specs[machine], *options)
    assert document["plans"] == []
    jsonschema.validate(document, SCHEMA)
    found = [way for way in document["ways_out"] if way["plan"]]
    assert [way["kind"] for way in found] == kinds
    for way in found:
        program, verb, *arguments = shlex.split(way["command"])
        assert (program, verb) == ("topoplan", "rank")
        best = ranked(cli, *arguments)["plans"][0]
        assert {key: best[key] for key in way["plan"] if key != "warnings"} == {
            key: value for key, value in way["plan"].items() if key != "warnings"
        }
    for way in document["ways_out"]:
        assert bool(way["reason"]) != bool(way["plan"])
        assert way["loss"]


def spare_gib(plan: dict[str, Any]) -> float:
    """Return the memory that a plan leaves free beyond its margin."""
    memory = plan["memory"]
    spare: float = memory["capacity_gib"] - memory["device_gib"] - memory["margin_gib"]
    return spare


def test_a_job_that_barely_fits_is_shown_what_leaves_room(cli: Cli, specs: dict[str, str]) -> None:
    document = ranked(cli, specs["h100"], "--top", "400")
    assert document["plans"]
    assert all(spare_gib(plan) < 0.1 * 79.6 for plan in document["plans"])
    assert [way["kind"] for way in document["ways_out"] if way["plan"]] == ["host_memory", "nodes", "gpu"]
    for way in document["ways_out"]:
        if way["plan"]:
            plans = ranked(cli, *shlex.split(way["command"])[2:], "--top", "400")["plans"]
            assert way["plan"]["id"] in [plan["id"] for plan in plans]
            assert spare_gib(way["plan"]) >= 0.1 * way["plan"]["memory"]["capacity_gib"]


def test_where_a_plan_leaves_room_nothing_else_is_searched(cli: Cli, specs: dict[str, str]) -> None:
    assert ranked(cli, specs["h100"], "--set", "nodes=4")["ways_out"] == []


def test_in_words_each_command_is_a_line_of_its_own(cli: Cli, specs: dict[str, str]) -> None:
    error = cli("rank", specs["rtx4090"]).err
    assert "no single change" not in error
    assert re.search(
        r"- on 3 nodes \(same job, more machines\)\n +[\d.]+ of 24.0 GiB, [\d.]+ s per step, [\d,]+ tok", error
    )
    assert "\n      topoplan rank rtx4090.yaml --nodes 3\n" in error
    *_, tried, following = error.rstrip().splitlines()
    assert tried.startswith("tried, without success: another backend; ")
    assert following == f"Next  {re.findall(r'      (topoplan .*)', error)[0]}"
    table = cli("rank", specs["h100"]).out
    assert (
        "\nPlan 1 is tight, and no plan leaves 10% of the card free beyond its margin.\nThese changes would:\n" in table
    )
    assert "\n      topoplan rank h100.yaml --nodes 2\n" in table


def test_a_change_takes_the_place_of_what_the_command_line_says_of_its_key() -> None:
    given = SpecOptions(overrides=["job.seq_len=8192", "nodes=2"], pin=["tp=1"], backend="mca", model="a b")
    shorter = changed(given, Change(kind="seq_len", words="", sets=("seq_len=4096",)))
    assert shorter.words(None) == [
        *("--model", "a b", "--seq-len", "4096", "--set", "nodes=2", "--pin", "tp=1", "--backend", "mca"),
    ]
    free = changed(given, Change(kind="pins", words="", sets=("pin={}",), backend="all"))
    assert free.words(None)[-4:] == ["--set", "pin={}", "--backend", "all"]
    assert "--pin" not in free.words(None)
