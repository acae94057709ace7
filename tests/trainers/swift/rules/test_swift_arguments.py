"""Arguments that ms-swift's commands take and refuse."""

from __future__ import annotations

import pytest

from tests.reading.setups import make_command, only, rules, setup_of
from topoplan.trainers.swift.rules.swift import findings
from topoplan.trainers.swift.rules.swift_arguments import command_of

GRPO = {"rlhf_type": "grpo", "model": "Qwen/Qwen3-8B", "reward_funcs": "accuracy", "num_generations": "8", "beta": "0"}


def test_swift_rlhf_takes_arguments_of_its_own() -> None:
    assert rules(findings, make_command(GRPO, program="swift rlhf")) == []
    assert rules(findings, make_command(GRPO | {"num_generation_s": "8"})) == ["swift-unknown-argument"]


def test_swift_sft_refuses_them() -> None:
    (finding,) = findings(make_command({"model": "Qwen/Qwen3-8B", "num_generations": "8"}))
    assert finding.what == "--num_generations belongs to `swift rlhf`, and `swift sft` refuses it"


def test_arguments_of_a_newer_version_are_a_note_with_that_version() -> None:
    arguments = {"model": "Qwen/Qwen3-8B", "decision_state_as_text": "true", "decision_shuffle_fields": "true"}
    finding = only(findings, make_command(arguments), "swift-new-argument")
    assert finding.severity == "note"
    assert finding.what == "decision_state_as_text, decision_shuffle_fields need ms-swift 4.6.0 or newer"


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("swift rlhf --model a", "swift rlhf"),
        ("torchrun --nproc_per_node 2 swift/cli/rlhf.py --model a", "swift rlhf"),
        ("swift sft --model a", "swift sft"),
        ("swift pt --model a", "swift sft"),
        ("megatron rlhf --rlhf_type dpo --model a", "megatron sft"),
    ],
)
def test_the_command_is_the_one_that_is_typed(text: str, command: str) -> None:
    setup = setup_of(text + "\n")
    assert [command_of(setup, one) for one in setup.configurations] == [command]


def test_under_ray_the_configuration_is_an_argument() -> None:
    ray = {"use_ray": "true", "config": "a.yaml"}

    assert rules(findings, make_command(ray, "swift-megatron", program="megatron rlhf")) == []
    assert rules(findings, make_command({"config": "a.yaml"}, "swift-megatron", program="megatron rlhf")) == [
        "swift-unknown-argument"
    ]
