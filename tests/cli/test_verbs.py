"""Verbs under all of their names, and their help."""

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.verbs_page import PAGE, verbs_page
from topoplan.cli.commands import command
from topoplan.cli.verbs import VERBS, Verb, below

ROOT = Path(__file__).parents[2]
FORMER = {verb.was: verb for verb in VERBS if verb.was}
SHORT = {verb.short: verb for verb in VERBS if verb.short}
EACH = pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_list_has_every_verb_whole_on_80_columns(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli(*arguments)
    lines = shown.out.splitlines()
    assert (shown.code, shown.err) == (0, "")
    assert max(map(len, lines)) <= 80
    assert [line[:-1] for line in lines if re.fullmatch(r"[A-Z]\w+:", line)] == [
        "Options",
        *("Plan", "Look", "Write", "Check", "Launch", "Learn", "About"),
    ]
    for verb in below(""):
        assert re.search(
            rf"^  {verb.name} +{re.escape(verb.summary)}\n      \$ topoplan {verb.example}$", shown.out, re.M
        )
    assert not any(re.match(rf"  {name}\b", line) for name in (*FORMER, *SHORT) for line in lines)


@EACH
def test_each_verb_explains_itself(cli: Cli, monkeypatch: pytest.MonkeyPatch, verb: Verb) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli(*verb.name.split(), "--help")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith(f"Usage: topoplan {verb.name} ")
    assert shown.out.count(verb.summary) == 1
    assert max(map(len, shown.out.splitlines())) <= 80
    children = [other.word for other in below(verb.name)]
    assert re.findall(r"^  ([\w-]+) .*\n      \$", shown.out, re.M) == children
    assert all(word in verb.summary for word in children)


@EACH
def test_examples_are_what_the_verb_takes(verb: Verb) -> None:
    words = shlex.split(verb.example)
    assert verb.example.startswith(verb.name)
    if verb.name != "show gpus":
        command(verb).make_context(verb.word, words[len(verb.name.split()) :])


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_goes_on_working_and_says_the_present_one(cli: Cli, name: str) -> None:
    present = FORMER[name].name
    arguments = {
        "profile": ["h100-sxm-80gb"],
        "table": [*shlex.split(FORMER["table"].example)[2:], "--context", "4096"],
    }
    arguments = arguments.get(name, [])
    old, new = cli(name, *arguments), cli(*present.split(), *arguments)
    assert (old.code, old.out) == (new.code, new.out) == (0, new.out)
    assert (old.err, new.err) == (f"topoplan: `topoplan {name}` is now `topoplan {present}`\n", "")
    if name != "schema":
        assert cli(name, *arguments, "--json") == cli(*present.split(), *arguments, "--json")


@pytest.mark.parametrize("name", SHORT)
def test_short_names_say_nothing(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert cli(name) == cli(*SHORT[name].name.split())
    assert cli(name).err.count("\n") == 1
    assert "there are no runs" in cli(name).err


def test_a_long_word_that_is_no_verb(cli: Cli) -> None:
    assert cli("x" * 300).is_refused("is not a command;")


def test_nothing_says_a_former_name() -> None:
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    texts += [path for folder in ("topoplan", "cluster_specs", "generated") for path in (ROOT / folder).rglob("*.*")]
    # Printed commands must not use short names either, which are not listed anywhere.
    former = re.compile(rf"topoplan ({'|'.join(FORMER)})(?![\w-])")
    short = re.compile(rf"topoplan ({'|'.join((*FORMER, *SHORT))})(?![\w-])")
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in texts
        if path.is_file() and path != PAGE and path.suffix not in (".pyc", ".svg")
        for name in (short if path.parts[len(ROOT.parts)] == "topoplan" else former).findall(path.read_text("utf-8"))
    ]
    assert found == []


def test_the_page_of_verbs_is_that_of_the_table() -> None:
    assert verbs_page() == PAGE.read_text(encoding="utf-8"), "a verb has changed: run `make readme`"
