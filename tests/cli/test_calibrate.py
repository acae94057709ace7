import json
from datetime import timedelta
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.run.test_bundle_reader import bundle_at
from topoplan.run import record
from topoplan.run.record import NodeRecord, RunRecord

PINS = ("--pin", "tp=8,pp=1,micro_batch_size=1")
PLAN = ("--plan", "tp8-pp1-dp4-mbs1", *PINS)


def log(folder: Path, step_s: float = 1.8, name: str = "trainer_log.jsonl") -> Path:
    path = folder / name
    clocks = (str(timedelta(seconds=int(30 + step_s * step))) for step in range(1, 41))
    lines = [
        json.dumps({"current_steps": step, "total_steps": 40, "loss": 1.0, "elapsed_time": clock})
        for step, clock in enumerate(clocks, 1)
    ]
    path.write_text("\n".join(lines))
    return path


def test_a_log_becomes_a_profile_that_rank_takes(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    given = ("calibrate", log(tmp_path), "--spec", spec_file, *PLAN)
    profile = tmp_path / "profile.yaml"
    result = cli(*given, "-o", profile)
    assert (result.code, result.err) == (0, "")
    assert "1 log with " in result.out
    assert "kernels" in result.out
    assert "log of a very different layout" in result.out
    assert f"Wrote {profile}" in result.out
    assert cli(*given, "-o", profile).is_refused("exists; name another, or remove it first")
    document = json.loads(cli(*given, "--json").out)
    assert document["schema"] == "topoplan.calibrate/1"
    assert document["logs"][0]["plan"] == "tp8-pp1-dp4-mbs1"
    assert abs(document["logs"][0]["time_error_after"]) < abs(document["logs"][0]["time_error_before"])
    ranked = json.loads(cli("rank", spec_file, "--profile", profile, *PINS, "--json").out)
    assert any("constants from 1 run on this cluster" in text for text in ranked["plans"][0]["warnings"])
    assert "calibrated" in ranked["notes"][0]
    shown = cli("rank", spec_file, "--profile", profile, *PINS).out
    assert "\nCalibrated profile:\n- the calibrated constants leave the best plan as it was\n" in shown
    assert "memory is predicted as before" in result.out
    before = json.loads(cli("rank", spec_file, *PINS, "--json").out)
    assert "widened" not in shown
    assert [plan["memory"] for plan in ranked["plans"]] == [plan["memory"] for plan in before["plans"]]
    assert "calibrated" in cli("show", "profile", "h100-sxm-80gb", "--profile", profile).out


def test_what_ran_may_be_said_by_its_rank(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    first = json.loads(cli("rank", spec_file, *PINS, "--json").out)["plans"][0]
    given = ("calibrate", log(tmp_path, first["time"]["step_s"]), "--spec", spec_file, "--plan", "1", *PINS)
    assert json.loads(cli(*given, "--json").out)["logs"][0]["plan"] == first["id"]
    assert cli("calibrate", log(tmp_path), "--spec", spec_file, "--plan", "99", *PINS).is_refused("there is no plan 99")


def test_what_ran_has_to_be_said(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    path = log(tmp_path)
    assert cli("calibrate", path, "--spec", spec_file).is_refused("does not say which plan ran; give --plan N|ID, or")
    two = ("--plan", "tp8-pp1-dp4-mbs1", "--plan", "tp4-pp1-dp8-mbs1")
    assert cli("calibrate", path, "--spec", spec_file, *two).is_refused("--plan: 2 for 1 logs; expected one for all")
    assert cli("calibrate", tmp_path / "none", "--spec", spec_file, *PLAN).code == 2
    slow = log(tmp_path, 90.0, "slow.jsonl")
    assert cli("calibrate", slow, "--spec", spec_file, *PLAN).is_refused("are predicted of tp8-pp1-dp4-mbs1; expected")


def test_a_log_that_is_given_again_is_no_other_run(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    path, copy = log(tmp_path), log(tmp_path, name="copy.jsonl")
    once = json.loads(cli("calibrate", path, "--spec", spec_file, *PLAN, "--json").out)
    assert json.loads(cli("calibrate", path, path, copy, "--spec", spec_file, *PLAN, "--json").out) == once
    shown = " ".join(cli("calibrate", path, path, copy, "--spec", spec_file, *PLAN).out.split())
    assert "1 log with " in shown
    assert f"{path} is given more than once, and counts once" in shown
    assert f"{copy} is the same as {path}, and is not counted again" in shown
    plans = ("--plan", "tp8-pp1-dp4-mbs1", "--plan", "tp4-pp1-dp8-mbs1", "--pin", "pp=1,micro_batch_size=1")
    refused = cli("calibrate", path, copy, "--spec", spec_file, *plans)
    assert refused.is_refused(f"{copy}: is the same as {path}, which is given as a log of tp8-pp1-dp4-mbs1")


def test_steps_that_a_coarse_clock_cannot_time_are_accounted_for(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    given = ("calibrate", log(tmp_path), "--spec", spec_file, *PLAN)
    (one,) = json.loads(cli(*given, "--json").out)["logs"]
    assert one["left_out"]["short"] > 0
    assert one["steps"] + sum(one["left_out"].values()) == 40
    assert "in stretches too short for a clock of whole seconds" in " ".join(cli(*given).out.split())


def test_a_log_that_ended_out_of_memory_says_what_would_fit(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "node-00.log"
    path.write_text(
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of"
        " 79.10 GiB of which 1.29 GiB is free. Including non-PyTorch memory, this process has 77.80 GiB memory in use."
        " Of the allocated memory 74.10 GiB is allocated by PyTorch, and 1.30 GiB is reserved by PyTorch but"
        " unallocated."
    )
    profile = tmp_path / "profile.yaml"
    shown = cli("calibrate", path, "--spec", spec_file, *PLAN, "-o", profile).out
    assert "out of memory on GPU 0 of rank 0, before the first step was told" in " ".join(shown.split())
    assert "the profile keeps that" in " ".join(shown.split())
    assert "needs_at_least_gib" in profile.read_text()


def test_the_runs_of_this_machine_are_logs_too(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert cli("calibrate", "--runs").is_refused("no run tells of enough steps")
    bundle = tmp_path / "bundle"
    bundle_at(bundle)
    name = json.loads((bundle / "plan.json").read_text())["run"]
    node = NodeRecord(node=0, name="h", address="h", run_dir="/w", script="n.sh")
    for run, named in (("a-1", name), ("b-2", "another")):
        made = RunRecord(
            run_id=run, name=named, bundle=str(bundle), created=record.now_text(), state="ended", nodes=(node,)
        )
        record.create(made)
        log(made.directory(), name="node-00.log")
    shown = " ".join(cli("calibrate", "--runs").out.split())
    assert "1 log with " in shown
    assert "run b-2 is left out: " in shown
    assert "is now the bundle of another run" in shown
