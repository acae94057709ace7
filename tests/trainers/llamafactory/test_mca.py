from dataclasses import replace
from typing import Any

import yaml

from tests.bundle.samples import (
    QWEN3_8B,
    make_spec_and_layout,
    make_spec_and_plan,
)
from topoplan.trainers.llamafactory.mca import trainer_file
from topoplan.trainers.models import model_directory
from topoplan.trainers.steps import megatron_steps


def written(**what: Any) -> dict[str, Any]:
    """Return train.yaml as a YAML parser reads it."""
    trainer = trainer_file(*make_spec_and_layout(**what))
    read: dict[str, Any] = yaml.safe_load(trainer.text)
    assert read == dict(trainer.values)
    return read


def test_every_comment_is_a_comment_to_any_reader() -> None:
    text = trainer_file(*make_spec_and_layout()).text
    assert yaml.safe_load("\n".join(line.split("  # ")[0] for line in text.splitlines())) == yaml.safe_load(text)
    assert max(len(line) for line in text.splitlines()) <= 120


def test_the_output_directory_is_of_this_plan_and_these_settings_only() -> None:
    directories = {
        written(**what)["output_dir"]
        for what in ({}, {"tp": 2}, {"job": {"learning_rate": 1e-5}}, {"job": {"seq_len": 8192}}, {"model": QWEN3_8B})
    }
    assert len(directories) == 5
    assert written()["output_dir"] == written()["output_dir"]
    assert all(directory.startswith("saves/") for directory in directories)


def test_a_hub_id_becomes_a_directory_and_a_given_directory_stays() -> None:
    assert model_directory(QWEN3_8B) == "models/Qwen/Qwen3-8B"
    assert model_directory(replace(QWEN3_8B, config_path="/data/qwen")) == "/data/qwen"
    assert model_directory(replace(QWEN3_8B, config_path="/data/qwen/config.json")) == "/data/qwen"
    assert model_directory(replace(QWEN3_8B, config_path="config.json")) == "."


def test_steps_are_counted_as_the_trainer_does() -> None:
    spec, _ = make_spec_and_plan(job={"samples": 1000, "epochs": 2.5})
    assert megatron_steps(spec.job) == 38  # ceil(floor(1000 / 64) * 2.5)
    assert megatron_steps(spec.job, max_steps=7) == 7
    assert megatron_steps(spec.job, max_steps=-1) == 38
    assert megatron_steps(replace(spec.job, samples=None)) is None
