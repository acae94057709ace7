"""README.md holds when it is tried from top to bottom."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checks_page import checks_page
from tests.readme import CHECKS, PICTURE, README, ROOT, picture, refreshed

TEXT = README.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A directory that looks like a new clone to the commands, with `topoplan` on the PATH."""
    (tmp_path / "cluster_specs").symlink_to(ROOT / "cluster_specs")
    program = tmp_path / "bin" / "topoplan"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m topoplan "$@"\n')
    program.chmod(0o755)
    return tmp_path


def run(command: list[str], clone: Path) -> subprocess.CompletedProcess[str]:
    path = f"{clone / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.readme
def test_the_output_is_what_the_program_prints() -> None:
    assert TEXT.count("<!-- output -->") == TEXT.count("<!-- /output -->") == 7
    assert refreshed(TEXT) == TEXT, "the output of an example has changed: run `make readme`"


@pytest.mark.readme
def test_the_picture_is_what_the_program_draws() -> None:
    assert picture(TEXT) == PICTURE.read_text(encoding="utf-8"), "the picture has changed: run `make readme`"


def test_the_page_of_checks_says_what_the_rules_say() -> None:
    assert checks_page() == CHECKS.read_text(encoding="utf-8"), "a rule has changed: run `make readme`"


@pytest.mark.readme
def test_the_two_commands_of_the_quick_start(clone: Path) -> None:
    commands = re.findall(r"^\$ (topoplan .*)$", blocks("console")[0], re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        done = run(["bash", "-c", command], clone)
        assert done.returncode == 0, done.stderr
    assert (clone / "generated" / "h100-4x8" / "node-00.sh").is_file()


@pytest.mark.readme
@pytest.mark.parametrize("script", [block for block in blocks("bash") if "topoplan " in block])
def test_the_other_commands(clone: Path, script: str) -> None:
    done = run(["bash", "-euo", "pipefail", "-c", script], clone)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.readme
def test_the_python_example(clone: Path) -> None:
    (code,) = blocks("python")
    done = run([sys.executable, "-c", code], clone)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tp4-pp1-dp8-mbs1 ")


@pytest.mark.readme
def test_the_spec_of_the_walk_through(clone: Path) -> None:
    spec = blocks("yaml")[0]
    (clone / "cluster.yaml").write_text(spec)
    done = run(["topoplan", "rank", "cluster.yaml"], clone)
    assert done.returncode == 0, done.stderr


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = TEXT + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    commands = re.findall(r"^make ([a-z ]+)|`make (?:[A-Z]+=\S+ )?([a-z ]+)`", text, re.MULTILINE)
    named = {word for groups in commands for group in groups for word in group.split()}
    assert {"test", "demo", "bench"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
