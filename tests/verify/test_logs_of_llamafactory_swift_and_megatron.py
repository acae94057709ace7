"""Read logs that the trainers' own code writes: each is given the steps of one made-up run, on a simulated clock.

Only the trainers' queries of torch's memory are simulated; all lines are their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from topoplan.planner.logged import Logged, read_log
from topoplan.run.progress import Progress
from topoplan.trainers.registry import trainer_named
from topoplan.units import GIB

pytestmark = pytest.mark.verify

STEPS, STEP_S, EVALUATED, SAVED = 60, 3.3, 20, 40
ALLOCATED_GIB, RESERVED_GIB = 40.0, 44.0


class Clock:
    """Replaces the module `time`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def time(self) -> float:
        return self.now_s


def steps(clock: Clock) -> Iterator[int]:
    """Yield each step number when it is done: the first takes 30 s more, a checkpoint 50 s, an evaluation 100 s."""
    clock.now_s += 30.0
    for step in range(1, STEPS + 1):
        clock.now_s += STEP_S + 50.0 * (step == SAVED + 1)
        yield step
        clock.now_s += 100.0 * (step == EVALUATED)


def assert_read(text: str, trainer: str, writer: str | None = None) -> Logged:
    found = read_log(text, name="log", trainer=trainer)
    assert found.writer == (writer or trainer)
    assert found.step_s == pytest.approx(STEP_S, rel=0.02)
    assert (found.first, found.last, found.total) == (1, STEPS, STEPS)
    assert found.steps >= STEPS - 12
    assert found.left_out["first"] >= 1
    assert found.reserved_bytes == pytest.approx(RESERVED_GIB * GIB, rel=1e-3)
    return found


def loss_of(state: Any, step: int) -> dict[str, float]:
    """Return what transformers' Trainer passes to its callbacks after a step."""
    state.global_step = step
    values = {"loss": 2.0 - step / 100, "grad_norm": 1.5, "learning_rate": 2e-05, "epoch": step / 30}
    state.log_history.append(values | {"step": step})
    return values


def evaluation_of(state: Any) -> dict[str, float]:
    values = {"eval_loss": 2.5, "eval_runtime": 99.0, "eval_steps_per_second": 1.0, "epoch": 0.7}
    state.log_history.append(values | {"step": state.global_step})
    return values


def test_trainer_log_of_llama_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks = pytest.importorskip("llamafactory.train.callbacks", reason="llamafactory is not installed")
    from transformers import TrainerControl, TrainerState

    clock = Clock()
    monkeypatch.setattr(callbacks, "time", clock)
    monkeypatch.setattr(callbacks, "get_peak_memory", lambda: (ALLOCATED_GIB * GIB, RESERVED_GIB * GIB))
    monkeypatch.setenv("RECORD_VRAM", "1")
    args = SimpleNamespace(should_save=True, output_dir=str(tmp_path), overwrite_output_dir=False)
    state, control, log = TrainerState(max_steps=STEPS), TrainerControl(), callbacks.LogCallback()
    log.on_train_begin(args, state, control)
    for step in steps(clock):
        log.on_log(args, state, control, logs=loss_of(state, step))
        if step == EVALUATED:
            clock.now_s += 100.0
            log.on_log(args, state, control, logs=evaluation_of(state))
            clock.now_s -= 100.0
    log.on_train_end(args, state, control)
    found = assert_read((tmp_path / trainer_named("llamafactory").log.file).read_text(), "llamafactory")
    assert found.allocated_bytes == pytest.approx(ALLOCATED_GIB * GIB, rel=1e-3)
    assert found.left_out["evaluation or checkpoint"] >= 1


def test_logging_jsonl_and_the_output_of_swift_sft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patcher = pytest.importorskip("swift.trainers.patcher", reason="ms-swift is not installed")
    from transformers import TrainerControl, TrainerState

    clock = Clock()
    monkeypatch.setattr(patcher, "time", clock)
    monkeypatch.setattr(patcher, "get_max_reserved_memory", lambda: RESERVED_GIB)
    args = SimpleNamespace(output_dir=str(tmp_path))
    state, control, log = TrainerState(max_steps=STEPS), TrainerControl(), patcher.PrinterCallbackNew()
    log.on_train_begin(args, state, control)
    for step in steps(clock):
        log.on_log(args, state, control, logs=loss_of(state, step))
        if step == EVALUATED:
            clock.now_s += 100.0
            log.on_log(args, state, control, logs=evaluation_of(state))
            clock.now_s -= 100.0
    assert_read((tmp_path / "logging.jsonl").read_text(), "swift")
    printed = capsys.readouterr().out
    assert_read(printed, "swift")
    assert_followed(printed, "swift")


