"""Rows of measured runs: what is read, what is refused, and that the shipped rows are in order."""

import json
from typing import Any

import pytest

from topoplan.errors import SpecError
from topoplan.planner.measured import MeasuredRun, parse_runs, shipped_runs


def row(**changes: Any) -> dict[str, Any]:
    return {
        "id": "a",
        "family": "bench",
        "source": "a page",
        "document": {
            "cluster": {"gpu": "h100-sxm-80gb", "nodes": 1, "gpus_per_node": 8},
            "model": {"name": "Qwen/Qwen3-8B"},
            "job": {"seq_len": 4096, "global_batch_size": 64},
            "layout": {"backend": "megatron", "tp": 2},
        },
        "measured": {"allocated_gib": 50.5, "stage_allocated_gib": [50.5, None], "step_s": 3},
    } | changes


def parsed(*rows: Any) -> list[MeasuredRun]:
    lines = (line if isinstance(line, str) else json.dumps(line) for line in rows)
    return list(parse_runs("\n".join(lines), name="runs.jsonl"))


def test_a_row_is_read_with_its_figures_and_its_line() -> None:
    (run,) = parsed("", row(unstated=["recompute"], rank_group="g1"))
    assert (run.measured.allocated_gib, run.measured.step_s, run.measured.oom) == (50.5, 3.0, False)
    assert run.measured.stage_allocated_gib == (50.5, None)
    assert (run.unstated, run.rank_group, run.where) == (("recompute",), "g1", "runs.jsonl:2")


def test_a_row_without_a_source_is_of_its_file() -> None:
    (run,) = parsed({key: value for key, value in row().items() if key not in ("source", "family")})
    assert (run.family, run.source) == ("runs.jsonl", "runs.jsonl")


def test_a_row_that_is_left_out_needs_a_reason_alone() -> None:
    (run,) = parsed({"id": "x", "left_out": "LoRA"})
    assert run.left_out == "LoRA"
    assert not run.document


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "runs.jsonl:1: not JSON"),
        ("[1]", "not a measured run"),
        ({"document": {}}, "`id` is missing"),
        (row(id=7), "id: 7"),
        (
            {"id": "a", "cluster": {}, "model": {}, "job": {}, "layout": {}},
            "runs.jsonl:1: `cluster`, `model`, `job` and `layout` belong under `document`; and what was measured under"
            ' `measured`, as in `"measured": {"step_s": 1.5}`',
        ),
        (row(model={}), "`model` belongs under `document`"),
        (row(document=None), "no `document`"),
        (row(document={"cluster": {}}), "no `layout`"),
        (row(document={"layout": {}, "modell": {}}), "unknown key 'modell'; did you mean 'model'"),
        (row(measured=None), "nothing is measured"),
        (row(measured={}), "nothing is measured"),
        (row(measured={"alocated_gib": 3}), "did you mean 'allocated_gib'"),
        (row(measured={"step_s": "x"}), "measured.step_s: 'x' is not a number"),
        (row(measured={"step_s": 0}), "measured.step_s: 0 is out of range"),
        (row(measured={"step_s": True}), "measured.step_s: true is not a number"),
        (row(measured={"oom": 1}), "expected true or false"),
        (row(measured={"stage_allocated_gib": 3}), "stage_allocated_gib: 3 is not a list"),
        (row(unstated="recompute"), "unstated: 'recompute' is not a list"),
        (row(nots="x"), "did you mean 'notes'"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(line: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parsed(line)
    assert message in str(caught.value)


def test_two_rows_of_one_name_are_refused() -> None:
    with pytest.raises(SpecError, match=r"runs\.jsonl:2: id 'a' is also on line 1"):
        parsed(row(), row())


def test_the_shipped_rows_name_their_source_and_what_they_leave_open() -> None:
    runs = shipped_runs()
    assert sum(not run.left_out for run in runs) >= 130
    assert all(run.source and run.family for run in runs)
    groups = {run.rank_group for run in runs if run.rank_group}
    assert all(sum(run.rank_group == group for run in runs) > 1 for group in groups)
