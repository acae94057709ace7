import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoplan.errors import SpecError
from topoplan.specs import json_source as module
from topoplan.specs.json_source import json_records, parse_json
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


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def read(path: Path, stride: int = 1) -> list[tuple[int, dict[str, Any] | None]]:
    return list(json_records(path, stride=stride))


def test_a_list_and_lines_give_the_same_objects_with_their_lines(tmp_path: Path) -> None:
    expected = [(1, {"a": "é"}), (3, {"b": [1]})]
    assert read(written(tmp_path / "x.jsonl", '{"a": "é"}\n\n{"b": [1]}\n')) == expected
    assert read(written(tmp_path / "x.json", '[{"a": "é"},\n\n{"b": [1]}]')) == expected
    assert read(written(tmp_path / "bom.json", '\ufeff[{"a": "é"},\n\n{"b": [1]}]')) == expected


def test_a_list_is_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = [{"text": 'ab\\"\n{[,' * n, "n": n} for n in range(40)]
    path = written(tmp_path / "x.json", json.dumps(objects, indent=1))
    whole = read(path)
    assert [value for _, value in whole] == objects
    for size in (1, 7, 64):
        monkeypatch.setattr(module, "_CHUNK", size)
        assert read(path) == whole


def test_a_stride_passes_over_records_without_losing_count(tmp_path: Path) -> None:
    lines = "".join(f'{{"n": {n}}}\n' for n in range(5))
    for path in (
        written(tmp_path / "x.jsonl", lines),
        written(tmp_path / "x.json", json.dumps([{"n": n} for n in range(5)])),
    ):
        assert [value for _, value in read(path, stride=2)] == [{"n": 0}, None, {"n": 2}, None, {"n": 4}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x: is empty"),
        ("  \n", "x: is empty"),
        ("hello", "x:1: is not JSON"),
        ('{"a": 1}\n{"a": \n', "x:2: is not JSON"),
        ('{"a": 1}\n5\n', "x:2: 5 is not an object"),
        ('[{"a": 1},\n3]', "x:2: 3 is not an object"),
        ('[{"a": 1}\n{"a": 2}]', "x:2: is not JSON"),
        ('[{"a": 1},\n{"a": ', "x:2: is not JSON"),
        ('[{"a": 1},\n', "x:2: ends in the middle of its list"),
        ("[" * 200_000, "x:1: is not JSON: nested too deep"),
    ],
)
def test_what_is_not_json_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x", text)
    with pytest.raises(SpecError) as caught:
        read(path)
    assert message in str(caught.value)


def test_what_is_not_text_or_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(SpecError, match="x:1: is not text"):
        read(tmp_path / "x")
    with pytest.raises(SpecError, match="cannot be read"):
        read(tmp_path)
