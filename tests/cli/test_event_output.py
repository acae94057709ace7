import json

import pytest

from topoplan.cli.event_output import EventOutput
from topoplan.cli.interrupts import Interrupts
from topoplan.run.events import Event
from topoplan.run.progress import Progress

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
