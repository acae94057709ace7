from __future__ import annotations

import pytest

from tests.check.samples import make_command, make_setup
from topoplan.check.setup import Configuration
from topoplan.check.values import as_whole, at, flag, is_complete, number, texts, value_of, whole


def configuration(text: str) -> Configuration:
    return make_setup(text).configurations[0]


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("packing: true", True),
        ("packing: no", False),  # a bare word, as YAML 1.1 has it
        ("packing: On", True),
        ("packing: n", True),  # text in PyYAML
        ("packing: 'false'", True),  # text counts as true
        ("packing: null", False),
        ("cutoff_len: 1", False),
    ],
)
def test_a_switch_is_on_when_the_trainer_takes_it_for_true(text: str, on: bool) -> None:
    assert flag(configuration(text), "packing") is on


def test_the_text_of_a_command_is_read_as_argparse_does() -> None:
    command = make_command({"packing": "false", "max_steps": "10", "learning_rate": "1e-5"}).configurations[0]
    assert not flag(command, "packing")
    assert whole(command, "max_steps") == 10
    assert number(command, "learning_rate") == 1e-5


def test_only_numbers_are_numbers() -> None:
    made = configuration("a: 4.0\nb: true\nc: '4'\nd: .nan\ne: 4.5")
    assert [whole(made, key) for key in "abcde"] == [4, None, None, None, None]
    assert [number(made, key) for key in "abcde"] == [4.0, None, None, None, 4.5]
    assert whole(made, "f", 7) == 7
    assert as_whole(10**400) == 10**400
    assert number(configuration("a: 1"), "a") == 1.0


def test_values_are_found_by_their_path() -> None:
    data = {"a": [{"b": 1}], "c": "x"}
    assert at(data, ("a", 0, "b")) == 1
    assert at(data, ("a", 1, "b")) is at(data, ("c", "d")) is at(data, ("a", "0")) is None
    assert list(texts(data)) == [(("c",), "x")]
    assert value_of(configuration("a: 1"), "b", "default") == "default"


def test_a_job_of_its_own_is_told_from_a_few_lines() -> None:
    assert is_complete(configuration("model_name_or_path: a\nstage: sft"))
    assert not is_complete(configuration("tensor_model_parallel_size: 8\nper_device_train_batch_size: 2"))
