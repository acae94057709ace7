"""Tests of README.md and docs/: every command is run, and every output compared.

Commands in ```sh need hosts or a scheduler; for these, and for commands in sentences, verbs and options are checked.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml

import topoplan
from tests.checks_page import checks_page
from tests.cost_model import CHAPTERS, modules_of
from tests.pages import CHECKS, PAGES, PICTURE, README, ROOT, block, blocks, picture, shown
from topoplan.cli.commands import command as command_of
from topoplan.cli.main import app
from topoplan.cli.verbs import VERBS
from topoplan.planner.account import memory_account, time_account

TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
SPEC = ROOT / "cluster_specs" / "h100-4x8.yaml"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Provide a directory that looks like a new clone to commands, with `topoplan` on the PATH."""
    shutil.copytree(ROOT / "cluster_specs", tmp_path / "cluster_specs")
    program = tmp_path / "bin" / "topoplan"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m topoplan "$@"\n')
    program.chmod(0o755)
    return tmp_path


def run(command: list[str], clone: Path) -> subprocess.CompletedProcess[str]:
    path = f"{clone / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def of_pages(language: str, having: str) -> list[object]:
    """Return the blocks of a language that contain a word, each with the name of its page."""
    found = [(name, text) for name, page in TEXTS.items() for text in blocks(page, language) if having in text]
    return [pytest.param(text, id=f"{name}-{number}") for number, (name, text) in enumerate(found)]


@pytest.mark.readme
@pytest.mark.parametrize(
    ("command", "text"),
    [pytest.param(*found, id=f"{name}-{found[0]}") for name, page in TEXTS.items() for found in shown(page)],
)
def test_output_is_what_the_program_prints(command: str, text: str) -> None:
    assert block(command) == text, "the output of an example has changed: run `make readme`"


@pytest.mark.readme
def test_the_picture_is_what_the_program_draws() -> None:
    assert picture() == PICTURE.read_text(encoding="utf-8"), "the picture has changed: run `make readme`"


def test_the_page_of_checks_says_what_the_rules_say() -> None:
    assert checks_page() == CHECKS.read_text(encoding="utf-8"), "a rule has changed: run `make readme`"


def test_marks_of_output_go_together() -> None:
    for name, text in TEXTS.items():
        assert text.count("<!-- output -->") == text.count("<!-- /output -->") == len(shown(text)), name


def test_commands_whose_output_is_shown_print_something() -> None:
    assert [command for text in TEXTS.values() for command, output in shown(text) if output.count("\n") <= 3] == []


@pytest.mark.readme
@pytest.mark.parametrize("script", of_pages("bash", "topoplan "))
def test_scripts_run(clone: Path, script: str) -> None:
    done = run(["bash", "-euo", "pipefail", "-c", script], clone)
    assert not {line for line in done.stderr.splitlines() if not line.startswith("Assumed: ")}


@pytest.mark.readme
@pytest.mark.parametrize("session", of_pages("console", "$ topoplan "))
def test_sessions_run(clone: Path, session: str) -> None:
    for command in re.findall(r"^\$ (topoplan .*)$", session, re.MULTILINE):
        run(["bash", "-c", command], clone)


@pytest.mark.readme
@pytest.mark.parametrize("code", of_pages("python", "import topoplan"))
def test_python_runs(clone: Path, code: str) -> None:
    assert run([sys.executable, "-c", code], clone).stdout.startswith("tp4-pp1-dp8-mbs1 ")


@pytest.mark.parametrize("text", of_pages("yaml", ":"))
def test_yaml_is_a_spec_or_a_part_of_one(tmp_path: Path, text: str) -> None:
    part = yaml.safe_load(text)
    whole = part if {"model", "job"} <= part.keys() else {**yaml.safe_load(SPEC.read_text()), **part}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(whole))
    assert topoplan.load_spec(path).cluster.nodes == 4


