import json
from dataclasses import replace

import pytest

from tests.report.printed import printed
from tests.samples import make_plan, make_spec
from topoplan.planner.effort import Pauses, effort_of
from topoplan.planner.what_if import Found, SizeRow, Sizing
from topoplan.report.size import print_sizing, sizing_to_dict
from topoplan.report.text import effort_to_dict

SPEC = make_spec()
HOUR = 3600.0


def row(nodes: int, step_s: float | None, *, is_legal: bool = True) -> SizeRow:
    plan = None if step_s is None else make_plan(tp=2, step_s=step_s)
    reason = "" if plan else f"reason of {nodes}"
    effort = effort_of(SPEC, plan, 1000) if plan else None
    without_pauses = effort and replace(effort, pauses=Pauses(0.0))
    found = Found(spec=SPEC, best=plan, reason=reason, is_legal=is_legal)
    return SizeRow(nodes=nodes, found=found, effort=without_pauses)


ROWS = (row(1, None), row(2, None), row(3, None, is_legal=False), row(4, None), row(5, 7.2), row(6, 3.6))


def sizing(limit_h: float = 1.5, *, rows: tuple[SizeRow, ...] = ROWS, is_sure: bool = False) -> Sizing:
    return Sizing(steps=1000, limit_s=limit_h * HOUR, is_sure=is_sure, rows=rows)


def rendered(of: Sizing, *, price: float | None = None, width: int = 100) -> str:
    text = printed(print_sizing, SPEC, of, price=price, width=width)
    return " ".join(text.split()) if width == 100 else text


def test_the_answer_comes_first_with_its_band_and_its_cost() -> None:
    text = rendered(sizing(), price=2.5)
    assert (
        "6 nodes (32 GPUs) are enough: 1.00 h predicted, within 0.88-1.12 h, 32.0 GPU-h, 80.00 at 2.5 per GPU-h" in text
    )
    assert "With fewer, nothing fits, or the prediction exceeds 1.5 h." in text
    assert "Searched: every number of nodes from 1 to 6; the job fits from 5 nodes on." in text


def test_an_upper_end_above_the_limit_is_said() -> None:
    assert "--sure finds the nodes" in rendered(sizing(1.1))
    assert "--sure finds the nodes" not in rendered(sizing())
    assert "nothing fits, or the upper end of the band exceeds 1.5 h." in rendered(sizing(is_sure=True))


def test_without_an_answer_the_nearest_is_named() -> None:
    text = rendered(sizing(0.5))
    assert "With up to 6 nodes, nothing fits, or the prediction exceeds 0.5 h; --max-nodes N tries more." in text
    assert "The closest is 1.00 h on 6 nodes." in text


def test_fewer_nodes_are_too_slow_or_too_small() -> None:
    assert "With fewer, nothing fits." in rendered(sizing(2.5))
    rows = (row(1, 7.2), row(2, 3.6))
    assert "With fewer, the prediction exceeds 1.5 h." in rendered(sizing(rows=rows))


def test_where_nothing_fits_there_is_no_table() -> None:
    text = rendered(sizing(rows=ROWS[:2]))
    assert "With up to 2 nodes, nothing fits; --max-nodes N tries more." in text
    assert "the job fits on none of them" in text
    assert "best plan" not in text


def test_numbers_of_nodes_without_a_plan_are_told_with_a_reason() -> None:
    text = rendered(sizing())
    assert "- nothing fits on 1-2, 4 nodes; on 4: reason of 4" in text
    assert "- no layout is legal on 3 nodes; on 3: reason of 3" in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal(width: int) -> None:
    text = rendered(sizing(), price=2.5, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_the_document_holds_every_number_of_nodes() -> None:
    view = sizing_to_dict(SPEC, sizing(), price=2.0)
    assert json.loads(json.dumps(view)) == view
    assert view["schema"] == "topoplan.size/1"
    assert (view["answer"], view["fits_from"], view["searched"]) == (6, 5, [1, 6])
    last = view["rows"][-1]
    assert last["job_time"] == effort_to_dict(ROWS[-1].effort)["job_time"]
    assert last["job_time"]["hours"] == 1.0
    assert last["hours_band"] == [0.88, 1.12]
    assert last["cost"] == 64.0
    assert view["rows"][0]["plan"] is None
    assert sizing_to_dict(SPEC, sizing(0.5), price=None)["answer"] is None
