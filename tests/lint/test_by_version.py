"""Files are judged by the version they are for; version-dependent findings are notes if the version is unknown."""

from pathlib import Path

import pytest

from topoplan.lint.check import check
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.specs.load import load_cluster

TRAIN = """\
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: full
dataset: a
template: qwen3
bf16: true
save_safetensors: true
kt_cpu_activation: retain
deepspeed: ds_z3_config.json
"""
REMOVED, NEW, RENAMED = "llamafactory-removed-key", "llamafactory-new-key", "swift-renamed-argument"
OLD_SWIFT = "swift sft --model Qwen/Qwen3-8B --train_type full --dataset a --deepspeed zero3\n"


@pytest.mark.parametrize(
    ("name", "lock", "expected"),
    [
        ("", "", {REMOVED: "note", NEW: "note"}),
        ("requirements.txt", "transformers==5.0.0\nllamafactory[metrics]==0.9.5\n", {REMOVED: "error", NEW: "error"}),
        ("requirements.txt", "transformers == 4.57.1\nllamafactory==0.9.6.dev0", {}),
        ("uv.lock", '[[package]]\nname = "transformers"\nversion = "5.2.0"\n', {REMOVED: "error", NEW: "note"}),
        ("pylock.toml", '[[packages]]\nname = "LLaMA_Factory"\nversion = "0.9.5"\n', {REMOVED: "note", NEW: "note"}),
        ("environment.yml", "dependencies:\n- pip:\n  - transformers==4.57.1\n", {NEW: "note"}),
        ("uv.lock", "[[package\n", {REMOVED: "note", NEW: "note"}),
    ],
)
def test_a_lock_file_beside_a_file_says_the_version(tmp_path: Path, name: str, lock: str, expected: object) -> None:
    (tmp_path / "train.yaml").write_text(TRAIN)
    if name:
        (tmp_path / name).write_text(lock)
    found = check([str(tmp_path / "train.yaml")]).findings
    assert {one.rule: one.severity for one in found if one.rule in (REMOVED, NEW)} == expected


@pytest.mark.parametrize(
    ("install", "severity"),
    [
        ("", "note"),
        ("pip install 'ms-swift==4.5.2' -U\n", "error"),
        ("uv pip install ms_swift==3.9.3\n", None),
        ("python -m pip install ms-swift[all]==3.8.0\n", None),
        ("echo ms-swift==4.5.2\n", "note"),
    ],
)
def test_what_a_script_installs_says_the_version(tmp_path: Path, install: str, severity: str | None) -> None:
    (tmp_path / "run.sh").write_text(install + OLD_SWIFT)
    found = {one.rule: one.severity for one in check([str(tmp_path / "run.sh")]).findings}
    assert found.get(RENAMED) == severity


def test_the_spec_has_the_last_word(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("pip install ms-swift==3.9.3\n" + OLD_SWIFT)
    against = PredictionTarget(
        cluster=load_cluster("cluster_specs/a100-1x8.yaml", overrides=["software={ms-swift: 4.6.0}"])
    )
    assert {one.rule: one.severity for one in check([str(script)], against).findings}[RENAMED] == "error"


def test_a_lock_file_may_be_given_itself(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    lock, script = tmp_path / "locks" / "requirements.txt", tmp_path / "run.sh"
    lock.write_text("ms-swift==4.6.0\n")
    script.write_text(OLD_SWIFT)
    found = {one.rule: one.severity for one in check([str(script), str(lock)]).findings}
    assert found[RENAMED] == "error"
