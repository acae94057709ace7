"""Step times and memory that leave the prediction: what is reported, and that nothing is reported for a healthy run."""

import random
from collections.abc import Callable, Iterable

import pytest

from topoplan.run.drift import DriftDetector
from topoplan.run.events import Event
from topoplan.run.progress import Progress
from topoplan.run.record import Drifted
from topoplan.run.strain import conspicuous, parse_load
from topoplan.trainers.registry import trainer_named
from topoplan.units import GIB

BAND_S = (3.6, 4.4)


class Run:
    """Steps on a manual clock, with the lines of a trainer."""

    def __init__(self, trainer: str = "llamafactory", *, band_s: tuple[float, float] | None = BAND_S) -> None:
        self.now_s, self.step = 1000.0, 0
        self.events: list[Event] = []
        self.noted: list[Drifted] = []
        logs = (trainer_named(trainer).log,)
        self.progress = Progress(step_s=4.0, band_s=band_s, total_steps=9999, logs=logs)
        self.drift = DriftDetector(
            self.progress,
            band_s=band_s,
            memory=lambda: (60.0 * GIB, 0.05),
            logs=logs,
            tell=self.events.append,
            note=self.noted.append,
            clock=lambda: self.now_s,
        )

    def says(self, text: str) -> None:
        self.progress.feed(0, f"{text}\n", self.now_s)
        self.drift.read(f"{text}\n")

    def look(self) -> None:
        self.drift.look({})
        if self.drift._pending:
            self.drift._pending.done.wait(5.0)

    def steps(self, each_s: Iterable[float], line: Callable[[int], str] = lambda step: "") -> list[str]:
        """Run steps; return what is reported meanwhile."""
        before = len(self.events)
        for seconds in each_s:
            self.now_s += seconds
            self.step += 1
            at = round(self.now_s - 1000.0)
            clock = f"{at // 3600}:{at // 60 % 60:02d}:{at % 60:02d}"
            self.says(f"[default0]:  1%|1 | {self.step}/9999 [{clock}<9:00:00, 4.0s/it]{line(self.step)}")
            self.look()
        return [event.text for event in self.events[before:]]


