"""The arguments of ms-swift's commands, and the user's own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, JOB, QWEN3_8B
from topoplan.errors import InputError, LayoutError, SpecError
from topoplan.specs.spec import Spec
from topoplan.trainers.swift.arguments import (
    _OF_LLAMAFACTORY,
    COMMANDS,
    OF_THE_JOB,
    Command,
    arguments_of,
    oldest_version,
    swift_versions,
    user_arguments,
)


def checked(trainer: Mapping[str, Any], command: Command = "swift sft", **decided: Any) -> dict[str, Any]:
    spec = Spec(cluster=CLUSTER, model=QWEN3_8B, job=replace(JOB, trainer=dict(trainer)), path="c.yaml")
    return user_arguments(spec, command, decided)


def test_each_command_has_its_own_arguments_and_those_that_all_share() -> None:
    sft, rlhf, megatron = (set(arguments_of(command).types) for command in COMMANDS)
    assert {"model", "dataset", "max_length"} <= sft & rlhf & megatron
    assert sft < rlhf
    assert "beta" in rlhf - sft
    assert {"per_device_train_batch_size", "warmup_ratio"} <= sft - megatron
    assert {"micro_batch_size", "tensor_model_parallel_size"} <= megatron - sft


def test_a_switch_can_be_written_with_no_in_front_and_other_arguments_cannot() -> None:
    types = arguments_of("megatron sft").types
    assert "no_sequence_parallel" in types
    assert "no_micro_batch_size" not in types


def test_no_old_name_is_one_of_the_present() -> None:
    # `swift sft` lacks arguments that version 4 keeps only for `swift rlhf`.
    for command in ("swift sft", "megatron sft"):
        known = arguments_of(command)
        old = known.gone | set(known.renamed)
        assert {name for name in old & set(known.types) if known.types[name] or name[:3] != "no_"} == set()
        assert set(known.renamed.values()) <= set(known.types)


def test_what_a_message_advises_can_be_written() -> None:
    either = {name for command in COMMANDS for name in arguments_of(command).types}
    assert {advice.removeprefix("write ") for advice in _OF_LLAMAFACTORY.values() if advice[:5] == "write"} <= either
    assert set(OF_THE_JOB) <= either
    assert {key for key in OF_THE_JOB.values() if not hasattr(JOB, key)} == set()
    # Otherwise the advice would never be given.
    assert not set(_OF_LLAMAFACTORY) & set(arguments_of("megatron sft").types)


def test_versions_are_those_of_the_list() -> None:
    assert swift_versions() == ("4.5.2", "4.6.0")


def test_a_file_is_for_the_versions_that_take_all_its_arguments() -> None:
    assert oldest_version({"learning_rate": 1e-5, "generation_num_beams": 3}, "swift sft") == "4.5.2"
    assert oldest_version({"learning_rate": 1e-5, "muon_lr": 1e-3}, "megatron sft") == "4.6.0"


def test_values_come_in_the_type_that_the_argument_has() -> None:
    assert checked({"learning_rate": "1e-5", "dataset": "a.jsonl", "save_steps": 7, "report_to": "none"}) == {
        "learning_rate": 1e-5,
        "dataset": ["a.jsonl"],
        "save_steps": 7,
        "report_to": ["none"],
    }
    # An argument of transformers whose type is not listed here.
    assert checked({"generation_num_beams": 3}) == {"generation_num_beams": 3}


def test_a_name_that_begins_with_no_is_an_argument_like_others() -> None:
    assert checked({"no_save_rng": True}, "megatron sft") == {"no_save_rng": True}


def test_what_the_plan_decides_may_be_said_again() -> None:
    assert checked({"max_length": 4096}, max_length=4096) == {"max_length": 4096}


@pytest.mark.parametrize(
    ("trainer", "command", "message"),
    [
        ({"train_type": "lora"}, "swift sft", "refuses train_type, a name of version 3; write tuner_type"),
        ({"save_interval": 3}, "megatron sft", "write save_steps"),
        ({"add_qkv_bias": True}, "megatron sft", "refuses add_qkv_bias; version 3 had it; leave it out"),
        ({"cutoff_len": 1}, "swift sft", "is a key of LLaMA-Factory, and `swift sft` refuses it; set job.seq_len"),
        ({"micro_batch_size": 1}, "swift sft", "which is one of `megatron sft`"),
        ({"beta": 1.0}, "swift sft", "which is one of `swift rlhf`"),
        ({"save_stepz": 1}, "swift sft", "did you mean 'save_steps'"),
        ({"no_micro_batch_size": 1}, "megatron sft", "has no argument 'no_micro_batch_size'"),
        ({"no_packing": True}, "megatron sft", "write packing: false"),
        ({"hub_token": "hf_abc"}, "swift sft", "never written to a file"),
        ({"my_password": "hf_abc"}, "swift sft", "never written to a file"),
        ({"dataset_num_proc": "many"}, "swift sft", "a whole number"),
        ({"check_model": "perhaps"}, "swift sft", "true or false"),
    ],
)
def test_what_a_command_would_refuse_is_refused_here(trainer: dict[str, Any], command: Command, message: str) -> None:
    with pytest.raises(InputError) as error:
        checked(trainer, command)
    said = str(error.value)
    assert message in said
    assert f"c.yaml: job.trainer.{next(iter(trainer))}" in said
    assert "hf_abc" not in said


def test_a_contradiction_of_the_plan_names_the_key_that_changes_it() -> None:
    with pytest.raises(SpecError, match=r"made for 4096; set job\.seq_len and leave max_length out"):
        checked({"max_length": 1}, max_length=4096)
    with pytest.raises(LayoutError, match=r"the plan leaves it out; leave it out, or ask for it under job\.pin"):
        checked({"deepspeed": "zero3"}, deepspeed=None)
