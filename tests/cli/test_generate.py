import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Cli


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, fake_search: list[Any], tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def written_plan(directory: str | Path = "generated/test-2x8") -> str:
    return str(json.loads((Path(directory) / "plan.json").read_text())["id"])


def test_the_first_plan_goes_to_a_directory_named_after_the_cluster(cli: Cli, spec_file: Path) -> None:
    result = cli("generate", spec_file)
    assert result.code == 0
    assert written_plan() == "tp2-pp1-dp16-mbs1"
    assert "bash generated/test-2x8/node-00.sh" in result.out
    assert max(map(len, result.out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("plan", "plan_id"),
    [
        ("2", "tp4-pp1-dp8-mbs1"),
        ("tp4-pp1-dp8-mbs1", "tp4-pp1-dp8-mbs1"),
        ("tp4 pp1 dp8 mbs1", "tp4-pp1-dp8-mbs1"),
        ("tp2 pp2 vpp3 dp8 mbs1 sel:core_attn", "tp2-pp2-vpp3-dp8-mbs1-sel-core_attn"),
    ],
)
def test_a_plan_is_chosen_by_rank_or_id(cli: Cli, spec_file: Path, plan: str, plan_id: str) -> None:
    assert cli("generate", spec_file, "--plan", plan, "-o", "out").code == 0
    assert written_plan("out") == plan_id


def test_an_id_outside_the_ranking_is_predicted(cli: Cli, spec_file: Path, fake_predict: list[Any]) -> None:
    assert cli("generate", spec_file, "--plan", "tp8-pp2-dp2-mbs1").code == 0
    assert written_plan() == "tp8-pp2-dp2-mbs1"
    assert fake_predict[0]["sequence_parallel"] is None  # the default, whatever the pins say


@pytest.mark.parametrize(
    ("plan", "code", "message"),
    [
        ("0", 2, "there is no plan 0; expected 1 to 5"),
        ("6", 2, "there is no plan 6; expected 1 to 5"),
        ("first", 2, "'first' is not a plan"),
        ("tp16-pp1-dp2-mbs1", 2, "tp 16 > 8"),
        ("tp8-pp2-dp3-mbs1", 2, "is not the id of a layout of this job; it is tp8-pp2-dp2-mbs1"),
        ("tp1-pp16-dp2-mbs1", 1, "does not fit: 99.0 GiB"),
    ],
)
def test_a_plan_that_cannot_be_taken_writes_nothing(
    cli: Cli, spec_file: Path, fake_predict: list[Any], plan: str, code: int, message: str
) -> None:
    result = cli("generate", spec_file, "--plan", plan)
    assert result.code == code
    assert message in result.err
    assert not Path("generated").exists()


def test_an_edited_bundle_is_kept_unless_forced(cli: Cli, spec_file: Path) -> None:
    cli("generate", spec_file, "-o", "out")
    Path("out/train.yaml").write_text("edited\n")
    result = cli("generate", spec_file, "-o", "out")
    assert result.code == 2
    assert "--force" in result.err
    assert Path("out/train.yaml").read_text() == "edited\n"
    assert cli("generate", spec_file, "-o", "out", "--force").code == 0


def test_json_names_plan_and_files(cli: Cli, spec_file: Path) -> None:
    view = json.loads(cli("generate", spec_file, "--json").out)
    assert view["schema"] == "topoplan.generate/1"
    assert "generated/test-2x8/train.yaml" in view["files"]
    assert all(Path(file).is_file() for file in view["files"])


@pytest.mark.parametrize(
    ("options", "scheduler"),
    [
        ([], None),
        (["--scheduler", "slurm"], "slurm"),
        (["--scheduler", "none"], None),
        (["--set", "slurm.partition=gpu"], "slurm"),
        (["--set", "slurm={time: 24:00:00}", "--scheduler", "none"], None),
    ],
)
def test_the_scheduler_is_the_options_or_else_the_specs(
    cli: Cli, spec_file: Path, options: list[str], scheduler: str | None
) -> None:
    result = cli("generate", spec_file, "-o", "out", *options)
    assert result.code == 0
    assert json.loads(Path("out/plan.json").read_text()).get("scheduler") == scheduler
    assert ("sbatch out/job.sbatch" in result.out) == (scheduler == "slurm")
    assert ("bash out/node-00.sh" in result.out) == (scheduler is None)


def test_the_trainer_of_the_option_is_asked_for(cli: Cli, spec_file: Path) -> None:
    for options, trainer in (([], None), (["--trainer", "swift"], "swift")):
        assert cli("generate", spec_file, "-o", "out", "--force", *options).code == 0
        assert json.loads(Path("out/plan.json").read_text()).get("trainer") == trainer


RUN = """\
NPROC_PER_NODE=8 swift sft --model Qwen/Qwen3-8B --tuner_type full --dataset a --max_length 4096 --deepspeed zero3 \\
  --max_grad_norm 0.5 --lr_scheduler_type constant_with_warmup --warmup_ratio 0.2 --neftune_noise_alpha 5
"""
TRAIN = """\
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: full
dataset: a
template: qwen3
cutoff_len: 4096
bf16: true
"""


@pytest.mark.parametrize(
    ("plan", "written", "left_out"),
    [
        (
            "zero3-dp8-mbs1-full",
            {"max_grad_norm": 0.5, "lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.2}
            | {"neftune_noise_alpha": 5},
            None,
        ),
        (
            "tp8-pp1-dp1-mbs1",
            {"clip_grad": 0.5, "lr_decay_style": "constant", "lr_warmup_fraction": 0.2},
            "neftune_noise_alpha",
        ),
    ],
)
def test_a_job_of_a_trainers_file_is_trained_by_it_with_what_the_file_says(
    cli: Cli, plan: str, written: dict[str, Any], left_out: str | None
) -> None:
    Path("run.sh").write_text(RUN)
    job = ["--gpu", "h100", "--nodes", 1, "--job", "run.sh", "-o", "out", "--plan", plan]
    result = cli("generate", *job, "--backend", "all", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["trainer"] == "swift"
    values = yaml.safe_load(Path("out/train.yaml").read_text())
    assert {key: values.get(key) for key in written} == written
    notes = [f"left out of run.sh: {left_out}"] if left_out else []
    assert json.loads(result.out)["notes"] == notes
    shown = cli("generate", *job, "--backend", "all", "--force")
    assert [f"Warning: {note}" in shown.out for note in notes] == [True] * len(notes)
    assert bool(notes) or "Warning: left out" not in shown.out


DEFAULTS = {"save_steps": 500, "logging_steps": 500, "dataloader_num_workers": 0, "ddp_timeout": 1800}
"""Defaults of both trainers, where bundles have other values."""


@pytest.mark.parametrize(
    ("file", "text", "plan", "kept"),
    [
        ("train.yaml", TRAIN, "zero3-dp8-mbs1-full", {"save_total_limit": None}),
        ("train.yaml", TRAIN, "tp8-pp1-dp1-mbs1", {"save_total_limit": None}),
        ("run.sh", RUN.rstrip(), "zero3-dp8-mbs1-full", {"dataset_num_proc": 1}),
        ("run.sh", RUN.rstrip(), "tp8-pp1-dp1-mbs1", {"dataset_num_proc": 1}),
    ],
)
def test_what_a_file_states_is_kept_though_the_trainer_would_do_it_anyway(
    cli: Cli, file: str, text: str, plan: str, kept: dict[str, Any]
) -> None:
    stated, form = DEFAULTS | kept, "{}: {}\n" if file.endswith(".yaml") else " --{} {}"
    said = (form.format(key, "null" if value is None else value) for key, value in stated.items())
    Path(file).write_text(text + "".join(said))
    job = ["--gpu", "h100", "--nodes", 1, "--job", file, "-o", "out", "--plan", plan]
    result = cli("generate", *job, "--backend", "all")
    assert result.code == 0, result.err
    values = yaml.safe_load(Path("out/train.yaml").read_text())
    assert {key: values.get(key, "nothing") for key in stated} == stated


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--trainer", "'lamafactory' is not a trainer; expected llamafactory, swift or trinity"),
        ("--scheduler", "'pbs' is not a scheduler; expected slurm or none"),
    ],
)
def test_what_is_not_known_is_refused_before_the_search(
    cli: Cli, spec_file: Path, fake_search: list[Any], option: str, words: str
) -> None:
    assert cli("generate", spec_file, option, words.split("'")[1]).is_refused(f"{option}: {words}")
    assert fake_search == []


@pytest.fixture
def bundle(cli: Cli, spec_file: Path) -> Path:
    """Write the bundle of a plan that is predicted without a search."""
    assert cli("generate", spec_file, "--plan", "tp4-pp2-dp4-mbs1", "-o", "first").code == 0
    return Path("first")


def content(directory: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def test_nothing_is_worked_out_twice(
    cli: Cli, spec_file: Path, fake_search: list[Any], worked_out: Counter[str]
) -> None:
    assert cli("generate", spec_file, "-o", "first").code == 0
    assert (len(fake_search), worked_out) == (1, {"files": 1})
    worked_out.clear()
    assert cli("generate", "--from", "first", "-o", "second").code == 0
    assert worked_out == {"plan": 1, "files": 1}


@pytest.mark.parametrize("file", ["", "plan.json"])
def test_a_bundle_is_written_again_from_its_plan(cli: Cli, bundle: Path, fake_search: list[Any], file: str) -> None:
    fake_search.clear()
    result = cli("generate", "--from", bundle / file, "-o", "second")
    assert result.code == 0
    assert result.err == ""
    assert "Plan tp4-pp2-dp4-mbs1" in result.out
    assert content("second") == content(bundle)
    assert not fake_search
    before = content(bundle)
    (bundle / "node-01.sh").unlink()
    assert cli("generate", "--from", bundle / file).code == 0
    assert content(bundle) == before
    assert not Path("generated").exists()


def test_a_plan_under_another_name_is_of_no_bundle(cli: Cli, bundle: Path) -> None:
    Path("kept.json").write_bytes((bundle / "plan.json").read_bytes())
    assert cli("generate", "--from", "kept.json").code == 0
    assert content("generated/test-2x8") == content(bundle)


@pytest.mark.parametrize("where", [["-o", "."], []])
def test_a_bundle_is_put_right_in_its_place_when_forced(
    cli: Cli, bundle: Path, where: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundle)
    before = content(".")
    Path("train.yaml").write_text("edited\n")
    result = cli("generate", "--from", "plan.json", *where)
    assert result.code == 2
    assert "--force" in result.err
    assert Path("train.yaml").read_text() == "edited\n"
    assert cli("generate", "--from", "plan.json", *where, "--force").code == 0
    assert content(".") == before


def test_json_has_the_notes_on_a_plan_of_another_version(cli: Cli, bundle: Path) -> None:
    assert json.loads(cli("generate", "--from", bundle, "-o", "second", "--json").out)["notes"] == []
    text = (bundle / "plan.json").read_text()
    Path("old.json").write_text(text.replace('"version": "', '"version": "0.0.', 1))
    view = json.loads(cli("generate", "--from", "old.json", "-o", "second", "--json").out)
    assert view["schema"] == "topoplan.generate/1"
    assert view["notes"][0].startswith("the plan is from topoplan 0.0.")
    assert view["plan"]["id"] == "tp4-pp2-dp4-mbs1"
    assert "Warning: the plan is from topoplan 0.0." in cli("generate", "--from", "old.json", "-o", "second").out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["spec.yaml"], "--from has cluster, model, job and layout in its file; leave SPEC and the other options out"),
        (["--plan", "2"], "--from has cluster, model, job and layout"),
        (["--set", "seq_len=1"], "--from has"),
        (["--profile", "own.yaml"], "--from has"),
    ],
)
def test_a_plan_has_everything_in_it(cli: Cli, bundle: Path, options: list[str], message: str) -> None:
    result = cli("generate", "--from", bundle, *options)
    assert result.code == 2
    assert result.err.startswith(f"topoplan: {message}")
    assert result.err.count("\n") == 1
    assert not Path("generated").exists()


def test_a_plan_is_written_for_another_scheduler_when_asked(cli: Cli, bundle: Path) -> None:
    assert "sbatch" in cli("generate", "--from", bundle, "--scheduler", "slurm", "-o", "queued").out
    assert Path("queued/job.sbatch").exists()
    assert cli("generate", "--from", "queued", "--scheduler", "none", "-o", "plain").code == 0
    assert content("plain") == content(bundle)
    assert cli("generate", "--from", "queued", "--scheduler", "none").code == 0
    assert content("queued") == content(bundle)


def test_a_plan_that_cannot_be_read_writes_nothing(cli: Cli, bundle: Path) -> None:
    (bundle / "plan.json").write_text((bundle / "plan.json").read_text().replace('"tp": 4', '"tp": 3'))
    result = cli("generate", "--from", bundle)
    assert result.code == 2
    assert result.err.startswith("topoplan: first/plan.json:")
    assert result.err.count("\n") == 1
    assert not Path("generated").exists()
