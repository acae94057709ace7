"""Logs of runs are read as their trainers mean them; the excerpts are of logs that people have published."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from topoplan.errors import InputError
from topoplan.planner.logged import read_log
from topoplan.trainers.log import quantity
from topoplan.trainers.other_logs import VERL
from topoplan.units import GIB

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_logs.json").read_text(encoding="utf-8"))
"""Lines of logs of other people's runs, cut to the keys that are read, each with its source and licence."""
RECORDED = Path(__file__).parents[1] / "run" / "recorded"


def lines_of(name: str) -> str:
    return "\n".join(PUBLISHED[name]["lines"])


@pytest.mark.parametrize(
    ("name", "writer", "step_s", "steps", "left_out", "reserved_gib", "batch"),
    [
        # 58 s, 58 s for ten steps and 28 s for five, by a clock of whole seconds; the first line begins nothing.
        ("llamafactory-774", "llamafactory", (62 + 58 + 58 + 28) / 35, 35, {"first": 1}, None, None),
        # Means since the start, each in six digits; the last line has the time of saving in it.
        ("swift-metax", "swift", 172.84 / 90, 89, {"first": 1, "evaluation or checkpoint": 4}, 6.5, None),
        ("megatron-llm-11", "Megatron-LM", 89.03, 4, {"first": 1}, None, 1024),
    ],
)
def test_published_logs_are_read_as_their_trainers_mean_them(
    name: str,
    writer: str,
    step_s: float,
    steps: int,
    left_out: dict[str, int],
    reserved_gib: float | None,
    batch: int | None,
) -> None:
    found = read_log(lines_of(name), name=name)
    assert (found.writer, found.steps, found.left_out, found.batch) == (writer, steps, left_out, batch)
    assert found.step_s == pytest.approx(step_s, rel=0.01)
    assert found.reserved_bytes == (reserved_gib and pytest.approx(reserved_gib * GIB))


@pytest.mark.parametrize("name", ["swift-checkpoints", "swift-still-warming-up", "swift-4146", "verl-1208"])
def test_published_logs_that_tell_too_little_say_so(name: str) -> None:
    with pytest.raises(InputError, match=r"steady steps after the first.*; expected 3 or more"):
        read_log(lines_of(name), name=name)


def test_the_gigabytes_of_verl_are_gibibytes() -> None:
    (line,) = PUBLISHED["verl-1208"]["lines"]
    assert quantity(VERL.reserved, line) == pytest.approx(61.611 * GIB)
    assert quantity(VERL.step_time, line) == pytest.approx(96.551)


def entry(step: int, clock_s: float, loss: str = "loss", **more: float) -> str:
    """A line of trainer_log.jsonl."""
    clock = str(timedelta(seconds=int(clock_s)))
    return json.dumps({"current_steps": step, "total_steps": 60, loss: 1.0, "elapsed_time": clock, **more})


def run_of(step_s: float, count: int = 60) -> list[str]:
    """One that takes 30 s longer for its first step, evaluates after step 20, and writes a checkpoint after step 40."""
    lines, clock_s = [], 30.0
    for step in range(1, count + 1):
        clock_s += step_s
        lines.append(entry(step, clock_s, vram_allocated=40.0, vram_reserved=44.0))
        if step == 20:
            clock_s += 100.0
            lines.append(entry(step, clock_s, "eval_loss"))
        clock_s += 50.0 * (step == 40)
    return lines


@pytest.mark.parametrize("step_s", [0.7, 3.3, 25.0])
def test_what_is_no_training_is_left_out_of_the_mean(step_s: float) -> None:
    found = read_log("\n".join(run_of(step_s)), name="trainer_log.jsonl")
    assert found.step_s == pytest.approx(step_s, rel=0.02)
    assert found.left_out["first"] == 1
    assert found.left_out["slow"] <= max(1, 10 / step_s) + 1
    assert (found.allocated_bytes, found.reserved_bytes) == (40.0 * GIB, 44.0 * GIB)
    assert (found.first, found.last, found.total) == (1, 60, 60)


def test_a_run_that_went_on_from_a_checkpoint_has_its_clock_at_zero_again() -> None:
    again = [entry(step, 20.0 + 5.0 * (step - 60)) for step in range(61, 91)]
    found = read_log("\n".join([*run_of(5.0), *again]), name="log")
    assert found.step_s == pytest.approx(5.0, rel=0.02)
    assert found.last == 90


def test_a_bar_alone_is_enough_and_that_of_an_evaluation_is_another() -> None:
    bar = "[default0]:{percent}%|###| {step}/{total} [{minutes:02d}:{seconds:02d}<01:00,  4.00s/it]"
    drawn = [
        bar.format(percent=step, step=step, total=80, minutes=step // 15, seconds=4 * step % 60) for step in range(30)
    ]
    evaluated = [bar.format(percent=step, step=step, total=7, minutes=0, seconds=step) for step in range(8)]
    found = read_log("\r".join([*drawn[:15], *evaluated, *drawn[15:]]), name="node-00.log")
    assert (found.writer, found.last, found.total) == ("", 29, 80)
    assert found.step_s == pytest.approx(4.0, rel=0.02)


def test_recorded_output_of_trinity_is_a_log() -> None:
    found = read_log((RECORDED / "progress-trinity.txt").read_text(encoding="utf-8"), name="trinity")
    assert (found.writer, found.steps, found.step_s) == ("trinity", 11, pytest.approx(0.5))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "log: tells of no step with its time; expected a log of LLaMA-Factory, ms-swift,"),
        (["loss 3.1", '{"current_steps": 4, "total_'], "log: tells of no step with its time"),
        ([*run_of(3.0), *run_of(3.0)[:10]], "log:62: goes back from step 60 to step 1: two runs, or one that"),
        ([line for line in run_of(3.0) for _ in range(8)], "log: tells 8 times of step 1, and so of others"),
        ([*run_of(3.0), *run_of(3.1)], "log: tells 2 times of step 1, and so of others: lines of several"),
        (run_of(3.0, 2), "log: has 0 steady steps after the first"),
    ],
    ids=["empty", "cut off", "started again", "all ranks", "two runs", "two steps"],
)
def test_a_log_that_cannot_be_used_says_why(lines: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_log("\n".join(lines), name="log")
    assert str(caught.value).startswith(message)
