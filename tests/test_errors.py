"""The parts of error messages."""

import pytest

from topoplan.errors import listed, misspelt, nearest_file_name


def test_names_are_listed_as_one_says_them() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b"]) == "a and b"
    assert listed(["a", "b", "c"], "or") == "a, b or c"
    assert listed([]) == ""


def test_a_suffix_alone_does_not_make_files_alike() -> None:
    assert nearest_file_name("missing.yaml", ["bin.yaml", "notes.md"]) == ""
    assert nearest_file_name("cluster.yml", ["bin.yaml", "cluster.yaml"]) == "did you mean 'cluster.yaml'?"
    assert nearest_file_name("clutser.yaml", ["cluster.yaml"]) == "did you mean 'cluster.yaml'?"


KNOWN = ("learning_rate", "adam_beta1", "adam_beta2", "save_steps", "fp16", "fusion", "no_fusion")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("learnig_rate", "learning_rate"),
        ("learningg_rate", "learning_rate"),
        ("laerning_rate", "learning_rate"),
        ("leerning_rate", "learning_rate"),
        ("save_step", "save_steps"),
        ("learning_rate", ""),
        ("lerning_rte", ""),
        ("adam_beta3", ""),
        ("adam_beta", ""),
        ("bp16", ""),
        ("nofusion", "no_fusion"),
        ("", ""),
    ],
)
def test_a_misspelling_is_one_letter_away_from_one_known_word(word: str, meant: str) -> None:
    assert misspelt(word, KNOWN) == meant
