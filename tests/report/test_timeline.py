import json
import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.planner.sharded_cases import CASES, DENSE, HOST, ZERO3_AWAY
from tests.report.printed import printed
from tests.report.timelines import lanes_of, line_of
from topoplan.report.timeline import MARK, MARKS, print_timeline, timeline_to_dict, totals_line, trace, windows


def rendered(*, width: int = 100, **options: Any) -> list[str]:
    spec, plan, line = line_of(**options)
    return printed(print_timeline, spec, plan, line, width=width).splitlines()


def lanes(lines: list[str]) -> list[str]:
    return [line for line in lines if re.match(r" *\d+ \S", line) and line.endswith("%")]


@pytest.mark.parametrize("width", [80, 100, 140, 200])
@pytest.mark.parametrize(
    "form", [{}, {"pp": 4, "recompute": "full"}, {"pp": 4, "vpp": 3}, {"pp": 2, "job": {"global_batch_size": 2048}}]
)
def test_a_line_a_rank_fits_the_console(width: int, form: dict[str, Any]) -> None:
    lines = rendered(width=width, **form)
    assert max(map(len, lines)) <= width
    assert len(lanes(lines)) == form.get("pp", 1)
    assert len({len(lane) for lane in lanes(lines)}) == 1


def test_four_equal_ranks_take_turns_as_in_the_textbook() -> None:
    first, *_, last = (line.strip() for line in lanes(rendered(pp=4, width=140)))
    assert re.match(r"0 F+[.-]+B", first)
    assert re.match(r"3 [.-]+F+[.]?B", last)
    assert float(first.split()[-1].rstrip("%")) > float(last.split()[-1].rstrip("%"))


def test_what_is_sent_has_lines_below_the_ranks() -> None:
    lines = rendered(width=140)
    work, layers, states = lines[4:7]
    assert work.lstrip().startswith("0 FF")
    assert re.match(r"in layers (\.*t\.*){3,}$", layers)
    assert re.match(r"of states w*\.+g+\.*w*$", states)
    text = " ".join(" ".join(lines).split())
    assert "t collectives in layers" in text
    assert "Lower lines: what a GPU sends, hidden behind its work or not." in text
    assert "Lower lines: what rank " in " ".join(rendered(pp=4))


def test_the_legend_names_what_is_drawn_and_the_break() -> None:
    text = " ".join(rendered(pp=4, recompute="full", job={"global_batch_size": 1024}))
    assert "R recomputation" in text
    assert "x reference model" not in text
    assert "At ~" in text
    assert "as ranked" in text
    marks = [mark for mark, _, _ in MARKS.values()]
    assert len(set(marks)) == len(marks)
    assert not {mark.lower() for mark in "FBR"} & set(marks)  # a chunk beyond the first


def test_a_deviation_that_rounds_to_zero_has_no_minus() -> None:
    _, plan, line = line_of()
    barely = replace(line, closed_form_s=line.pipeline_s * (1 - 1e-6))
    assert totals_line(plan, barely).endswith("(+0.0%).")
    assert totals_line(plan, replace(line, closed_form_s=line.pipeline_s * 0.99)).endswith("(-1.0%).")


def test_the_summary_has_a_schema_and_its_figures_add_up() -> None:
    spec, plan, line = line_of(pp=4, vpp=3)
    view = timeline_to_dict(spec, plan, line)
    assert view["schema"] == "topoplan.timeline/1"
    summary = view["timeline"]
    pipeline = summary["pipeline"]
    assert pipeline["closed_form_s"] / pipeline["simulated_s"] - 1 == pytest.approx(pipeline["deviation"], abs=1e-4)
    for rank in summary["ranks"]:
        assert sum(rank["seconds"].values()) == pytest.approx(pipeline["simulated_s"], rel=1e-4)
    assert summary["predicted_s"] == view["plan"]["time"]["step_s"]


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_lanes_of_a_gpu_fit_the_console(model: str, form: dict[str, Any], other: dict[str, Any], width: int) -> None:
    spec, plan, line = lanes_of(model, form, other)
    text = printed(print_timeline, spec, plan, line, width=width)
    rows = text.splitlines()
    assert max(map(len, rows)) <= width
    drawn = [row for row in rows if row.endswith("%")]
    assert tuple(row.split()[0] for row in drawn) == line.lanes
    for word in ("bubble", "pipeline", "as ranked", "chunk"):
        assert word not in text


def test_the_summary_of_lanes_has_each_with_its_seconds() -> None:
    spec, plan, line = lanes_of(DENSE, ZERO3_AWAY, HOST)
    view = timeline_to_dict(spec, plan, line)["timeline"]
    assert [row["lane"] for row in view["lanes"]] == ["GPU", "network", "PCIe", "host"]
    for row in view["lanes"]:
        assert sum(row["seconds"].values()) == pytest.approx(view["total_s"], rel=1e-4)
        assert row["idle"] == pytest.approx(row["seconds"]["idle"] / view["total_s"], rel=1e-4)
    assert "pipeline" not in view


@pytest.mark.parametrize("units", [20, 60, 200, 1440])
@pytest.mark.parametrize("batch", [16, 64, 1024])
def test_what_is_drawn_fits_and_is_the_beginning_and_the_end(units: int, batch: int) -> None:
    _, _, line = line_of(pp=4, job={"global_batch_size": batch})
    shown, unit_s = windows(line, units, 1.0)
    assert sum(window.end_s - window.start_s for window in shown) <= units * unit_s * (1 + 1e-6)
    assert shown[0].start_s == 0.0
    assert shown[-1].end_s == pytest.approx(line.total_s)
    assert all(before.end_s < after.start_s for before, after in pairwise(shown))


def test_a_short_step_is_drawn_whole_and_a_long_one_broken_in_its_steady_state() -> None:
    _, _, short = line_of(pp=4, job={"global_batch_size": 16})
    assert len(windows(short, 1440, 16.0)[0]) == 1
    _, _, long = line_of(pp=4, job={"global_batch_size": 1024})
    shown, _ = windows(long, 1440, 16.0)
    assert len(shown) == 2
    assert shown[0].end_s >= long.fill_s
    assert shown[1].start_s <= long.drain_s


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
