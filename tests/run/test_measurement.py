"""A finished run leaves what it measured, beside what was predicted for it."""

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.planner.test_logged import PUBLISHED
from tests.samples import make_spec
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.remote.connection import Completed
from topoplan.run import record as records
from topoplan.run.measurement import ends_of, fetch, measured_words, measurement
from topoplan.run.record import NodeRecord, RunRecord
from topoplan.units import GIB

SPEC = make_spec()
STEP_S = 4.0


@pytest.fixture
def plan() -> Plan:
    """A plan with 4 s per step, give or take a tenth."""
    found = replace(predict(SPEC, {"backend": "mca", "tp": 8, "micro_batch_size": 1}), trainer="llamafactory")
    return replace(found, time=replace(found.time, step_s=STEP_S, band_s=(0.9 * STEP_S, 1.1 * STEP_S)))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRecord:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "train.yaml").write_text("output_dir: saves/x\n")
    node = NodeRecord(node=0, name="h0", address="h0", run_dir="/runs/a", script="node-00.sh")
    made = RunRecord(run_id="a-1", name="x", bundle=str(tmp_path / "bundle"), created=records.now_text(), nodes=(node,))
    records.create(made)
    return made


def bars(step_s: float) -> str:
    clocks = (divmod(int(30 + step_s * step), 60) for step in range(1, 41))
    bar = "[default0]: {step}%|#| {step}/40 [{clock[0]:02d}:{clock[1]:02d}<00:00, 4.0s/it]"
    return "\r".join(bar.format(step=step, clock=clock) for step, clock in enumerate(clocks, 1))


def trainer_log(step_s: float, held_gib: float) -> bytes:
    clocks = (str(timedelta(seconds=int(30 + step_s * step))) for step in range(1, 41))
    keys = {"total_steps": 40, "vram_allocated": 40.0, "vram_reserved": held_gib}
    lines = ({"current_steps": step, **keys, "elapsed_time": clock} for step, clock in enumerate(clocks, 1))
    ordered = (
        {"current_steps": one.pop("current_steps"), "total_steps": one.pop("total_steps"), **one} for one in lines
    )
    return "\n".join(map(json.dumps, ordered)).encode()


class Host:
    """Answers with the end of a file."""

    def __init__(self, content: bytes) -> None:
        self.content, self.asked = content, ()

    def run(self, command: Any, **_: Any) -> Completed:
        self.asked = tuple(command)
        return Completed(code=0 if self.content else 1, stdout=self.content, stderr=b"")


def test_the_copies_of_the_logs_are_enough_for_the_step(run: RunRecord, plan: Plan) -> None:
    assert measurement(run, SPEC, plan) is None
    run.log(run.nodes[0]).write_text(bars(5.0))
    found = measurement(run, SPEC, plan)
    assert found.step_s == pytest.approx(5.0)
    assert (found.plan, found.time_held, found.memory_held) == ("tp8-pp1-dp4-mbs1", False, None)
    words = measured_words(found)
    assert "25% more than predicted, outside of the band of 3.6 to 4.4 s" in words


def test_what_the_trainer_wrote_is_fetched_and_has_the_memory(run: RunRecord, plan: Plan) -> None:
    run.log(run.nodes[0]).write_text(bars(4.1))
    host = Host(trainer_log(4.1, plan.memory.reserved_bytes / GIB))
    fetch(run, SPEC, plan, host, 5.0)  # type: ignore[arg-type]
    assert host.asked[-1] == "/runs/a/saves/x/trainer_log.jsonl"
    found = measurement(run, SPEC, plan)
    assert (found.time_held, found.memory_held) == (True, True)
    assert "as predicted, within the band" in measured_words(found)
    again = records.update(run.run_id, measurement=found)
    assert records.load(run.run_id) == again


def test_without_the_file_the_copies_are_taken(run: RunRecord, plan: Plan) -> None:
    run.log(run.nodes[0]).write_text(bars(4.1))
    fetch(run, SPEC, plan, Host(b""), 5.0)  # type: ignore[arg-type]
    fetch(run, SPEC, plan, None, 5.0)
    found = measurement(run, SPEC, plan)
    assert found.memory_held is None


NOISE = ("x" * 99 + "\n") * 300
EXHAUSTED = [
    '[rank0]:   File "/x/train.py", line 3, in forward',
    "torch.OutOfMemoryError: CUDA out of memory. Tried to",
]


@pytest.mark.parametrize(
    "lines", [*(one["lines"] for one in PUBLISHED.values()), EXHAUSTED], ids=[*PUBLISHED, "memory"]
)
def test_of_a_log_all_that_tells_something_is_held_in_its_place_and_little_else(
    lines: list[str], tmp_path: Path
) -> None:
    whole = "".join(f"{NOISE}{line}\n" for line in lines)
    (tmp_path / "log").write_text(whole)
    [text] = ends_of([tmp_path / "log"])
    found = [(number, line) for number, line in enumerate(text.split("\n")) if line.strip("x")]
    assert found == [(number, line) for number, line in enumerate(whole.split("\n")) if line.strip("x")]
    assert len(text) < len(whole) / 2