def test_logging_jsonl_of_megatron_sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swift", reason="ms-swift is not installed")
    from tests.verify import bridge_stand_in

    bridge_stand_in.install()
    printing = pytest.importorskip("swift.megatron.callbacks.print")
    clock = Clock()
    monkeypatch.setattr(printing, "time", clock)
    monkeypatch.setattr(printing, "reduce_max_stat_across_model_parallel_group", lambda gib: RESERVED_GIB)
    state = SimpleNamespace(iteration=0)
    log = printing.PrintCallback(
        SimpleNamespace(args=SimpleNamespace(output_dir=str(tmp_path), train_iters=STEPS), state=state)
    )
    log.on_train_begin()
    log.jsonl_writer.enable_async = (
        False  # its thread ends with the process, and lines that it has not written are lost
    )
    for step in steps(clock):
        state.iteration = step
        log.on_step_end()
        log.on_log({"loss": 2.0 - step / 100, "grad_norm": 1.5, "learning_rate": 2e-05})
    log.on_train_end()
    assert_read((tmp_path / "logging.jsonl").read_text(), "swift")


class Asked(SimpleNamespace):
    """Megatron's arguments; those that are not given are off."""

    def __getattr__(self, name: str) -> None:
        return None


def test_iteration_lines_of_megatron_lm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    training = pytest.importorskip("megatron.training.training", reason="megatron.training is not installed")
    import torch

    clock, taken = Clock(), {"s": 0.0}
    args = Asked(
        micro_batch_size=1,
        data_parallel_size=64,
        world_size=64,
        seq_length=4096,
        timing_log_level=0,
        log_interval=1,
        train_iters=STEPS,
        consumed_train_samples=0,
        skipped_train_samples=0,
        tensorboard_log_interval=1,
    )

    class Timers:
        """Reports how long the last iteration took."""

        def __call__(self, *_: object, **__: object) -> Timers:
            return self

        def elapsed(self, **_: object) -> float:
            return taken["s"]

        def log(self, *_: object, **__: object) -> None: ...

    for name, value in {
        "get_args": lambda: args,
        "get_timers": Timers,
        "get_num_microbatches": lambda: 2,
        "num_floating_point_operations": lambda *_, **__: 1e15,
        "print_rank_last": print,
        "reduce_max_stat_across_model_parallel_group": lambda value: value,
        "logical_and_across_model_parallel_group": lambda value: value,
        "report_theoretical_memory": lambda *_, **__: None,
        **dict.fromkeys(
            ("get_tensorboard_writer", "get_wandb_writer", "get_one_logger", "get_energy_monitor"), lambda: None
        ),
    }.items():
        monkeypatch.setattr(training, name, value)
    nothing = SimpleNamespace(track_app_tag=lambda *_: None, track_e2e_metrics=lambda *_: None)
    monkeypatch.setattr(training, "one_logger_utils", nothing)
    monkeypatch.setitem(training.report_memory.__globals__, "get_args", lambda: args)
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *values, device=None, **named: tensor(*values, **named))
    monkeypatch.setattr(training.mpu, "get_data_parallel_rank", lambda *_, **__: 0)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    for peak, gib in {"allocated": ALLOCATED_GIB, "reserved": RESERVED_GIB}.items():
        for name in (f"memory_{peak}", f"max_memory_{peak}"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, gib=gib: gib * GIB)
    before, totals, first = clock.now_s, {}, True
    for step in steps(clock):
        taken["s"], before = clock.now_s - before, clock.now_s
        args.consumed_train_samples += 128
        losses = {"lm loss": torch.tensor(2.0 - step / 100)}
        first = training.training_log(losses, totals, 2e-05, step, 1.0, first, 0, 1.5, None, None, None)
    found = assert_read(printed := capsys.readouterr().out, "", "Megatron-LM")
    assert (found.batch, found.allocated_bytes) == (128, pytest.approx(ALLOCATED_GIB * GIB, rel=1e-3))
    assert "max reserved" in printed


def assert_followed(text: str, trainer: str) -> None:
    """Check that the printed lines tell the progress of the run while it is watched."""
    progress = Progress(logs=(trainer_named(trainer).log,))
    for line in text.splitlines():
        progress.feed(0, line, 0.0)
    status = progress.status()
    assert (status.step, status.total_steps, status.loss) == (STEPS, STEPS, 2.0 - STEPS / 100)
