"""Kinds of text, recognized by form."""

import pytest

from topoplan.reading.kinds import looks_like_command, names_a_job, sets_variables, starts_training
from topoplan.reading.recognizer import keys_of
from topoplan.trainers.recognizers import recognizers

KEYS = keys_of(recognizers())


@pytest.mark.parametrize(
    "text",
    [
        "torchrun --nnodes 2 a.py",
        "A=1 \\\n  llamafactory-cli train a.yaml",
        "nohup swift sft --model a &",
        "srun torchrun a.py",
    ],
)
def test_commands_that_start_training(text: str) -> None:
    assert starts_training(text)


@pytest.mark.parametrize("text", ["# torchrun --nnodes 2 a.py", "pip install swift", "torchrun 启动进程"])
def test_other_text_starts_none(text: str) -> None:
    assert not starts_training(text)


def test_prose_may_begin_with_the_name_of_a_launcher() -> None:
    assert looks_like_command("torchrun --nnodes 2 a.py")
    assert looks_like_command("export A=1")
    assert not looks_like_command("torchrun starts the processes")
    assert not looks_like_command("deepspeed is a library")


def test_settings_show_alternatives_when_one_comes_twice() -> None:
    assert sets_variables("export A=1\nexport B=1\n")
    assert not sets_variables("export A=1\nexport A=2\n")
    assert not sets_variables("A=1\n")


def test_what_is_whole() -> None:
    assert names_a_job("model_name_or_path: a\n", KEYS, kind="yaml")
    assert names_a_job('{"zero_optimization": {}}', KEYS, kind="json")
    assert not names_a_job('"zero_optimization": {}', KEYS, kind="json")
    assert not names_a_job("cutoff_len: 1\n", KEYS, kind="yaml")
    assert names_a_job("cutoff_len: 1\n", KEYS, kind="yaml", fragment=True)
    assert names_a_job("torchrun a.py --model b", KEYS)
    assert not names_a_job("torchrun a.py", KEYS)
