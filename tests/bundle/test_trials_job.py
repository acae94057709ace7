"""The trial bundles of each trainer: a few steps, nothing saved, generated samples if needed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.samples import make_spec
from topoplan.bundle.bundle import files_of
from topoplan.bundle.plan_file import read_plan_file, written_again
from topoplan.bundle.trials_job import trial_draft
from topoplan.bundle.write import write_bundle
from topoplan.errors import SpecError
from topoplan.planner.predict import plan_under, predict
from topoplan.specs.lengths import Lengths
from topoplan.specs.load import load_spec
from topoplan.specs.spec import Spec

KEYS = {
    "--gpu": ("gpu", "h100"),
    "--nodes": ("nodes", "1"),
    "--model": ("model", "Qwen/Qwen2.5-VL-7B-Instruct"),
    "--seq-len": ("job.seq_len", "4096"),
    "--batch": ("job.global_batch_size", "32"),
    "--images": ("job.images_per_sequence", "1"),
}
WAYS = (
    ("llamafactory", "mca", {"tp": 2}, "max_steps", "dataset_dir='${bundle_dir//\\'/\\'\\'}/samples'"),
    ("llamafactory", "fsdp2", {}, "max_steps", "dataset_dir='${bundle_dir//\\'/\\'\\'}/samples'"),
    ("llamafactory", "deepspeed", {"zero_stage": 3}, "max_steps", "dataset_dir='${bundle_dir//\\'/\\'\\'}/samples'"),
    ("swift", "megatron", {"tp": 2}, "train_iters", '--dataset "$bundle_dir/samples/samples.jsonl#'),
    ("swift", "deepspeed", {"zero_stage": 3}, "max_steps", '--dataset "$bundle_dir/samples/samples.jsonl#'),
    ("trinity", "fsdp2", {}, "", 'export TOPOPLAN_SAMPLES="$bundle_dir/samples"'),
)


def draft_files(spec: Spec, trainer: str, backend: str, keys: dict[str, int], *, made_up: bool) -> dict[str, str]:
    spec = replace(spec, trainer=trainer)
    plan = plan_under(spec, predict(spec, {"backend": backend, "micro_batch_size": 1, **keys}), trainer)
    return files_of(trial_draft(spec, plan, 20, "saves/trials/x", made_up=made_up))


@pytest.mark.parametrize(("trainer", "backend", "keys", "length", "said"), WAYS, ids=lambda one: str(one)[:12])
def test_a_trial_saves_nothing_and_finds_its_samples(
    trainer: str, backend: str, keys: dict[str, int], length: str, said: str, tmp_path: Path
) -> None:
    files = draft_files(make_spec(), trainer, backend, keys, made_up=True)
    values = yaml.safe_load(files["train.yaml"])
    assert said in files["node-00.sh"]
    assert "SET_ME" not in files["node-00.sh"].replace("SET_ME\\b", "")
    if length:
        assert (values[length], values["output_dir"], values["logging_steps"]) == (40, "saves/trials/x", 1)
        assert values["save_steps"] == 1_000_000
        assert not any(key.startswith(("eval_", "val_")) and value for key, value in values.items())
    else:
        assert (values["trainer"]["save_interval"], values["checkpoint_root_dir"]) == (1_000_000, "saves/trials/x")
    samples = [json.loads(line) for line in files["samples/samples.jsonl"].splitlines()]
    assert len(samples) == len(set(files["samples/samples.jsonl"].splitlines())) >= 2
    text = samples[0]["messages"][-1]["content"]
    assert len(text.split()) == pytest.approx(make_spec().job.seq_len, rel=0.02)
    write_bundle(files, tmp_path / "bundle")
    assert written_again(read_plan_file(tmp_path / "bundle")) == files


def test_the_users_own_data_are_taken_as_far_as_they_are_needed() -> None:
    spec = make_spec()
    keys = {"val_size": 0.1, "eval_steps": 50, "learning_rate": 1e-5}
    own = replace(spec, job=replace(spec.job, dataset="mine", trainer=keys))
    files = draft_files(own, "llamafactory", "mca", {"tp": 2}, made_up=False)
    values = yaml.safe_load(files["train.yaml"])
    assert (values["dataset"], values["learning_rate"], "val_size" in values) == ("mine", 1e-5, False)
    assert values["max_samples"] == 64 * spec.job.global_batch_size
    assert "samples/samples.jsonl" not in files


def test_samples_are_as_long_as_those_of_the_job() -> None:
    spec = make_spec()
    lengths = Lengths(counts=((100, 1), (200, 1), (400, 1), (3000, 1)), samples=4, source="a test")
    files = draft_files(
        replace(spec, job=replace(spec.job, lengths=lengths)), "llamafactory", "mca", {"tp": 2}, made_up=True
    )
    lines = files["samples/samples.jsonl"].splitlines()
    words = [len(json.loads(line)["messages"][1]["content"].split()) for line in lines]
    assert sum(words) / len(words) == pytest.approx(lengths.mean, rel=0.05)
    assert max(words) > 2000 > 150 > min(words)


def test_images_are_not_made_up() -> None:
    spec = load_spec(None, keys=KEYS)
    with pytest.raises(SpecError, match="samples with images are not made up"):
        draft_files(spec, "llamafactory", "mca", {"tp": 2}, made_up=True)
