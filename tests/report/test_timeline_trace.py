import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from tests.planner.sharded_cases import DENSE, HOST, ZERO3_AWAY
from tests.report.timelines import lanes_of, line_of
from topoplan.report.timeline_trace import MARK, trace


def document(**options: Any) -> tuple[str, dict[str, Any]]:
    _, plan, line = line_of(**options)
    text = trace('a "title"', plan, line)
    view: dict[str, Any] = json.loads(text)
    return text, view


@pytest.mark.parametrize("form", [{}, {"pp": 4, "recompute": "full"}, {"pp": 4, "vpp": 3}])
def test_events_are_complete_in_order_and_never_overlap(form: dict[str, Any]) -> None:
    text, view = document(**form)
    assert text.startswith(MARK)
    threads = defaultdict(list)
    for event in view["traceEvents"]:
        assert event["ph"] in ("M", "X")
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append(event)
    assert len(threads) == form.get("pp", 1) + 2
    for events in threads.values():
        for before, after in pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6


def test_every_rank_has_a_name_and_its_place() -> None:
    _, view = document(pp=4)
    names = {event["tid"]: event["args"] for event in view["traceEvents"] if event["name"] == "thread_name"}
    ranks = {rank: {"name": f"pipeline rank {rank}"} for rank in range(4)}
    assert names == ranks | {4: {"name": "in layers, rank 3"}, 5: {"name": "of states, rank 3"}}
    assert sum(event["name"] == "thread_sort_index" for event in view["traceEvents"]) == 6


def test_times_are_microseconds_of_the_step() -> None:
    _, plan, line = line_of(pp=4)
    view = json.loads(trace("t", plan, line))
    end = max(event["ts"] + event["dur"] for event in view["traceEvents"] if event["ph"] == "X")
    assert end == pytest.approx(1e6 * line.total_s, abs=0.01)


def test_lanes_of_a_gpu_are_threads() -> None:
    _, plan, line = lanes_of(DENSE, ZERO3_AWAY, HOST)
    events = json.loads(trace("a title", plan, line))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["GPU", "network", "PCIe", "host"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == len(line.events)
    assert all(set(event["args"]) == {"micro batch"} for event in drawn)
