import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from topoplan.specs.scalars import scalar
from topoplan.trainers.yaml_text import Entry, Section, mapping_text, one_line

TEXTS = st.text(st.characters(codec="utf-8"), max_size=60)


def read(value: object) -> object:
    return yaml.safe_load(f"key: {scalar(value)}\n")["key"]


@pytest.mark.parametrize(
    "word", ["no", "On", "y", "null", "~", "", "1e5", "2e-5", "0x1f", "12:30", "2024-01-01", "1_000"]
)
def test_a_string_that_yaml_could_misread_is_quoted(word: str) -> None:
    assert scalar(word).startswith('"')
    assert read(word) == word


@pytest.mark.parametrize("word", ["models/Qwen/Qwen3-8B", "alltoall", "./data", "/data/m", "none", "qwen3_vl"])
def test_a_plain_string_stays_plain(word: str) -> None:
    assert scalar(word) == word
    assert read(word) == word


def test_a_small_float_has_the_dot_that_yaml_1_1_needs_to_see_a_number() -> None:
    assert scalar(2e-5) == "2.0e-05"
    assert read(2e-5) == 2e-5


@given(TEXTS)
def test_any_string_comes_back(text: str) -> None:
    assert read(text) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_float_comes_back(value: float) -> None:
    back = read(value)
    assert isinstance(back, float)
    assert math.isclose(back, value, rel_tol=0, abs_tol=0)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=8,
    )
)
def test_mappings_and_lists_come_back(value: object) -> None:
    assert read(value) == value


def test_an_unknown_type_is_a_programming_error() -> None:
    with pytest.raises(TypeError):
        scalar(object())


@given(TEXTS, TEXTS)
def test_a_comment_cannot_add_a_line_to_the_document(comment: str, note: str) -> None:
    section = Section(title=note, entries=(Entry(key="a", value=1, comment=comment),), notes=(note,))
    assert yaml.safe_load(mapping_text([comment], [section])) == {"a": 1}


def test_a_comment_is_one_printable_line() -> None:
    assert one_line("a\nb\x1b[31m \u2028 c\x00") == "a b [31m c"


def test_a_section_without_lines_is_left_out() -> None:
    assert "Empty" not in mapping_text(["head"], [Section(title="Empty", entries=())])
