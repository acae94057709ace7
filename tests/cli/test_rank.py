"""The ways out that `rank` prints, followed one by one."""

import csv
import fcntl
import io
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.cli.conftest import Cli
from tests.samples import make_plan, make_ranking, make_rejection
from topoplan.cli.options import SpecOptions
from topoplan.cli.rank import changed
from topoplan.planner.plan import Change, Counts
from topoplan.report.document import COLUMNS

SCHEMA = json.loads((Path(__file__).parents[1] / "data" / "rank.schema.json").read_text())


def test_json_follows_the_schema(cli: Cli, spec_file: Path, fake_search: list[Any]) -> None:
    document = json.loads(cli("rank", spec_file, "--json", "--top", "3").out)
    jsonschema.validate(document, SCHEMA)
    assert len(document["plans"]) == 3
    assert "rejected" not in document
    assert {plan["trainer"] for plan in document["plans"]} == {"llamafactory"}
    assert document["cluster"]["name"] == "test-2x8"
    assert fake_search[0]["keep_rejected"] is False


def test_rejected_layouts_come_when_asked_for(cli: Cli, spec_file: Path, fake_search: list[Any]) -> None:
    document = json.loads(cli("rank", spec_file, "--json", "--rejected").out)
    jsonschema.validate(document, SCHEMA)
    assert document["rejected"][0]["fix"] == "recompute full makes it fit"
    assert fake_search[0]["keep_rejected"] is True
    assert "Rejected by memory: 1 layout" in cli("rank", spec_file, "--rejected").out


def on_a_small_terminal(*words: str) -> tuple[str, int]:
    """Return what a command prints on a terminal of 24 lines of 80 columns, and its exit code."""
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    arguments = [sys.executable, "-m", "topoplan", *words]
    clean = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    with subprocess.Popen(arguments, stdout=terminal, stderr=terminal, env=clean | {"TERM": "dumb"}) as process:
        os.close(terminal)
        shown = b""
        with suppress(OSError):  # the other end is closed
            while part := os.read(main, 65536):
                shown += part
    os.close(main)
    return shown.decode(), process.returncode


def test_a_small_terminal_ends_with_the_best_plan_the_safe_one_and_the_next_command(spec_file: Path) -> None:
    shown, code = on_a_small_terminal("rank", str(spec_file))
    assert code == 0
    rows = [line[at : at + 80] for line in shown.splitlines() for at in range(0, max(1, len(line)), 80)]
    screen = "".join(f"{line}\n" for line in rows[-23:])  # the last line holds the prompt
    plan = r"tp\d+(-[a-z_+0-9]+)+"
    assert re.search(rf"^Best  {plan}", screen, re.MULTILINE)
    assert re.search(rf"^Safe  (same plan|{plan})", screen, re.MULTILINE)
    whole = screen.replace("\n", "")
    assert re.search(rf"Next  topoplan generate {re.escape(str(spec_file))} --plan {plan}$", whole)


def test_on_a_terminal_an_error_is_wrapped_and_its_commands_are_whole(spec_file: Path) -> None:
    words = ["--set", "model=Qwen/Qwen3-235B-A22B", "--pin", "tp=8,pp=4,micro_batch_size=1"]
    shown, code = on_a_small_terminal("rank", str(spec_file), *words)
    assert code == 1
    lines = shown.replace("\x1b[2K", "").splitlines()  # what erases the line of progress
    commands = [line.strip() for line in lines if line.lstrip().startswith(("topoplan ", "Next  "))]
    assert any(len(command) > 80 for command in commands)  # a long path of a spec
    assert all(len(line) <= 80 for line in lines if line.strip() not in commands)
    misses = [line for at, line in enumerate(lines) if lines[at - 1].startswith("  - ") and not line.startswith("  - ")]
    assert misses
    assert all(line.startswith("    ") for line in misses)


def test_the_next_command_writes_the_plan_that_it_names(cli: Cli, tmp_path: Path) -> None:
    options = ["--gpu", "h100-sxm-80gb", "--model", "Qwen/Qwen3-8B", "--seq-len", "2048", "--batch", "16"]
    options += ["--pin", "tp=2,pp=1", "--set", "trainer.save_steps=7", "--margin", "3%", "--trainer", "llamafactory"]
    found = json.loads(cli("rank", *options, "--json").out)
    jsonschema.validate(found, SCHEMA)
    verb, *words = shlex.split(found["next"])
    assert (verb, words[0]) == ("topoplan", "generate")
    written = json.loads(cli(*words, "-o", tmp_path / "bundle", "--json").out)
    assert written["plan"]["id"] == found["best"]["id"] == found["plans"][0]["id"]
    assert written["warnings"] == found["plans"][0]["warnings"]


def test_what_is_assumed_without_a_spec_is_said(cli: Cli, fake_search: list[Any]) -> None:
    options = ["--gpu", "h100-sxm-80gb", "--model", "Qwen/Qwen3-8B", "--seq-len", "4096", "--batch", "64"]
    assert cli("rank", *options).out.startswith("Assumed: 1 node (--nodes), full fine-tuning (--finetuning).\n")
    assert "(--nodes)" not in cli("rank", *options, "--nodes", "4", "--finetuning", "full").out
    spec = fake_search[1]["spec"]
    assert (spec.cluster.nodes, spec.cluster.gpus_per_node, spec.job.seq_len, spec.job.global_batch_size) == (
        4,
        8,
        4096,
        64,
    )


