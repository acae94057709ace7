"""Tables of combinations that trainers refuse: evaluation of their expressions, and whether their names are keys."""

import ast
from collections.abc import Iterator
from typing import Any

import pytest

from tests.reading.setups import setup_of
from topoplan.catalog import key_list
from topoplan.reading.rules import Rule
from topoplan.trainers.around import NAMES_AROUND, context_of
from topoplan.trainers.llamafactory.key_list import keys_for, plain_keys, removed_keys
from topoplan.trainers.llamafactory.rules.keys import RENAMED
from topoplan.trainers.relations import Relations, read_relations
from topoplan.trainers.swift.arguments import COMMANDS, arguments_of

RULE = Rule(id="r", level="error", reads="", what="{refusal}")
LF_KEYS = {*RENAMED, *keys_for("mca"), *plain_keys(), *removed_keys()}
FLAGS = set(key_list("megatron_lm")["classes"]["Top"])
KEYS = {
    ("", "megatron_lm.toml"): FLAGS | {"fp8"},
    ("swift.rules", "relations.toml"): {name for one in COMMANDS[:2] for name in arguments_of(one).types},
    ("swift.rules", "megatron_relations.toml"): set(arguments_of("megatron sft").types) | FLAGS | {"fp8"},
    ("llamafactory.rules", "relations.toml"): LF_KEYS,
    ("", "accelerate.toml"): {*key_list("accelerate")["top"], *key_list("accelerate")["blocks"], "trains"},
    ("", "deepspeed.toml"): {*key_list("deepspeed")["top"]},
    ("llamafactory.rules", "v1_relations.toml"): set(key_list("llamafactory_v1")["classes"]["Top"]),
}


def table(when: str, what: str = "refused") -> Relations:
    return Relations.of(
        {"defaults": {"gone": 4}, "values": {"twice": "2 * a"}, "refused": [{"at": ["a"], "when": when, "what": what}]}
    )


@pytest.mark.parametrize(
    ("when", "is_so"),
    [
        ("a == 3 and b == 'text'", True),
        ("a % 2", True),
        ("twice == 6 and gone == 4", True),
        ("c in (None, 'x')", True),
        ("block.size > 1 and block.none is None", True),
        ("off", False),
        ("not off and b", True),
        ("len(items(named)) == 2 and items_in(items(named), ['q_proj'])", True),
        ("open > 1", False),
        ("open > 1 or a == 3", True),
        ("open > 1 and a == 4", False),
        ("not open", False),
        ("world % 2", False),  # the launch does not determine it
        ("a / 0", False),
        ("b * 2", False),
        ("c < 3", False),
    ],
)
def test_what_is_not_known_refuses_nothing(when: str, is_so: bool) -> None:
    text = "model_name_or_path: m\ndataset: d\nstage: sft\na: 3\nb: text\noff: false\nblock: {size: 2}\n"
    setup = setup_of(text + "named: q_proj,k_proj\nopen: ${oc.env:HOW_MANY}\n", name="train.yaml")
    found = list(table(when).findings(RULE, setup.configurations[0], context_of(setup, setup.configurations[0])))
    assert bool(found) is is_so


def test_a_piece_of_a_configuration_has_no_defaults() -> None:
    setup = setup_of("stage: sft\ntemplate: qwen\na: 3\n", name="train.yaml")
    found = table("gone == 4 or other is None").findings(
        RULE, setup.configurations[0], context_of(setup, setup.configurations[0])
    )
    assert not list(found)


def test_a_relation_is_said_with_its_numbers_at_the_key_that_is_written() -> None:
    setup = setup_of("model_name_or_path: m\ndataset: d\na: 3\n", name="train.yaml")
    said = table("a % 2", "a {a} % 2 = {a % 2}").findings(
        RULE, setup.configurations[0], context_of(setup, setup.configurations[0])
    )
    assert [(one.what, one.line) for one in said] == [("a 3 % 2 = 1", 3)]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"needs": {"b": ["c"]}}, "b without c: set c, or remove b"),
        ({"needs": {"b": ["a == 4"]}}, "b without a 4: set a 4, or remove b"),
        ({"needs": {"a == 3": ["b in ('x', 'y')"]}}, "a 3 without b x or y: change it"),
        ({"excludes": {"b": ["a"]}}, "b with a: remove one of them"),
        ({"excludes": {"b is not None": ["a not in (1, 2)"]}}, "b with a other than 1, 2: change one of them"),
        ({"needs": {"b": ["a == 3"]}, "excludes": {"c": ["a"]}}, ""),
    ],
)
def test_what_is_needed_or_excluded_is_said_in_the_words_of_its_conditions(row: dict[str, Any], says: str) -> None:
    setup = setup_of("model_name_or_path: m\ndataset: d\nstage: sft\na: 3\nb: text\n", name="train.yaml")
    rule = Rule(id="r", level="error", reads="", what="{refusal}", remedy="{remedy}")
    around = context_of(setup, setup.configurations[0])
    found = Relations.of({"refused": [], **row}).findings(rule, setup.configurations[0], around)
    assert [f"{one.what}: {one.remedy}" for one in found] == [says][: bool(says)]


def names(node: ast.expr) -> Iterator[str]:
    assert not isinstance(node, ast.IfExp), "it would be taken for the name of a key"
    if isinstance(node, ast.Attribute):
        yield ast.unparse(node)
    elif isinstance(node, ast.Name):
        yield node.id
    else:
        called = node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
        yield from (name for one in called if isinstance(one, ast.expr) for name in names(one))


@pytest.mark.parametrize("where", KEYS, ids="/".join)
def test_the_names_of_a_table_are_keys_of_the_trainer(where: tuple[str, str]) -> None:
    wing, file = where
    relations = read_relations(f"topoplan.trainers.{wing}".rstrip("."), file)
    known = KEYS[where] | relations.values.keys() | NAMES_AROUND
    known |= {"it", "env", "names"}
    written = [*relations.values.values(), *(one.when for one in relations.refused)]
    keys = [*relations.choices, *relations.numbers, *(key for one in relations.refused for key in one.at)]
    assert {name.partition(".")[0] for node in written for name in names(node)} <= known
    assert {key.partition(".")[0] for key in keys} <= known
    assert {key.partition(".")[0] for key in relations.defaults} <= KEYS[where]
    assert all(key_list(told.partition(".")[0])[told.partition(".")[2]] for told in relations.names.values())
