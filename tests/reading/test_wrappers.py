"""Wrappers in front of the actual command."""

import pytest

from topoplan.reading.parts import Part
from topoplan.reading.shell import read_script
from topoplan.trainers.recognizers import recognizers


def behind(text: str) -> list[tuple[str, tuple[str, ...]]]:
    script = read_script(Part(kind="shell", name="run.sh", text=text), recognizers())
    return [(" ".join(word.text for word in one.words), one.wrappers) for one in script.unwrapped_commands]


@pytest.mark.parametrize(
    ("text", "wrappers"),
    [
        ("torchrun a.py", ()),
        ("exec torchrun a.py", ("exec",)),
        ("time nice -n 5 torchrun a.py", ("nice",)),
        ("bash -lc 'torchrun a.py'", ("bash",)),
        ("ssh host 'bash -c \"torchrun a.py\"'", ("ssh", "bash")),
        ("timeout 60 torchrun a.py", ("timeout",)),
        ("uv run torchrun a.py", ("uv",)),
        ("tmux send-keys -t 0:a 'torchrun a.py' C-m", ("tmux",)),
        ("screen -dmS a bash -c 'torchrun a.py'", ("screen", "bash")),
    ],
)
def test_the_command_behind_them(text: str, wrappers: tuple[str, ...]) -> None:
    assert behind(text) == [("torchrun a.py", wrappers)]


def test_a_script_that_is_run_by_its_file_is_not_opened() -> None:
    assert behind("bash run.sh") == []


def test_shells_in_shells_end_somewhere() -> None:
    assert behind("bash -c " * 50 + "x") == []
    assert behind("sudo " * 50 + "torchrun a.py")[0][1] == ("sudo",) * 8


def test_words_of_variables_are_where_the_command_is() -> None:
    text = "A='torchrun --nnodes 2'\nB=a.py\n\nsrun bash -c \"$A --node_rank \\$SLURM_PROCID $B\"\n"
    (one,) = read_script(Part(kind="shell", name="run.sh", text=text), recognizers()).unwrapped_commands
    assert [word.text for word in one.words][-2:] == ["$SLURM_PROCID", "a.py"]
    assert (one.first_line, one.last_line) == (4, 4)
