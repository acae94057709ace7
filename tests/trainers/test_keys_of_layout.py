"""A layout in its trainer's keys, and back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reading.setups import all_of, configuration
from topoplan.layout.layout import Layout
from topoplan.lint.translate import translate
from topoplan.planner.predict import predict
from topoplan.specs.cluster import Cluster
from topoplan.specs.load import load_cluster, load_spec
from topoplan.trainers.keys_of_layout import trainer_keys
from topoplan.trainers.llamafactory.mca_yaml import trainer_file

SPECS = "cluster_specs"


@pytest.fixture(scope="module")
def h100s() -> Cluster:
    return load_cluster(f"{SPECS}/h100-4x8.yaml")


@pytest.mark.parametrize(
    ("spec", "keys"),
    [
        ("h100-4x8", {"tp": 2, "micro_batch_size": 2}),
        ("h100-4x8", {"tp": 2, "pp": 2, "vpp": 3, "recompute": "full"}),
        ("h100-4x8", {"pp": 2, "pipeline_layout": "Et*17|t*19L", "recompute": {"modules": ["mlp"]}}),
        ("h20-2x8", {"tp": 2, "ep": 8, "etp": 1}),
        ("h20-2x8", {"tp": 2, "optimizer_offload_fraction": 0.5}),
    ],
)
def test_what_generate_writes_is_translated_back_to_its_plan(spec: str, keys: dict[str, Any]) -> None:
    read = load_spec(f"{SPECS}/{spec}.yaml")
    plan = predict(read, keys)
    one = configuration(trainer_file(read, plan).text)
    back = translate(one, all_of(one), read.cluster)

    assert back.layout == plan.layout
    assert predict(back.spec, back.layout).memory.device_bytes == plan.memory.device_bytes
    assert predict(back.spec, back.layout).time.step_s == plan.time.step_s


def test_the_keys_of_a_layout_agree_with_what_generate_writes() -> None:
    read = load_spec(f"{SPECS}/h100-4x8.yaml")
    plan = predict(read, {"tp": 2, "pp": 2, "vpp": 3, "recompute": "full"})
    written = trainer_file(read, plan).values

    for key, value in trainer_keys(plan.layout, is_moe=False).items():
        assert written.get(key) == value or value in (None, False), key


def sharded(**values: Any) -> Layout:
    base = {"backend": "deepspeed", "dp": 8, "gradient_accumulation_steps": 1, "zero_stage": 3}
    return Layout.of(distributed_optimizer=False, **(base | values))


OFFLOADED = {"offload_optimizer": True, "offload_param": True}


@pytest.mark.parametrize(
    ("layout", "swift", "llamafactory"),
    [
        (sharded(), "zero3", "ds_z3_config.json"),
        (sharded(zero_stage=1), "zero1", "a file with stage 1"),
        (sharded(zero_stage=2, offload_optimizer=True), "zero2_offload", "ds_z2_offload_config.json"),
        (sharded(**OFFLOADED), "zero3_offload", "ds_z3_offload_config.json"),
        (sharded(offload_optimizer=True), *["a file with stage 3, offload_optimizer on cpu"] * 2),
        (sharded(backend="ddp", zero_stage=0), None, None),
    ],
)
def test_deepspeed_is_named_by_the_files_that_the_trainers_have(
    layout: Layout, swift: str | None, llamafactory: str | None
) -> None:
    assert trainer_keys(layout, is_moe=False, trainer="swift")["deepspeed"] == swift
    assert trainer_keys(layout, is_moe=False)["deepspeed"] == llamafactory


def test_a_deepspeed_file_alone_has_its_own_keys() -> None:
    keys = trainer_keys(sharded(**OFFLOADED, micro_batch_size=4), is_moe=False, trainer="deepspeed")

    assert keys["zero_optimization"] == "stage 3, offload_optimizer and offload_param on cpu"
    assert keys["train_micro_batch_size_per_gpu"] == 4
