"""A new trainer, added as docs/extending.md describes: a folder (`tests/trainers/kite`) and a line."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Cli, cli
from tests.trainers.kite.trainer import KITE
from topoplan.bundle.plan_file import read_plan_file
from topoplan.run.progress import Progress
from topoplan.trainers import registry

__all__ = ["cli"]

SPEC = """\
name: one-box
nodes: 1
gpus_per_node: 8
nvlink_bandwidth: 900GB/s
gpu: h100-sxm-80gb
model: Qwen/Qwen3-1.7B
job: {seq_len: 2048, global_batch_size: 64, samples: 1000, epochs: 2, dataset: org/chats}
"""


@pytest.fixture(autouse=True)
def new_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the trainer to the registry."""
    monkeypatch.setattr(registry, "TRAINERS", (*registry.TRAINERS, KITE))


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    file = tmp_path / "cluster.yaml"
    file.write_text(SPEC)
    return file


def answer(cli: Cli, *words: object) -> dict[str, Any]:
    result = cli(*words, "--json")
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def test_it_is_searched_for_what_it_has(cli: Cli, spec: Path) -> None:
    found = answer(cli, "rank", spec, "--trainer", "kite", "--rejected")
    assert {plan["layout"]["backend"] for plan in found["plans"]} == {"ddp", "fsdp2"}
    assert {plan["trainer"] for plan in found["plans"]} == {"kite"}
    # 2,000 samples are 31 full batches; LLaMA-Factory's DDP would take 32 steps.
    assert {plan["job_time"]["steps"] for plan in found["plans"]} == {31}
    reasons = {out["reason"] for out in found["rejected"]}
    assert "Kite: ulysses 2: Kite splits no sequences" in reasons
    best = found["plans"][0]
    assert answer(cli, "explain", spec, "--trainer", "kite")["plan"]["id"] == best["id"]


def test_others_are_weighed_against_it_and_it_is_no_default(cli: Cli, spec: Path) -> None:
    found = answer(cli, "rank", spec, "--backend", "ddp,fsdp2")
    assert "kite" not in {plan["trainer"] for plan in found["plans"]}
    mine = cli("rank", spec, "--trainer", "kite").out
    assert "kite" in mine
    assert "(Kite): " in mine  # the trainer's other backend, under `against plan 1`


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "stage=pt"), "Kite: stage pt: Kite has supervised fine-tuning alone"),
        (("--backend", "mca"), "'mca' is not a backend of kite; expected all, or some of ddp, fsdp2"),
        (("--pin", "ulysses=2"), "Kite: ulysses 2: Kite splits no sequences; pin ulysses=1"),
    ],
)
def test_what_it_refuses_is_said_by_every_verb(cli: Cli, spec: Path, options: tuple[str, ...], message: str) -> None:
    for verb in ("rank", "explain", "generate"):
        result = cli(verb, spec, "--trainer", "kite", *options)
        assert result.code == 2
        assert message in result.err


def test_its_bundle_starts_it_is_checked_and_is_read_back(cli: Cli, spec: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    assert cli("generate", spec, "--trainer", "kite", "-o", bundle).code == 0
    keys = yaml.safe_load((bundle / "train.yaml").read_text())
    assert (keys["kite_model"], keys["kite_tokens"]) == ("Qwen/Qwen3-1.7B", 2048)
    assert '-m kite.fly "$bundle_dir/train.yaml"' in (bundle / "node-00.sh").read_text()
    assert "A training run of Kite" in (bundle / "README.md").read_text()
    plan = json.loads((bundle / "plan.json").read_text())
    assert (plan["trainer"], plan["trainer_versions"]) == ("kite", {"kite-trainer": "2"})
    again = tmp_path / "again"
    assert cli("generate", "--from", bundle, "-o", again).code == 0
    assert {file.name: file.read_text() for file in again.iterdir()} == {
        file.name: file.read_text() for file in bundle.iterdir()
    }


def test_its_files_are_checked_and_predicted(cli: Cli, spec: Path, tmp_path: Path) -> None:
    bundle, file = tmp_path / "bundle", tmp_path / "bundle" / "train.yaml"
    assert cli("generate", spec, "--trainer", "kite", "-o", bundle).code == 0
    planned = json.loads((bundle / "plan.json").read_text())["layout"]
    checked = answer(cli, "check", bundle, "--cluster", spec)
    (prediction,) = checked["predictions"]
    assert (prediction["trainer"], prediction["plan"]["layout"]) == ("kite", planned)
    assert checked["findings"] == []  # no layout that Kite can train is faster

    file.write_text(file.read_text() + "kite_hum: 9\n")
    found = cli("check", file)
    assert found.code == 1
    assert "kite_hum 9 is louder than Kite hums" in found.out
    file.write_text(file.read_text().replace("kite_hum: 9", "kite_stage: dpo"))
    found = cli("check", file, "--cluster", spec)
    assert found.code == 1
    assert "stage dpo: Kite has supervised fine-tuning alone" in found.out


def test_its_log_is_read(cli: Cli, spec: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    assert cli("generate", spec, "--trainer", "kite", "-o", bundle).code == 0
    recorded = read_plan_file(bundle)
    line = "[default0]:gust 7 of 31: {'kite_loss': 1.5}"
    for progress in (Progress.of(recorded.spec, recorded.plan), Progress()):
        status = progress.feed(0, line, 1.0)
        assert (status.step, status.total_steps, status.loss) == (7, 31, 1.5)
    assert Progress.of(recorded.spec, recorded.plan).status().total_steps == 31