def noisy(count: int, mean_s: float, scatter: float, seed: int = 1) -> list[float]:
    draw = random.Random(seed)
    return [mean_s * draw.lognormvariate(0.0, scatter) for _ in range(count)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scatter", [0.02, 0.15, 0.5])
def test_nothing_is_told_of_a_healthy_run(seed: int, scatter: float) -> None:
    """However much its steps scatter, with long first steps and checkpoints."""
    run = Run()
    times = noisy(2000, 4.0, scatter, seed)
    times[:4] = [90.0, 30.0, 20.0, 15.0]
    for step in range(500, 2000, 500):
        assert run.steps(times[step - 500 : step]) == []
        run.says("[default0]:Saving model checkpoint to out/checkpoint")
        assert run.steps([60.0]) == []


def test_steps_that_become_longer_are_told_once_and_so_is_their_end() -> None:
    run = Run()
    assert run.steps(noisy(60, 4.0, 0.02)) == []
    [told] = run.steps(noisy(200, 6.0, 0.02))
    first, *rest = told.split("\n")
    assert first == "steps take 6 s since step 61; 3.6 to 4.4 s were predicted; before, they took 4 s"
    assert rest[-1].strip() == "`topoplan preflight` compares the links of the nodes"
    assert max(map(len, told.split("\n"))) <= 80
    [back] = run.steps(noisy(100, 4.0, 0.02))
    assert back.startswith("steps take 4 s again, since step 26")
    assert run.steps(noisy(300, 4.0, 0.02)) == []
    assert [one.state for one in run.noted] == ["out", "back"]
    assert [event.kind for event in run.events] == ["drift", "drift"]


def test_one_long_step_is_no_drift() -> None:
    run = Run()
    assert run.steps([*noisy(60, 4.0, 0.02), 400.0, *noisy(60, 4.0, 0.02)]) == []


def test_a_run_that_is_slow_from_its_first_steps_is_told_of_the_prediction_alone() -> None:
    [told] = Run().steps(noisy(60, 6.0, 0.02))
    assert told.split("\n")[0].endswith("3.6 to 4.4 s were predicted")


def test_without_a_prediction_steps_are_held_against_their_own() -> None:
    run = Run(band_s=None)
    assert run.steps(noisy(100, 4.0, 0.1)) == []
    [told] = run.steps(noisy(60, 8.0, 0.1))
    assert told.startswith("steps take ")
    assert "predicted" not in told


def test_waiting_for_samples_is_the_cause_where_the_log_has_it() -> None:
    run = Run("trinity")

    def step(seconds: float, read_s: float) -> None:
        run.now_s += seconds
        run.step += 1
        run.says(
            f"INFO Step {run.step}: {{'time/read_experience': {read_s}, 'time/train_step': {seconds},"
            f" 'actor/sft_loss': 1.5, 'perf/max_memory_reserved_gb': 41.0}}"
        )
        run.look()

    for _ in range(40):
        step(4.0, 0.1)
    assert run.events == []
    for _ in range(40):
        step(7.0, 3.0)
    [told] = run.events
    assert told.text.split("\n")[1].strip() == "data loading: each step waits 3 s for samples, up from 0.1 s"


def memory(gib: Callable[[int], float]) -> Callable[[int], str]:
    """Return memory lines as LLaMA-Factory prints them with RECORD_VRAM."""
    return lambda step: f" {{'loss': 1.0, 'vram_reserved': {gib(step):.2f}}}"


@pytest.mark.parametrize(
    ("gib", "says"),
    [
        (lambda step: 60.0, None),
        (lambda step: 62.9 if step > 30 else 60.0, None),
        (lambda step: 66.0, "it is not growing: 66.0 GiB were already reserved at step 3"),
        (lambda step: min(75.0, 60.0 + 0.2 * step), "memory grows: 61.6 GiB at step 8, and it has risen "),
    ],
    ids=["as predicted", "in the band", "high from the first step", "growing"],
)
def test_memory_beyond_its_band_is_told_once(gib: Callable[[int], float], says: str | None) -> None:
    told = Run().steps(noisy(80, 4.0, 0.02), memory(gib))
    if says is None:
        assert told == []
    else:
        [text] = told
        first, reason = text.split("\n")
        assert first.startswith("torch has reserved ")
        assert first.endswith("at most 63.0 GiB were predicted")
        assert reason.strip().startswith(says)


def host(*clocks: str, **more: str) -> dict[str, str]:
    looks = {f"gpu.{index}.{look}": words for index, words in enumerate(clocks) for look in (1, 2, 3)}
    return {"cpus": "64", "load": "8.0 8.0 8.0 3/900 1", **looks, **more}


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ([host("1980, 0x0, 60", "1965, 0x4, 61"), host("1980, 0x4, 60")], []),
        (
            [host("1980, 0x0, 60", "1980, 0x0, 60"), host("1200, 0x40, 91", "1980, 0x0, 60")],
            [
                "node-01: GPU 0 runs at 1,200 MHz (thermal slowdown by the hardware, 91 °C), the others at 1,980 MHz,"
                " and all wait for the slowest"
            ],
        ),
        ([host("1980, 0x0, 60"), host("345, 0x1, 30")], []),
        ([host(), host(load="200.0 1 1 1/1 1")], ["node-01: 200 runnable processes compete for its 64 CPUs"]),
        ([host(load="200.0 1 1 1/1 1"), host(load="200.0 1 1 1/1 1")], []),
        (
            [host(io="some avg10=1 avg60=55.30 avg300=1 total=1"), host()],
            ["node-00: processes waited for a disk or a file system during 55% of the last minute"],
        ),
        ([host("[N/A], [N/A], [N/A]"), {}], []),
    ],
)
def test_what_stands_out_of_the_hosts_is_said(hosts: list[dict[str, str]], said: list[str]) -> None:
    strains = {f"node-{place:02d}": parse_load(one) for place, one in enumerate(hosts)}
    assert list(conspicuous(strains)) == said
