"""What the train.yaml of both commands has in common."""

from dataclasses import replace
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, JOB, QWEN3_8B, QWEN3_VL_8B, make_spec_and_plan
from topoplan.specs.cluster import Cluster
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers.swift.arguments import arguments_of
from topoplan.trainers.swift.common import data_section, freeze_entries, model_entries, output_section, swift_head
from topoplan.trainers.yaml_text import Section


def values_of(section: Section) -> dict[str, Any]:
    return {entry.key: entry.value for entry in section.entries}


def comment_of(section: Section, key: str) -> str:
    return next(entry.comment for entry in section.entries if entry.key == key)


def make_spec(model: Model = QWEN3_8B, cluster: Cluster = CLUSTER, **job: Any) -> Spec:
    return Spec(cluster=cluster, model=model, job=replace(JOB, **job))


def test_the_head_names_the_plan_the_command_and_the_versions() -> None:
    spec, plan = make_spec_and_plan(model=QWEN3_8B)
    first, second, _ = swift_head(spec, plan, "megatron pt")
    assert first == f"Qwen/Qwen3-8B on h100-4x8: plan {plan.id}"
    assert second == "For `megatron pt` of ms-swift 4.5.2 to 4.6.0."


def test_the_model_is_a_directory_that_no_hub_is_asked_about() -> None:
    values = {entry.key: entry.value for entry in model_entries(make_spec())}
    assert values == {"model": "models/Qwen/Qwen3-8B", "check_model": False}
    own = make_spec(replace(QWEN3_8B, config_path="/m/config.json"))
    assert model_entries(own)[0].value == "/m"


def test_parts_are_frozen_where_there_are_parts() -> None:
    job = {"freeze_vision_tower": False, "freeze_multi_modal_projector": True, "freeze_language_model": False}
    values = {entry.key: entry.value for entry in freeze_entries(make_spec(QWEN3_VL_8B, **job))}
    assert values == {"freeze_vit": False, "freeze_aligner": True, "freeze_llm": False}
    assert freeze_entries(make_spec()) == []


def test_samples_are_cut_to_the_length_that_was_planned_and_those_with_images_dropped() -> None:
    section = data_section(make_spec(dataset="a.jsonl"), unpacked="padded")
    values = values_of(section)
    assert (values["dataset"], values["max_length"]) == ("a.jsonl", 4096)
    assert (values["truncation_strategy"], "max_pixels" in values) == ("right", False)
    assert comment_of(section, "dataset") == ""
    values = values_of(data_section(make_spec(QWEN3_VL_8B, image_max_pixels=500), unpacked="padded"))
    assert (values["truncation_strategy"], values["max_pixels"]) == ("delete", 500)


def test_a_missing_data_set_is_marked() -> None:
    section = data_section(make_spec(dataset=None), unpacked="padded")
    assert values_of(section)["dataset"] == "SET_ME"
    assert "the spec has none" in comment_of(section, "dataset")


def test_what_becomes_of_short_samples_stands_beside_packing() -> None:
    for packing, words in ((True, "samples share sequences"), (False, "padded to the longest")):
        section = data_section(make_spec(packing=packing), unpacked="padded to the longest")
        assert values_of(section)["packing"] is packing
        assert words in comment_of(section, "packing")


@pytest.mark.parametrize(
    ("cores", "workers", "loaders"), [(None, 16, 4), (192, 16, 4), (12, 12, 1), (2, 2, 1), (48, 16, 3)]
)
def test_processes_that_read_samples_fit_the_cores(cores: int | None, workers: int, loaders: int) -> None:
    section = data_section(make_spec(cluster=replace(CLUSTER, cpu_cores=cores)), unpacked="")
    values = values_of(section)
    assert (values["dataset_num_proc"], values["dataloader_num_workers"]) == (workers, loaders)


@pytest.mark.parametrize(("steps", "every"), [(None, 200), (4689, 938), (3, 1)])
def test_a_run_is_saved_five_times_and_the_directory_is_the_one_of_the_plan(steps: int | None, every: int) -> None:
    values = values_of(output_section(steps))
    assert values["save_steps"] == every
    assert values["add_version"] is False
    assert values["logging_steps"] == 1


def test_every_key_is_an_argument_of_both_commands() -> None:
    spec = make_spec(QWEN3_VL_8B)
    keys = {entry.key for entry in (*model_entries(spec), *freeze_entries(spec))}
    keys |= set(values_of(data_section(spec, unpacked=""))) | set(values_of(output_section(10)))
    for command in ("swift sft", "megatron sft"):
        assert keys <= set(arguments_of(command).types)