def test_csv_has_one_row_for_every_plan_and_the_others_have_ten(
    cli: Cli, spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = make_ranking(*(make_plan(step_s=3.0 + number) for number in range(12)))
    monkeypatch.setattr("topoplan.planner.search.rank", lambda spec, **_: replace(many, spec=spec))
    rows = list(csv.reader(io.StringIO(cli("rank", spec_file, "--csv").out)))
    assert tuple(rows[0]) == COLUMNS
    assert [int(row[0]) for row in rows[1:]] == [*range(1, 13)]
    assert len(cli("rank", spec_file, "--csv", "--top", "4").out.splitlines()) == 1 + 4
    assert len(json.loads(cli("rank", spec_file, "--json").out)["plans"]) == 10


def test_options_change_the_spec(cli: Cli, spec_file: Path, fake_search: list[Any], tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("seq_len: 8192\nglobal_batch_size: 32\n")
    options = ["--model", "Qwen/Qwen3-14B", "--job", job, "--set", "global_batch_size=128", "--set", "nodes=8"]
    assert cli("rank", spec_file, *options, "--pin", "tp=4,pp=1", "--pin", "micro_batch_size=2").code == 0
    spec = fake_search[0]["spec"]
    assert spec.model.name == "Qwen/Qwen3-14B"
    assert (spec.job.seq_len, spec.job.global_batch_size, spec.cluster.nodes) == (8192, 128, 8)
    assert dict(spec.job.pin) == {"tp": 4, "pp": 1, "micro_batch_size": 2}


def test_the_same_pin_twice_is_fine(cli: Cli, spec_file: Path, fake_search: list[Any]) -> None:
    assert cli("rank", spec_file, "--pin", "tp=4", "--pin", "tp=4").code == 0


@pytest.mark.parametrize("form", ["", "--json", "--csv", "--rejected"])
def test_when_nothing_fits_the_nearest_misses_are_on_stderr(
    cli: Cli, spec_file: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    empty = make_ranking(
        counts=Counts(candidates=2, out_of_memory=2),
        rejected=(make_rejection(fix="recompute full makes it fit"),),
    )
    monkeypatch.setattr("topoplan.planner.search.rank", lambda spec, **_: replace(empty, spec=spec))
    result = cli("rank", spec_file, *([form] if form else []))
    assert result.code == 1
    assert "recompute full makes it fit" in result.err
    assert result.err.startswith("topoplan: no layout fits")
    if form == "--json":
        jsonschema.validate(json.loads(result.out), SCHEMA)
    elif form == "--csv":
        assert result.out == ",".join(COLUMNS) + "\n"
    elif form == "":
        assert result.out == ""


def test_known_lengths_are_told_in_the_table_and_in_json(cli: Cli, spec_file: Path) -> None:
    options = ["--set", "lengths={128: 5000}", "--pin", "tp=2,pp=1,micro_batch_size=1"]
    assert (
        "Data, as plan 1 reads it:\n- lengths: 5,000 samples of job.lengths, mean 128"
        in cli("rank", spec_file, *options).out
    )
    document = json.loads(cli("rank", spec_file, *options, "--json").out)
    jsonschema.validate(document, SCHEMA)
    assert document["data_notes"][0].startswith("lengths: 5,000 samples")
    assert document["job"]["lengths"]["longest"] == 128
    assert document["job"]["samples"] == 5000
    assert document["plans"][0]["padding_share"] == 0.0


def test_backends_and_a_trainer_go_into_the_search(cli: Cli, spec_file: Path, fake_search: list[Any]) -> None:
    assert cli("rank", spec_file, "--backend", "all").code == 0
    assert cli("rank", spec_file, "--backend", "fsdp2,ddp", "--trainer", "swift").code == 0
    assert cli("rank", spec_file).code == 0
    seen = [(one["spec"].backends, one["spec"].trainer) for one in fake_search]
    assert seen == [(("mca", "ddp", "deepspeed", "fsdp2"), None), (("fsdp2", "ddp"), "swift"), ((), None)]


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
    assert document["next"] == found[0]["command"]
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
    document = ranked(cli, specs["h100"], "--seq-len", "2048", "--top", "400")
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
    table = cli("rank", specs["h100"], "--seq-len", "2048").out
    assert (
        "\nPlan 1 is tight, and no plan leaves 10% of the card free beyond its margin.\nThese changes would:\n" in table
    )
    assert "\n      topoplan rank h100.yaml --nodes 2 --seq-len 2048\n" in table


def test_a_change_takes_the_place_of_what_the_command_line_says_of_its_key() -> None:
    given = SpecOptions(overrides=["job.seq_len=8192", "nodes=2"], pin=["tp=1"], backend="mca", model="a b")
    shorter = changed(given, Change(kind="seq_len", words="", sets=("seq_len=4096",)))
    assert shorter.words(None) == [
        *("--model", "a b", "--seq-len", "4096", "--set", "nodes=2", "--pin", "tp=1", "--backend", "mca"),
    ]
    free = changed(given, Change(kind="pins", words="", sets=("pin={}",), backend="all"))
    assert free.words(None)[-4:] == ["--set", "pin={}", "--backend", "all"]
    assert "--pin" not in free.words(None)


def test_the_trainer_of_the_spec_is_searched_unless_the_option_names_another(
    cli: Cli, spec_file: Path, fake_search: list[Any]
) -> None:
    spec_file.write_text(f"{spec_file.read_text()}\ntrained_by: swift\n")
    for options in ([], ["--backend", "deepspeed"], ["--trainer", "llamafactory"]):
        cli("rank", spec_file, *options, "--csv", "--no-cache")
    assert [call["spec"].trainer for call in fake_search] == ["swift", "swift", "llamafactory"]
