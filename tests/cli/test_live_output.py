import io
import json
import sys
import threading

import pytest

from topoplan.cli.interrupts import Interrupts
from topoplan.cli.live_output import MOST_CHARACTERS, EventOutput, LiveOutput
from topoplan.run.events import Event
from topoplan.run.progress import Progress


class Halted(io.StringIO):
    """A terminal that accepts no output until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        self.go.wait()
        return super().write(text)


def test_lines_and_messages_keep_their_order_and_their_streams(capsys: pytest.CaptureFixture[str]) -> None:
    output = LiveOutput()
    for number in range(1000):
        output.lines(f"line {number}")
    output.message("a message")
    output.message("JSON", stdout=True)
    assert output.close(limit_s=10)
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [*(f"line {number}" for number in range(1000)), "JSON"]
    assert captured.err == "a message\n"


def test_a_halted_terminal_holds_nobody_up_and_is_told_what_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, errors = Halted(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    output = LiveOutput()
    line = "x" * 9_999
    for _ in range(2 * MOST_CHARACTERS // len(line)):
        output.lines(line)
    assert not output.close(limit_s=0.05)
    terminal.go.set()
    assert output.close(limit_s=10)
    shown = len(terminal.getvalue().splitlines())
    missed = 2 * MOST_CHARACTERS // len(line) - shown
    assert missed > 300
    assert errors.getvalue() == f"({missed:,} lines not shown: the terminal is too slow)\n"


def test_a_reader_who_has_left_ends_the_showing_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Broken())
    output = LiveOutput()
    output.lines("nobody reads this")
    output.message("still there")
    assert output.close(limit_s=10)
    assert capsys.readouterr().err == "still there\n"


def test_where_the_run_is_stands_among_the_lines_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    output = LiveOutput(keep_status=True)
    status = Progress(total_steps=100).feed(0, "  7%|7 | 7/100 [00:07<01:33, 1.00s/it]", 7.0)
    assert status is not None
    output.show(status)
    output.lines("after")
    assert output.close(limit_s=10)
    assert "step 7/100" in capsys.readouterr().out


STATUS = Progress(total_steps=9).feed(0, "  7%|7 | 7/9 [00:07<01:33, 1.00s/it]", 7.0)
EVENTS = (
    Event(kind="note", text="mind"),
    Event(kind="output", node="node-00", text="hello\nthere"),
    Event(kind="progress", node="node-00", text="", status=STATUS),
)


def shown(output: EventOutput, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    for event in EVENTS:
        output.tell(event)
    output.end({"event": "end"}, ["that was it"], 0, Interrupts())
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_people_see_output_and_where_training_is_and_beside_it_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = shown(EventOutput(), capsys)
    assert sorted(out.splitlines()) == ["[node-00] hello", "[node-00] there", "step 7/9"]
    assert err == "topoplan: mind\nthat was it\n"


def test_programs_read_an_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = shown(EventOutput("topoplan.launch/1"), capsys)
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["note", "line", "line", "progress", "end"]
    assert err == ""
