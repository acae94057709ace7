from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from topoplan.errors import SpecError
from topoplan.specs.json_source import parse_json
from topoplan.specs.typed import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    radius: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Square:
    side: int = 0
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    shape: Round | Square
    words: tuple[str, ...] = ()
    color: Literal["red", "blue"] = "red"
    labels: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str | bool] = field(default_factory=dict)
    anything: Mapping[str, Any] = field(default_factory=dict)
    is_open: bool = False
    lid: Square | None = None


def reader(data: Any) -> Reader:
    source = parse_json(json.dumps(data, indent=1), name="box.json")
    return Reader(source, special={}, ranges={(Square, "side"): (0, 9)}, kinds={Round: "round", Square: "square"})


def box(**changes: Any) -> Box:
    data = {"shape": {"kind": "round", "radius": 1}, **changes}
    return reader(data).read(Box, data, ())


def test_each_field_gets_its_declared_type_and_nothing_is_converted() -> None:
    found = box(words=["a"], color="blue", labels={"x": "1"}, anything={"y": [1, None]}, is_open=True, lid={"side": 3})
    assert found == Box(
        shape=Round(radius=1),
        words=("a",),
        color="blue",
        labels={"x": "1"},
        anything={"y": [1, None]},
        is_open=True,
        lid=Square(side=3),
    )
    assert isinstance(found.shape, Round)
    assert type(found.shape.radius) is int
    assert box(lid=None).lid is None


def test_the_kind_tells_members_of_a_union_apart() -> None:
    assert box(shape={"kind": "square"}).shape == Square()


def test_a_union_of_plain_types_takes_each_of_them() -> None:
    assert box(options={"a": "x", "b": True}).options == {"a": "x", "b": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": {"kind": "round"}}, "box.json:2: `radius` is missing in `shape`"),
        ({"shape": {"kind": "cube"}}, "box.json:3: shape.kind: 'cube'; expected round or square"),
        ({"shape": {"kind": "square", "radius": 1}}, "box.json:4: unknown key 'radius' in `shape`"),
        ({"shape": 1}, "box.json:2: shape: 1 is not a block of keys; expected a JSON object"),
        ({"shape": {"kind": "round", "radius": 0}}, "expected a number above 0 up to 1e+18"),
        ({"shape": {"kind": "round", "radius": "1"}}, "box.json:4: shape.radius: '1' is not a number"),
        ({"lid": {"side": 10}}, "lid.side: 10 is out of range; expected a number from 0 up to 9"),
        ({"lid": {"side": True}}, "lid.side: true is not a whole number"),
        ({"words": "a"}, "words: 'a' is not a list; expected a JSON array"),
        ({"words": [1]}, "words[0]: 1 is not text"),
        ({"color": "green"}, "color: 'green'; expected red or blue"),
        ({"color": []}, "color: a list; expected red or blue"),
        ({"labels": {"x": 1}}, "labels.x: 1 is not text"),
        ({"options": {"x": 1}}, "options.x: 1 is not text or true or false"),
        ({"is_open": 1}, "is_open: 1 is not true or false"),
        ({"wrods": []}, "unknown key 'wrods'; did you mean 'words'?"),
    ],
)
def test_a_mistake_is_told_with_line_and_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        box(**changes)
    assert message in str(error.value)


def test_numbers_that_come_from_others_must_agree() -> None:
    given = {"count": 3, "sum": 7}
    reader(given).derived(given, (), {"count": 3, "absent": 1})
    with pytest.raises(SpecError, match=r"^box.json:3: sum: 7 does not agree with its block; expected 8$"):
        reader(given).derived(given, (), {"sum": 8})


@pytest.mark.parametrize("value", [0, 11, True, 1.0, "1", None])
def test_a_whole_number_is_one_in_its_range(value: object) -> None:
    assert reader({"a": 10}).whole(10, ("a",), 10) == 10
    with pytest.raises(SpecError, match=r"^box.json:2: a: .*; expected a whole number from 1 to 10$"):
        reader({"a": value}).whole(value, ("a",), 10)
