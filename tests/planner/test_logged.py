"""Logs of runs are read as their trainers mean them; the excerpts are from published logs."""

import gzip
import json
from datetime import timedelta
from pathlib import Path

import pytest

from topoplan.errors import InputError, SpecError
from topoplan.planner.logged import log_text, read_log
from topoplan.trainers.log import VERL, quantity
from topoplan.units import GIB

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_logs.json").read_text(encoding="utf-8"))
"""Lines of published logs of other people's runs, reduced to the keys that are read, each with its source and
license."""
RECORDED = Path(__file__).parents[1] / "run" / "recorded"


def lines_of(name: str) -> str:
    return "\n".join(PUBLISHED[name]["lines"])


@pytest.mark.parametrize(
    ("name", "writer", "step_s", "steps", "left_out", "reserved_gib", "batch"),
    [
        # 58 s, 58 s for ten steps and 28 s for five, on a clock of whole seconds; the first line is not the start of an
        # interval.
        ("llamafactory-774", "llamafactory", (62 + 58 + 58 + 28) / 35, 35, {"first": 1}, None, None),
        # Means since the start, with six digits each; the last line includes the time of saving.
        ("swift-metax", "swift", 172.84 / 90, 89, {"first": 1, "evaluation or checkpoint": 4}, 6.5, None),
        ("megatron-ranks", "Megatron-LM", 125.25, 6, {"first": 1}, 24460 / 1024, 1024),
        # Each line is the mean of ten steps; those after line 100 include the evaluation.
        ("megatron-interval", "Megatron-LM", 1.376, 70, {"first": 1, "evaluation or checkpoint": 10}, 30806 / 1024, 4),
        ("megatron-deepspeed", "Megatron-LM", 128.44, 3, {"first": 1}, 28560 / 1024, None),
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


@pytest.mark.parametrize("name", ["swift-checkpoints", "swift-still-warming-up", "verl-1208"])
def test_published_logs_that_tell_too_little_say_so(name: str) -> None:
    with pytest.raises(InputError, match=r"steady steps after the first.*; expected 3 or more"):
        read_log(lines_of(name), name=name)


def test_the_gigabytes_of_verl_are_gibibytes() -> None:
    (line,) = PUBLISHED["verl-1208"]["lines"]
    assert quantity(VERL.reserved, line) == pytest.approx(61.611 * GIB)
    assert quantity(VERL.step_time, line) == pytest.approx(96.551)


def entry(step: int, clock_s: float, loss: str = "loss", **more: float) -> str:
    """Return a line of trainer_log.jsonl."""
    clock = str(timedelta(seconds=int(clock_s)))
    return json.dumps({"current_steps": step, "total_steps": 60, loss: 1.0, "elapsed_time": clock, **more})


def run_of(step_s: float, count: int = 60) -> list[str]:
    """Return a run with a first step 30 s longer, an evaluation after step 20 and a checkpoint after step 40."""
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
        (
            [entry(step, 30.0 + 3.0 * step + rank) for step in range(1, 41) for rank in range(8)],
            "log: tells 8 times of step 1, and so of others",
        ),
        ([*run_of(3.0), *run_of(3.1)], "log: tells 2 times of step 1, and so of others: lines of several"),
        (run_of(3.0, 2), "log: has 0 steady steps after the first"),
    ],
    ids=["empty", "cut off", "started again", "all ranks", "two runs", "two steps"],
)
def test_a_log_that_cannot_be_used_says_why(lines: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_log("\n".join(lines), name="log")
    assert str(caught.value).startswith(message)


def swift(step: int, clock_s: float, since: int = 0) -> str:
    """Return a line of ms-swift, with a mean since the start or since the checkpoint that the run was resumed from."""
    told = {"global_step/max_steps": f"{step}/120", "elapsed_time": f"{clock_s // 60:.0f}m {clock_s % 60:.0f}s"}
    return str({"loss": 1.5, **told, "train_speed(s/it)": round(clock_s / (step - since), 6)})


def bar(step: int) -> str:
    return f" {step}%|###| {step}/400 [{step // 15:02d}:{4 * step % 60:02d}<01:00,  4.00s/it]"


SWIFT = [swift(step, 10.0 + 3.0 * step) for step in range(1, 41)]
BARS = [bar(step) for step in range(200)]
MEGATRON = [
    f" iteration {step:8d}/     100 | elapsed time per iteration (ms): {2000 + step % 3} | global batch size:    64 |"
    for step in range(1, 31)
]


@pytest.mark.parametrize(
    ("text", "step_s", "steps"),
    [
        ("\r\n".join(SWIFT), 3.0, 39),
        ("\r".join(BARS), 4.0, 198),
        ("\n".join(f"12: {line}" for line in BARS), 4.0, 198),
        ("\n".join(f"[1,0]<stdout>:{line}" for line in BARS), 4.0, 198),
        ("\n".join(f"2026-11-23T12:00:00.5Z stdout F {line}" for line in BARS), 4.0, 198),
        ("\n".join(f"\x1b[36m(Runner pid=7)\x1b[0m {line}\n{line}" for line in MEGATRON), 2.001, 29),
        ("\n".join(SWIFT).replace("1.5", "nan"), 3.0, 39),
        ("\n".join(run_of(5.0)).replace(": ", ":").replace(", ", ","), 5.0, None),
        ("\n".join(SWIFT)[:-60], 3.0, 38),
        ("\n".join(["x" * 100_000, *SWIFT]), 3.0, 39),
        ("\n".join([*SWIFT, *(swift(step, 5.0 + 3.0 * (step - 40), 40) for step in range(41, 80))]), 3.0, 77),
        ("\n".join([*MEGATRON, " validation loss at iteration 30 | lm", MEGATRON[0].replace("1/", "31/")]), 2.001, 29),
    ],
    ids=[
        *(
            "CRLF",
            "one line of bars",
            "srun's label",
            "mpirun's label",
            "Kubernetes",
            "told twice",
            "no loss",
            "compact",
        ),
        *("cut off", "a huge line", "went on", "an evaluation"),
    ],
)
def test_what_becomes_of_logs_on_their_way_changes_no_number(text: str, step_s: float, steps: int | None) -> None:
    found = read_log(text, name="log")
    assert found.step_s == pytest.approx(step_s, rel=0.005)
    assert steps in (None, found.steps)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("\n".join(SWIFT).encode().replace(b"1.5", b"\xff\x00", 1), ""),
        (gzip.compress("\n".join(SWIFT).encode()), "swift.log: is packed; unpack it first: gunzip --keep swift.log"),
        (bytes(range(128, 256)) * 10, "swift.log: is not a text file in UTF-8; give a log of a trainer"),
    ],
    ids=["damaged", "packed", "no text"],
)
def test_bytes_of_a_log(content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("swift.log").write_bytes(content)
    if not said:
        assert read_log(log_text(Path("swift.log")), name="log").step_s == pytest.approx(3.0)
        return
    with pytest.raises(SpecError) as caught:
        log_text(Path("swift.log"))
    assert str(caught.value) == said
