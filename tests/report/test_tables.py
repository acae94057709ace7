"""Tables that are too wide for the terminal: what wraps, and where words break."""

import pytest

from tests.report.printed import printed
from topoplan.report.tables import lines_of, table_of


def rows(width: int, *cells: str) -> list[list[str]]:
    table = table_of(*(f"h{number}" for number, _ in enumerate(cells)))
    table.add_row(*cells)
    lines = printed(lambda console: console.print(table), width=width).splitlines()
    assert max(map(len, lines)) <= width
    return [line.split() for line in lines[2:] if line.strip()]


def test_words_stay_whole_while_other_columns_can_wrap() -> None:
    assert rows(30, "dense gradients", "reduce-scatter") == [["dense", "reduce-scatter"], ["gradients"]]
    assert rows(25, "dense gradients", "reduce-scatter") == [["dense", "reduce-scatter"], ["gradients"]]


def test_words_break_at_their_joints_before_they_are_cut() -> None:
    assert rows(24, "dense gradients", "reduce-scatter") == [["dense", "reduce-"], ["gradients", "scatter"]]
    assert rows(14, "sel:layernorm+moe_act") == [["sel:layernorm+"], ["moe_act"]]
    assert rows(
        8,
        "reduce-scatter",
    ) == [["reduce-"], ["scatter"]]
    assert rows(5, "scatter") == [["scatt"], ["er"]]


def test_headers_break_like_cells() -> None:
    table = table_of("global_batch_size", "x")
    table.add_row("64", "1")
    lines = printed(lambda console: console.print(table), width=17).splitlines()
    assert [line.split() for line in lines[:2]] == [["global_batch_"], ["size", "x"]]


def test_a_table_that_fits_is_as_wide_as_its_content() -> None:
    assert rows(31, "dense gradients", "reduce-scatter") == [["dense", "gradients", "reduce-scatter"]]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (30, ["tp1 mbs1 sel:layernorm+moe_act"]),
        (21, ["tp1 mbs1", "sel:layernorm+moe_act"]),
        (17, ["tp1 mbs1", "sel:layernorm+", "moe_act"]),
    ],
)
def test_a_layout_breaks_between_its_words_and_then_at_their_joints(width: int, lines: list[str]) -> None:
    assert lines_of("tp1 mbs1 sel:layernorm+moe_act", width) == lines
