"""Verbs that write a file replace their own, replace others only with --force, and never leave half a file."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.conftest import Cli
from tests.cli.test_validate import row as measured_run

PLAN = ("--plan", "tp2-pp2-dp8-mbs1")
WRITTEN = [
    (("topology", "cluster.yaml"), "fabric.svg"),
    (("timeline", "cluster.yaml", *PLAN), "step.svg"),
    (("timeline", "cluster.yaml", *PLAN), "step.json"),
    (("validate", "runs.jsonl"), "accuracy.md"),
]


@pytest.mark.parametrize(("asked", "name"), WRITTEN)
def test_a_file_is_written_and_replaces_only_ones_own(
    cli: Cli, spec_file: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...], name: str
) -> None:
    monkeypatch.chdir(spec_file.parent)
    spec_file.with_name("runs.jsonl").write_text(measured_run() + "\n")
    target = spec_file.with_name(name)
    before = {path.name for path in spec_file.parent.iterdir()}
    written = []
    for _ in range(2):
        result = cli(*asked, "-o", target)
        assert (result.code, result.out) == (0, f"Wrote {target}\n")
        written.append(target.read_text())
    assert written[0] == written[1]
    {"svg": ElementTree.fromstring, "json": json.loads, "md": str}[target.suffix[1:]](written[0])
    target.write_text("mine")
    assert cli(*asked, "-o", target).is_refused(f"was not written by `topoplan {asked[0]}`")
    assert target.read_text() == "mine"
    if asked[0] == "timeline":
        assert cli(*asked, "-o", target, "--force").code == 0
        assert target.read_text() == written[0]
    assert cli(*asked, "-o", f"absent/{name}").is_refused("absent: no such directory")
    assert {path.name for path in spec_file.parent.iterdir()} == before | {name}
