"""Faults that stop real trainers, injected into sound files: found at their line, with no findings on sound files."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.tables import table
from topoplan.errors import InputError
from topoplan.lint.check import check
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.planner.search import rank
from topoplan.report.check import checked_to_dict
from topoplan.specs.load import load_cluster

Found = dict[str, Any]  # a finding in its JSON form

SETS = Path(__file__).parents[1] / "data" / "faults"
CLUSTERS = Path(__file__).parents[2] / "cluster_specs"
FAULTS: list[dict[str, Any]] = [fault for path in sorted(SETS.glob("*.yaml")) for fault in table(path)]
CLEAN = sorted(path.name for path in SETS.iterdir() if path.is_dir())

MISSED: set[str] = set()  # faults that are not found yet
FALSE: set[str] = set()  # sound, and found fault with
# What is true of a sound set of files with versions that it does not name.
TRUE_WARNINGS = {"fault-checkpoint-plan"}


def findings(folder: Path, cluster: list[str] | None = None) -> list[Found]:
    """Return the findings on the files of `folder`, excluding its data, with `folder` as the working directory."""
    against = PredictionTarget(model=None, seq_len=2048)
    if cluster:
        spec = load_cluster(str(CLUSTERS / cluster[0]), overrides=cluster[1:])
        against = PredictionTarget(cluster=spec, model=None, seq_len=2048, search=rank)
    is_bundle = (folder / "plan.json").exists()
    files = ["."] if is_bundle else sorted(path.name for path in folder.iterdir() if path.is_file())
    try:
        return checked_to_dict(check(files, against))["findings"]
    except InputError as error:  # an error that ends `check` counts as a finding too
        file, line, *_ = f"{error.where or ''}::".split(":")
        return [
            {
                "severity": "error",
                "file": file,
                "line": int(line) if line else None,
                "what": str(error),
                "why": "",
                "rule": "bad-input",
            }
        ]


def planted(fault: dict[str, Any], folder: Path) -> None:
    shutil.copytree(SETS / fault["in"], folder, dirs_exist_ok=True)
    for name, (old, new) in fault["edit"].items():
        path = folder / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        assert text.count(old) == 1 or not (text or old), f"{name}: {old!r}"
        path.write_text(text.replace(old, new) if text else new, encoding="utf-8")


def names(found: Found, fault: dict[str, Any], folder: Path) -> bool:
    """Whether a finding matches the fault in severity, file, line and words."""
    files = fault.get("file") or next(iter(fault["edit"]))
    at = [fault["at"]] if isinstance(fault["at"], str) else fault["at"]
    if found["severity"] not in fault["level"] or (
        found["file"] not in files if isinstance(files, list) else found["file"] != files
    ):
        return False
    lines = (folder / found["file"]).read_text(encoding="utf-8").splitlines()
    line = "" if found["line"] is None else lines[found["line"] - 1]
    words = f"{found['what']} {found['why'] or ''}"
    return (not at or any(text in line for text in at)) and bool(re.search(fault["says"], words, re.IGNORECASE))


def shown(found: list[Found]) -> str:
    return "\n".join(
        f"{one['file']}:{one['line']} {one['severity']} {one['rule']}: {one['what']} | {one['why']}" for one in found
    )


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(one, id=one["name"], marks=[pytest.mark.xfail(strict=True)] * (one["name"] in MISSED))
        for one in FAULTS
    ],
)
def test_fault_is_found(fault: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(fault, tmp_path)
    monkeypatch.chdir(tmp_path)
    found = findings(tmp_path, fault.get("cluster"))
    assert any(names(one, fault, tmp_path) for one in found), f"{fault['fails']}\n{shown(found)}"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.xfail(strict=True)] * (name in FALSE)) for name in CLEAN],
)
def test_no_fault_is_found_in_sound_files(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SETS / name)
    false = [one for one in findings(SETS / name) if one["severity"] != "note" and one["rule"] not in TRUE_WARNINGS]
    assert not false, shown(false)
