"""Command lines cut into options, program and arguments."""

from __future__ import annotations

from topoplan.reading.starters import Started, started, torchrun_options
from topoplan.reading.words import Word


def cut(text: str) -> Started:
    found = started([Word(text=word, line=1) for word in text.split()])
    assert found is not None
    return found


def test_options_end_at_the_program() -> None:
    found = cut("torchrun --nnodes 2 a.py --nnodes 3")
    assert found.options["nnodes"].value == "2"
    assert [word.text for word in found.arguments] == ["--nnodes", "3"]


def test_the_beginning_of_a_name_is_enough_where_only_one_begins_so() -> None:
    assert set(cut("torchrun --nproc 8 a.py").options) == {"nproc_per_node"}
    assert set(cut("torchrun --master x a.py").options) == {"master"}  # address or port: torchrun refuses it


def test_a_program_runs_by_python_unless_it_is_a_module_or_a_command() -> None:
    assert cut("torchrun a.py").python
    assert not cut("torchrun --no_python a").python
    assert cut("accelerate launch -m pkg.a").module
    assert cut("python -u -W ignore a.py").python


def test_python_with_code_or_nothing_is_no_start() -> None:
    for text in ("python -c x", "python", "accelerate env", "python --version"):
        assert started([Word(text=word, line=1) for word in text.split()]) is None


def test_the_options_of_torchrun_are_those_with_a_value_and_the_flags() -> None:
    assert {"nnodes", "master_port", "standalone", "no_python"} <= torchrun_options()