def commands(text: str) -> Iterator[list[str]]:
    """Yield all commands that begin with `topoplan`, split into words: in sentences, scripts, sessions and outputs."""
    scripts = "".join("".join(blocks(text, language)) for language in ("sh", "bash", "console"))
    lines = [*re.findall(r"`(topoplan [^`\n]*)`", text), *(command for command, _ in shown(text))]
    for line in [*lines, *(one.removeprefix("$ ") for one in scripts.splitlines())]:
        words = re.split(r"[|>#]", line)[0]
        if words.startswith("topoplan "):
            yield shlex.split(words)[1:]


@cache
def options() -> dict[str, set[str]]:
    """Return verb -> its options, with the program's own options under an empty name; former names are left out."""
    verbs = {name: command_of(verb) for verb in VERBS for name in (verb.name, verb.short) if name}
    every = {"": typer.main.get_command(app()), **verbs}
    return {
        name: {"-h", "--help", *(option for given in one.params for option in (*given.opts, *given.secondary_opts))}
        for name, one in every.items()
    }


@pytest.mark.parametrize("page", [page for page in TEXTS if page != "docs/verbs.md"])  # it lists former names too
def test_verbs_and_options_exist(page: str) -> None:
    for words in commands(TEXTS[page]):
        name = next(name for name in (" ".join(words[:2]), words[0], "") if name in options())
        assert name or words[0] in options()[""] | {"VERB"}, words
        assert {word for word in words if word.startswith("-") and word != "-"} <= options()[name], words
    # Findings mention options of other programs.
    own = "".join(line for line in TEXTS[page].splitlines() if not re.match(r"- \*\*(error|warning|note)\*\*", line))
    assert set(re.findall(r"`(--[a-z][a-z-]*)", own)) <= set().union(*options().values())


def test_keys_that_the_spec_page_names_are_in_the_schema() -> None:
    schema = json.loads((ROOT / "cluster_specs" / "spec.schema.json").read_text(encoding="utf-8"))
    known = set(re.findall(r'"(\w+)": \{', json.dumps(schema)))
    cells = re.findall(r"^\| (`[^|]*`) \|", TEXTS["docs/spec.md"], re.MULTILINE)
    named = {key for cell in cells for name in re.findall(r"`([\w.]+)`", cell) for key in name.split(".")}
    assert len(named) > 30
    assert named <= known


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page: str) -> None:
    here = PAGES[page].parent
    made = {ROOT / "docs" / "cost-model" / f"{room.replace('/', '-')}.md" for room in CHAPTERS}
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", TEXTS[page]):
        assert target.startswith("https://") or (here / target).exists() or here / target in made, target


def test_the_readme_is_a_page() -> None:
    assert len(README.read_text(encoding="utf-8")) <= 6000


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.findall(r"^make ([a-z ]+)|`make (?:[A-Z]+=\S+ )?([a-z ]+)`", "\n".join(TEXTS.values()), re.MULTILINE)
    named = {word for groups in found for group in groups for word in group.split()}
    assert {"test", "docs", "bench"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("layout", [{"tp": 4, "pp": 2}, {"backend": "fsdp2", "micro_batch_size": 1}], ids=str)
def test_the_formula_of_each_figure_is_in_the_chapters_of_the_cost_model(layout: dict[str, object]) -> None:
    spec = topoplan.load_spec(SPEC)
    plan = topoplan.predict(spec, layout=layout)
    memory, step = memory_account(spec, plan), time_account(spec, plan)
    terms = [term for tree in (memory.device, *memory.layers, memory.parameters, step.step) for term in tree.walk()]
    found = [re.match(r"(.+)/\w+\.py::(\w+)", term.source) for term in terms]
    named = {(here[1], here[2]) for here in found if here and here[1] in CHAPTERS}
    assert len(named) > 10
    assert named <= {
        (room, node.name) for room in CHAPTERS for module in modules_of(room) for node in module.definitions
    }
