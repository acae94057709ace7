"""Values and keys as a trainer interprets them."""

import pytest

from tests.reading.setups import configuration, make_command
from topoplan.errors import SpecError
from topoplan.reading.values import (
    Keys,
    as_whole,
    at,
    flag,
    is_complete,
    is_for_training,
    number,
    texts,
    value_of,
    whole,
)


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("packing: true", True),
        ("packing: no", False),  # a bare word, which YAML 1.1 reads as a boolean
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


DEFAULTS = {"gradient_accumulation_steps": 1, "bf16": False, "recompute_granularity": None, "offload": 0.0}


def keys(text: str, *, from_command: bool = False) -> Keys:
    return Keys(configuration(text, from_command=from_command), DEFAULTS)


def test_what_is_missing_or_null_has_the_trainers_default() -> None:
    found = keys("gradient_accumulation_steps: null\n")

    assert found.count("gradient_accumulation_steps") == 1
    assert found.count("tensor_model_parallel_size") is None
    assert found.degree("tensor_model_parallel_size") == 1
    assert found.flag("bf16") is False


def test_settings_for_megatron_itself_lie_under_the_keys_that_are_left_at_null() -> None:
    found = keys("additional_configs: {recompute_granularity: full, bf16: true}\n")

    assert found.value("recompute_granularity") == "full"
    assert found.flag("bf16") is False  # the key's own default takes precedence


def test_text_counts_as_true_and_a_bare_word_as_what_yaml_1_1_says() -> None:
    assert keys('bf16: "false"\n').flag("bf16") is True
    assert keys("bf16: no\n").flag("bf16") is False
    assert keys("bf16: on\n").flag("bf16") is True


def test_arguments_of_a_command_are_read_as_values() -> None:
    assert keys('bf16: "true"\nsteps: "8"\n', from_command=True).count("steps") == 8
    assert keys('bf16: "false"\n', from_command=True).flag("bf16") is False


@pytest.mark.parametrize("value", ["four", "-1", "0", "true", "2.5", "[1]"])
def test_what_is_no_count_is_refused_with_its_line(value: str) -> None:
    with pytest.raises(SpecError, match=r"^train.yaml:2: tensor_model_parallel_size is .*whole number above zero"):
        keys(f"bf16: true\ntensor_model_parallel_size: {value}\n").count("tensor_model_parallel_size")


def test_whole_numbers_written_as_floats_are_taken() -> None:
    assert keys("steps: 8.0\n").count("steps") == 8


def test_fractions_and_text_are_checked() -> None:
    assert keys("offload: 0.5\n").fraction("offload") == 0.5
    with pytest.raises(SpecError, match="expected a number from 0 to 1"):
        keys("offload: 1.5\n").fraction("offload")
    with pytest.raises(SpecError, match="expected text"):
        keys("stage: 3\n").text("stage")


@pytest.mark.parametrize(
    ("text", "training"),
    [
        ("model_name_or_path: a\ntemplate: qwen3\ninfer_backend: huggingface", False),
        ("model_name_or_path: a\nadapter_name_or_path: b\ntemplate: qwen3\nexport_dir: c", False),
        ("model_name_or_path: a\nadapter_name_or_path: b\nstage: sft", True),
        ("model_name_or_path: a\ntemplate: qwen3", True),
    ],
)
def test_files_for_export_and_chat_are_not_for_training(text: str, training: bool) -> None:
    assert is_for_training(configuration(text)) is training
