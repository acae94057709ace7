import pytest

from tests.reading.setups import setup_of
from topoplan.trainers.swift.rules.swift_arguments import command_of


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
