"""Keys as a trainer takes them."""

from __future__ import annotations

import pytest

from tests.check.written import configuration
from topoplan.check.typed_keys import Keys
from topoplan.errors import SpecError

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
    assert found.flag("bf16") is False  # the key has a default of its own, which wins


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
