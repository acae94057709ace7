import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoplan.errors import SpecError
from topoplan.specs.json_source import parse_json
from topoplan.specs.source import KeyPath

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def refused(text: str) -> str:
    with pytest.raises(SpecError) as error:
        parse_json(text, name="plan.json", remedy="give another")
    return str(error.value)


def test_every_key_and_item_keeps_its_line() -> None:
    source = parse_json(
        '{"a": 1,\n"b": {\n"c": [\n"x", {"d": 2,\n"e": [[], {},\n3]}]},\n\t"f": "\\n{,\\""\n}', name="p"
    )
    assert source.data == {"a": 1, "b": {"c": ["x", {"d": 2, "e": [[], {}, 3]}]}, "f": '\n{,"'}
    places: dict[KeyPath, int] = {
        ("a",): 1,
        ("b",): 2,
        ("b", "c"): 3,
        ("b", "c", 0): 4,
        ("b", "c", 1, "d"): 4,
        ("b", "c", 1, "e"): 5,
        ("b", "c", 1, "e", 2): 6,
        ("f",): 7,
    }
    assert {path: source.place(path) for path in places} == {path: f"p:{line}" for path, line in places.items()}
    assert source.place(("b", "absent")) == "p:2"
    assert source.place(()) == "p"


@given(st.dictionaries(st.text(), JSON), st.sampled_from([None, 0, 2, "\t"]), st.booleans())
def test_values_come_back_exactly_and_every_one_has_a_line(
    value: dict[str, Any], indent: int | str | None, is_ascii: bool
) -> None:
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
        text.encode()
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    source = parse_json(text, name="p")
    assert repr(source.data) == repr(value)
    assert set(source.lines) == set(paths(value, ()))
    assert set(source.lines.values()) <= set(range(1, text.count("\n") + 2))


def paths(value: Any, path: KeyPath) -> list[KeyPath]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in inner for found in ((*path, key), *paths(item, (*path, key)))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan.json:1: is not JSON: Expecting value; give another"),
        ('{"a": 1,\nb}', "plan.json:2: is not JSON"),
        ("name: h100\n", "plan.json:1: is not JSON: Expecting value; give another"),
        ("[1]", "plan.json: holds a list; expected a JSON object; give another"),
        ("3", "plan.json: holds one value"),
        ('{"a": NaN}', "plan.json: is not JSON that can be read: NaN is not a number of JSON"),
        ('{"a": -Infinity}', "-Infinity is not a number of JSON"),
        ('{"a": ' + "9" * 5000 + "}", "is not JSON that can be read"),
        ('{"a":' * 100_000, "is not JSON"),
        ('{"a":' * 61 + "1" + "}" * 61, "plan.json:1: is nested more than 60 levels deep"),
        ('{"a": "\\ud800"}', "plan.json: holds half a character"),
        ('{"a": {"b": 1,\n"c": 2,\n"b": 1}}', "plan.json:3: key 'b' is given twice; first on line 1; keep one of them"),
        ('{"a": 1, "a": 1}', "plan.json:1: key 'a' is given twice"),
    ],
)
def test_what_cannot_be_read_has_one_message(text: str, message: str) -> None:
    assert message in refused(text)
    assert "\n" not in refused(text)


def test_a_pair_of_surrogates_is_one_character() -> None:
    assert parse_json('{"a": "\\ud83d\\ude00"}', name="p").data == {"a": "\U0001f600"}


@given(st.text(alphabet='{}[]:,"\\ntu0123456789.e- \n'))
def test_no_text_ends_in_anything_but_a_value_or_a_message(text: str) -> None:
    try:
        assert isinstance(parse_json(text, name="p").data, dict)
    except SpecError as error:
        assert str(error).startswith("p")  # noqa: PT017
