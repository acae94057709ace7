"""Command lines split into launcher, options, program and arguments."""

from topoplan.reading.starters import LaunchCommand, options_of, split_launch
from topoplan.reading.words import Word


def cut(text: str) -> LaunchCommand:
    found = split_launch([Word(text=word, line=1) for word in text.split()])
    assert found is not None
    return found


def test_options_end_at_the_program() -> None:
    found = cut("torchrun --nnodes 2 a.py --nnodes 3")
    assert found.options["nnodes"].value == "2"
    assert [word.text for word in found.arguments] == ["--nnodes", "3"]


def test_the_beginning_of_a_name_is_enough_where_only_one_begins_so() -> None:
    assert set(cut("torchrun --nproc 8 a.py").options) == {"nproc_per_node"}
    assert set(cut("torchrun --master x a.py").options) == {"master"}  # ambiguous, so torchrun refuses it


def test_python_with_code_or_nothing_is_no_start() -> None:
    for text in ("python -c x", "python", "accelerate env", "python --version"):
        assert split_launch([Word(text=word, line=1) for word in text.split()]) is None


def test_the_options_of_torchrun_are_those_with_a_value_and_the_flags() -> None:
    assert {"nnodes", "master_port", "standalone", "no_python"} <= options_of("torchrun")
