"""Configurations that a command names and that are not here."""

from __future__ import annotations

import pytest

from tests.reading.setups import setup_of
from topoplan.lint.rules import files

PLAIN = "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\ndo_train: true\n"


def test_a_file_that_is_not_here_is_named_at_its_line() -> None:
    (finding,) = files.findings(setup_of("torchrun --nproc_per_node 8 \\\n  -m llamafactory.launcher a/b.yaml\n"))

    assert (finding.rule, finding.severity, finding.line) == ("launch-file-not-found", "note", 2)
    assert finding.what.startswith("a/b.yaml is neither beside this file")


def test_a_name_that_only_the_shell_knows_is_said_to_be_so() -> None:
    (finding,) = files.findings(setup_of("llamafactory-cli train $CONFIG.yaml\n"))

    assert "known only when the script runs" in finding.what


@pytest.mark.parametrize("script", ["llamafactory-cli train a.yaml", "swift sft --model a", "torchrun b.py"])
def test_nothing_is_said_where_the_file_was_read_or_there_is_none(script: str) -> None:
    assert list(files.findings(setup_of(script, a_yaml=PLAIN))) == []
