import re
from pathlib import Path

from tests.shipped import graded
from topoplan.report.accuracy_page import MARK, accuracy_page

PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"


def test_the_committed_page_is_what_the_formulas_give() -> None:
    fresh = accuracy_page(graded())
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
