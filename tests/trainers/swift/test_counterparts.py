"""What the arguments of one of ms-swift's commands are in the other."""

from typing import Any

import pytest

from topoplan.trainers.swift.arguments import accepted
from topoplan.trainers.swift.counterparts import in_terms_of


@pytest.mark.parametrize(
    ("of_transformers", "of_megatron"),
    [
        ({"max_grad_norm": 0.5, "adam_epsilon": 1e-7, "seed": 7}, {"clip_grad": 0.5, "adam_eps": 1e-7, "seed": 7}),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.2},
            {"lr_decay_style": "constant", "lr_warmup_fraction": 0.2},
        ),
        (
            {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 10},
            {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 10},
        ),
        ({"max_steps": 50}, {"train_iters": 50}),
    ],
)
def test_arguments_of_one_command_are_those_of_the_other(
    of_transformers: dict[str, Any], of_megatron: dict[str, Any]
) -> None:
    assert in_terms_of("megatron sft", of_transformers) == of_megatron
    assert in_terms_of("swift sft", of_megatron) == of_transformers
    assert in_terms_of("swift sft", of_transformers) == of_transformers
    assert all(accepted(name, value, "megatron sft") for name, value in of_transformers.items())
    assert all(accepted(name, value, "swift sft") for name, value in of_megatron.items())


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        # transformers ignores the warm-up with this schedule, and Megatron-core does not.
        (
            {"lr_scheduler_type": "constant", "warmup_ratio": 0.2},
            {"lr_decay_style": "constant", "lr_warmup_fraction": 0.0},
        ),
        ({"warmup_steps": 0.1}, {"lr_warmup_fraction": 0.1}),
        ({"max_steps": -1}, {}),
        ({"max_grad_norm": 0.5, "clip_grad": 2.0}, {"clip_grad": 2.0}),
    ],
)
def test_what_means_something_else_in_megatron_core_is_converted(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert in_terms_of("megatron sft", given) == meant


def test_a_schedule_without_a_counterpart_is_no_argument_of_the_other_command() -> None:
    assert not accepted("lr_scheduler_type", "polynomial", "megatron sft")
    assert not accepted("lr_decay_style", "WSD", "swift sft")
