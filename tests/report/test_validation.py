import json
import re
from pathlib import Path

import pytest

from tests import shipped
from tests.report.printed import printed
from topoplan.planner.validate import (
    ALLOCATED,
    BY_STAGE,
    Figure,
    FitGrade,
    Fits,
    RankingGrade,
    Validation,
    spread_of,
)
from topoplan.report.validation import (
    MARK,
    accuracy_page,
    figure_name,
    print_validation,
    signed_percent,
    validation_to_dict,
)

FIGURES = (
    Figure(id="a", family="bench", kind=ALLOCATED, unit="GiB", predicted=51.0, measured=50.0),
    Figure(id="a", family="bench", kind=BY_STAGE, stage=1, unit="GiB", predicted=40.0, measured=50.0),
    Figure(id="b", family="bench", kind="throughput fp8", unit="tokens/s/GPU", predicted=9000.0, measured=10000.0),
)
OVER = FitGrade(id="b", family="bench", device_gib=90.0, capacity_gib=79.6, unstated=("recompute",))
PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"
FITS = Fits(ran=1, ran_unstated=1, ran_but_over=(OVER,), out_of_memory=0, out_of_memory_but_fit=())


def graded(*, figures: tuple[Figure, ...] = FIGURES, fits: Fits = FITS) -> Validation:
    return Validation(
        figures=figures,
        spreads=tuple(spread_of([figure]) for figure in figures),
        ranking=RankingGrade(groups=1, pairs=3, pairs_in_order=2, mean_loss=0.01, worst_loss=0.02),
        fits=fits,
        runs=2,
        failed={"c": "tp 3 does not divide"},
        left_out={"LoRA": 5, "FSDP": 3, "unpacked": 2, "two models": 1},
    )


def rendered(value: Validation, *, rows: bool = False, width: int = 100) -> str:
    return printed(print_validation, value, rows=rows, width=width)


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("rows", [False, True])
def test_no_line_is_wider_than_the_terminal(width: int, rows: bool) -> None:
    text = rendered(graded(), rows=rows, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_the_table_has_a_row_for_each_source_and_kind() -> None:
    text = rendered(graded())
    row = next(line for line in text.splitlines() if line.startswith("bench") and "by stage" in line)
    assert row.split()[-5:] == ["1", "20.0%", "20.0%", "20.0%", "-20.0%"]


def test_order_fit_failures_and_what_was_left_out_follow() -> None:
    text = " ".join(rendered(graded()).split())
    assert "2 of 3 pairs are as measured, in 1 group" in text
    assert "of 1 run that completed and whose source states how memory was saved, 0 are predicted to exceed" in text
    assert "b: 90.0 GiB predicted, 79.6 on the card; not stated: recompute" in text
    assert "No run of this set ran out of memory." in text
    assert "c: tp 3 does not divide" in text
    assert "11 rows of the sources are not graded: LoRA (5); FSDP (3); unpacked (2); 1 more reason in --json." in text


def test_runs_out_of_memory_are_graded_too() -> None:
    fits = Fits(ran=0, ran_unstated=0, ran_but_over=(), out_of_memory=2, out_of_memory_but_fit=(OVER,))
    assert "Of 2 that ran out of memory, 1 are predicted to fit" in " ".join(rendered(graded(fits=fits)).split())


def test_rows_are_every_figure() -> None:
    assert "allocated GiB, stage 1" not in rendered(graded())
    text = rendered(graded(), rows=True)
    assert "allocated GiB, stage 1" in text
    assert "tokens/s/GPU fp8" in text


def test_names_and_signs() -> None:
    assert [figure_name(figure) for figure in FIGURES] == [
        "allocated GiB",
        "allocated GiB, stage 1",
        "tokens/s/GPU fp8",
    ]
    assert [signed_percent(error) for error in (0.0004, -0.0004, 0.012, -0.3)] == ["0.0%", "0.0%", "+1.2%", "-30.0%"]


def test_the_document_holds_all_of_it() -> None:
    view = validation_to_dict(graded())
    assert view["schema"] == "topoplan.validate/1"
    assert json.loads(json.dumps(view)) == view
    assert view["spreads"][0] == {
        "source": "bench",
        "kind": "allocated",
        "n": 1,
        "median": 0.02,
        "p90": 0.02,
        "worst": 0.02,
        "signed_median": 0.02,
    }
    assert view["rows"][1]["stage"] == 1
    assert view["fits"]["ran_but_over"][0]["source"] == "bench"
    assert view["fits"]["ran_but_over"][0]["unstated"] == ["recompute"]
    assert view["left_out"][0] == {"reason": "LoRA", "n": 5}
    assert view["failed"] == [{"id": "c", "error": "tp 3 does not divide"}]


def test_the_committed_page_is_what_the_formulas_give() -> None:
    fresh = accuracy_page(shipped.graded())
    assert PAGE.read_text(encoding="utf-8") == fresh, "predictions have changed: run `make accuracy`"


def test_the_page_says_what_is_graded_and_what_was_not_measured() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(MARK)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == [
        "What is graded",
        "Memory",
        "Throughput",
        "Order of layouts",
        "What fits",
        "Inside the bands",
        "Beside other planners",
        "What is not graded",
        "What was not measured",
        "Where the numbers of each GPU come from",
    ]
    for what in ("CUDA context", "NCCL's buffers", "fragmentation"):
        assert what in text.partition("## What was not measured")[2]


def test_prose_is_wrapped() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if " " in line[120:] and not line.startswith("|")]
