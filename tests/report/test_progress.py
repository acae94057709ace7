import dataclasses
import io
import math
from typing import Any

import pytest

from topoplan.report import progress
from topoplan.report.progress import ProgressLine, StatusLine, duration, status_line
from topoplan.run.progress import Status


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


def test_a_short_search_shows_nothing(clock: list[float]) -> None:
    stream = Terminal()
    with ProgressLine(stream) as line:
        clock[0] += 0.9
        line(500, 1000)
    assert stream.getvalue() == ""


def test_a_long_search_shows_one_line_and_erases_it(clock: list[float]) -> None:
    stream = Terminal()
    with ProgressLine(stream) as line:
        clock[0] += 1.1
        line(500, 2000)
        line(501, 2000)
        clock[0] += 0.2
        line(1000, 2000)
    text = stream.getvalue()
    assert text.count("25% of the search") == 1
    assert text.count("50% of the search") == 1
    assert "\n" not in text
    assert text.endswith("\r\x1b[2K")


def test_a_pipe_sees_nothing(clock: list[float]) -> None:
    stream = io.StringIO()
    with ProgressLine(stream) as line:
        clock[0] += 10
        line(1, 2)
    assert stream.getvalue() == ""
    assert not line.visible


def test_the_line_is_erased_when_the_search_is_stopped(clock: list[float]) -> None:
    stream = Terminal()
    line = ProgressLine(stream)
    line.__enter__()
    clock[0] += 2
    line(1, 2)
    line.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert stream.getvalue().endswith("\r\x1b[2K")


@pytest.mark.parametrize(("partial", "words"), [(True, "Ctrl-C ends it with what it has"), (False, "Ctrl-C stops it")])
def test_the_line_says_what_an_interrupt_does(clock: list[float], partial: bool, words: str) -> None:
    stream = Terminal()
    with ProgressLine(stream, partial=partial) as line:
        clock[0] += 2
        line(1, 2)
    assert words in stream.getvalue()


STATUS = Status(
    step=120,
    total_steps=4686,
    loss=1.832,
    step_s=3.04,
    tokens_per_s=33680.0,
    tokens_per_s_per_gpu=4210.0,
    left_s=13880.0,
    predicted_step_s=3.1,
    predicted_band_s=(2.9, 3.4),
    ratio=0.98,
    in_band=True,
)
FULL = "step 120/4,686  loss 1.832  4,210 tokens/s per GPU  3.04 s per step (predicted 2.9 to 3.4)  3 h 51 min left"


def status(**changes: Any) -> Status:
    return dataclasses.replace(STATUS, **changes)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def drawn(text: str) -> list[str]:
    """Return the lines that a terminal shows after receiving `text`, without erased parts."""
    return [line.rpartition("\r\x1b[2K")[2] for line in text.split("\n")]


def test_all_that_is_known_is_on_the_line() -> None:
    assert status_line(STATUS) == FULL


def test_what_is_not_known_yet_is_left_out() -> None:
    first = status(total_steps=None, loss=None, step_s=None, tokens_per_s_per_gpu=None, left_s=None)
    assert status_line(first) == "step 120"


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (len(FULL), FULL),
        (len(FULL) - 1, "step 120/4,686  loss 1.832  4,210 tokens/s per GPU  3.04 s per step  3 h 51 min left"),
        (70, "step 120/4,686  loss 1.832  3.04 s per step  3 h 51 min left"),
        (50, "step 120/4,686  loss 1.832  3 h 51 min left"),
        (40, "step 120/4,686  3 h 51 min left"),
        (20, "step 120/4,686"),
        (6, "step 1"),
    ],
)
def test_a_narrow_terminal_shows_what_matters_most(width: int, line: str) -> None:
    assert status_line(STATUS, width=width) == line


def test_a_pace_outside_of_the_prediction_says_in_which_direction() -> None:
    assert "4.20 s per step (predicted 2.9 to 3.4: slower)" in status_line(status(step_s=4.2, in_band=False))
    assert "2.20 s per step (predicted 2.9 to 3.4: faster)" in status_line(status(step_s=2.2, in_band=False))


def test_a_loss_that_is_no_number_is_written_as_that() -> None:
    assert "loss nan" in status_line(status(loss=math.nan))


@pytest.mark.parametrize(
    ("time_s", "words"),
    [
        (0, "0 s"),
        (40, "40 s"),
        (90, "2 min"),
        (3569, "59 min"),
        (3600, "1 h"),
        (13880, "3 h 51 min"),
        (86400 * 2 + 3 * 3600, "2 d 3 h"),
        (86400 * 4, "4 d"),
    ],
)
def test_durations_are_written_in_two_units(time_s: float, words: str) -> None:
    assert duration(time_s) == words


def test_on_a_terminal_log_lines_go_above_the_line_and_leave_nothing_of_it() -> None:
    stream, clock = Terminal(), Clock()
    line = StatusLine(stream, clock=clock)
    line.note("connecting to 4 hosts")
    line.show(STATUS)
    line.write("[node 0] one\n[node 1] two\n")
    clock.now_s = 1.0
    line.show(status(step=121))
    line.close()
    shown = drawn(stream.getvalue())
    assert shown[:2] == ["[node 0] one", "[node 1] two"]
    assert shown[2].startswith("step 121/4,686  loss 1.832")
    assert shown[3:] == [""]


def test_the_line_never_fills_a_terminal_to_its_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    line = StatusLine(stream)
    monkeypatch.setattr(line, "_columns", lambda: 40)
    line.show(STATUS)
    assert stream.getvalue() == "step 120/4,686  3 h 51 min left"
    monkeypatch.setattr(line, "_columns", lambda: 1)
    line.write("")
    assert stream.getvalue().endswith("\r\x1b[2Ks")


def test_a_terminal_is_not_drawn_on_for_every_status() -> None:
    stream, clock = Terminal(), Clock()
    line = StatusLine(stream, clock=clock)
    for step in range(100):
        clock.now_s += 0.001
        line.show(status(step=step))
    assert len(drawn(stream.getvalue())) == 1
    assert stream.getvalue().count("loss") == 1


def test_elsewhere_it_is_a_line_every_half_minute_and_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    line = StatusLine(stream, clock=clock)
    for step in range(100):
        line.show(status(step=step))
        clock.now_s += 1.0
    line.close()
    lines = stream.getvalue().splitlines()
    assert [text.split()[1] for text in lines] == ["0/4,686", "30/4,686", "60/4,686", "90/4,686", "99/4,686"]
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_elsewhere_nothing_is_said_twice() -> None:
    stream, clock = io.StringIO(), Clock()
    line = StatusLine(stream, clock=clock)
    for _ in range(5):
        line.show(STATUS)
        clock.now_s += 60
    line.close()
    assert stream.getvalue() == FULL + "\n"


def test_elsewhere_a_note_is_written_at_once_and_once() -> None:
    stream = io.StringIO()
    line = StatusLine(stream, clock=Clock())
    line.note("starting 4 nodes")
    line.note("starting 4 nodes")
    line.note("stopping 4 nodes")
    assert stream.getvalue() == "starting 4 nodes\nstopping 4 nodes\n"


def test_a_terminal_that_cannot_erase_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    StatusLine(stream).show(STATUS)
    assert stream.getvalue() == FULL + "\n"
