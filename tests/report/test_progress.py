import io

import pytest

from topoplan.report import progress
from topoplan.report.progress import ProgressLine


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
