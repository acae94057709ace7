import json
from pathlib import Path
from typing import Any

import pytest

from topoplan.errors import SpecError
from topoplan.specs import json_records as module
from topoplan.specs.json_records import json_records


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
