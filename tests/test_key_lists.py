"""Updating the catalog's key lists from the trainers' packages: `tests/verify/key_lists.py`."""

import enum
import itertools
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from packaging.version import Version

from tests.verify.key_lists import (
    FOLDER,
    bring_names_up,
    brought_up,
    declared,
    differences,
    name_differences,
    names_of,
    read,
    text_of,
)

KNOWN = ["1.0", "2.0"]


class Strategy(enum.Enum):
    NO = "no"
    STEPS = "steps"


@dataclass
class Arguments:
    size: int = 1
    scheduler: Strategy | str = field(default=Strategy.NO)
    method: Literal["uniform", "block"] | None = None
    bits: Literal[4, 8, "fp8"] = 4
    extra: dict[str, Any] | str = field(default_factory=dict)
    made: str = field(default="", init=False)


def entry(**what: Any) -> dict[str, Any]:
    return {"types": ["int"], "default": 1, "from": "a"} | what


def test_a_field_is_an_entry_with_types_choices_and_default() -> None:
    assert declared(Arguments) == {
        "size": {"types": ["int"], "default": 1},
        "scheduler": {"types": ["str"], "choices": ["no", "steps"], "default": "no"},
        "method": {"types": ["str"], "nullable": True, "choices": ["uniform", "block"], "default": None},
        "bits": {"types": ["int", "str"], "default": 4},
        "extra": {"types": ["dict", "str"], "default": {}},
    }


def test_a_key_of_a_newer_version_says_since_when() -> None:
    old = brought_up({}, {"a": entry()}, "1.0", KNOWN)
    assert old == {"a": entry()}
    new = brought_up(old, {"a": entry(), "b": entry()}, "2.0", KNOWN)
    assert new["b"]["since"] == "2.0"
    assert brought_up(new, {"a": entry()}, "1.0", KNOWN) == new
    assert "since" not in brought_up(new, {"a": entry(), "b": entry()}, "1.0", KNOWN)["b"]


def test_types_and_defaults_are_the_newest_versions_and_choices_those_of_any() -> None:
    listed = {"a": entry(choices=["x", "y"], ignored=True)}
    older = brought_up(listed, {"a": entry(default=3, choices=["x", "z"])}, "1.0", KNOWN)
    assert (older["a"]["default"], older["a"]["choices"]) == (1, ["x", "z", "y"])
    newer = brought_up(older, {"a": entry(default=2, choices=["z"])}, "2.0", KNOWN)
    assert newer["a"] == entry(default=2, choices=["z", "x", "y"], ignored=True)


def test_choices_that_a_person_has_noted_stay() -> None:
    listed = {"a": entry(choices=["x"], note="why")}
    assert brought_up(listed, {"a": entry(choices=["x", "y"])}, "2.0", KNOWN) == listed
    assert differences(listed, {"a": entry(choices=["x", "y"])}, "2.0") == []


@pytest.mark.parametrize(
    ("real", "version", "said"),
    [
        ({"a": entry()}, "1.0", []),
        ({"a": entry()}, "2.0", ["b is gone"]),
        ({"a": entry(), "b": entry(), "c": entry()}, "2.1", ["c is new"]),
        ({"a": entry(), "b": entry()}, "1.0", ["b is new"]),
        ({"a": entry(default=2)}, "1.0", ["a: default is 2, and 1 in the list"]),
        ({"a": entry(choices=["x"])}, "1.0", ["a: choices is ['x'], and None in the list"]),
    ],
)
def test_what_a_version_declares_otherwise_is_named(real: dict[str, Any], version: str, said: list[str]) -> None:
    assert differences({"a": entry(), "b": entry(since="2.0")}, real, version) == said


def test_bare_names_come_and_go() -> None:
    document: dict[str, Any] = {"names": ["a", "b"]}
    bring_names_up(document, "names", {"a", "b"}, "1.0", KNOWN)
    assert document == {"names": ["a", "b"]}
    bring_names_up(document, "names", {"a", "c"}, "2.0", KNOWN)
    assert names_of(document, "names") == {"a": {}, "b": {"until": "2.0"}, "c": {"since": "2.0"}}
    assert name_differences(document, "names", {"a", "b"}, "1.5") == []
    assert name_differences(document, "names", {"a", "b"}, "2.0") == ["b is new", "c is gone"]


@pytest.mark.parametrize("order", list(itertools.permutations(["1.0", "2.0", "3.0"])))
def test_names_are_right_once_each_version_has_come_twice_in_any_order(order: tuple[str, ...]) -> None:
    had = {"1.0": {"a", "b"}, "2.0": {"a", "c"}, "3.0": {"a", "c", "d"}}
    document: dict[str, Any] = {"names": ["a", "c"], "until": {"names": {"c": "1.0"}}}
    for version in order * 2:
        bring_names_up(document, "names", had[version], version, list(had))
    for version, names in had.items():
        assert name_differences(document, "names", names, version) == []
    assert document["until"] == {"names": {"b": "2.0"}}
    assert document["since"] == {"names": {"c": "2.0", "d": "3.0"}}


@pytest.mark.parametrize("name", ["megatron_config", "ms_swift", "ms_swift_names"])
def test_no_name_is_gone_before_it_came(name: str) -> None:
    document = read(f"{name}.json")
    for key, gone in document.get("until", {}).items():
        for one, until in gone.items():
            since = document.get("since", {}).get(key, {}).get(one, "0")
            assert Version(since) < Version(until), one


@pytest.mark.parametrize(
    "name", ["llamafactory", "llamafactory_templates", "megatron_config", "ms_swift", "ms_swift_names"]
)
def test_the_lists_stand_in_the_form_that_they_are_written_in(name: str) -> None:
    path = FOLDER / f"{name}.json"
    assert path.read_text(encoding="utf-8") == text_of(read(path.name))
