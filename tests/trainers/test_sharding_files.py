"""ds_config.json."""

import json
from typing import Any

import pytest
import yaml

from tests.bundle.samples import QWEN3_8B, make_layout, make_spec_and_layout
from topoplan.trainers.sharding_files import accelerate_text, deepspeed_text


def zero(**layout: Any) -> dict[str, Any]:
    document = json.loads(deepspeed_text(make_layout(backend="deepspeed", **layout)))
    assert document["bf16"]["enabled"] == document["fp16"]["enabled"] == document["train_batch_size"] == "auto"
    found: dict[str, Any] = document["zero_optimization"]
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_that_keep_whole_weights_have_buckets(stage: int) -> None:
    found = zero(zero_stage=stage)
    assert (found["stage"], found["reduce_bucket_size"], found["allgather_bucket_size"]) == (
        stage,
        5 * 10**8,
        5 * 10**8,
    )
    assert not [key for key in found if key.startswith(("stage3", "offload"))]


def test_stage_3_gathers_weights_to_save_them() -> None:
    found = zero(zero_stage=3)
    assert found["stage3_gather_16bit_weights_on_model_save"] is True
    assert found["reduce_bucket_size"] == found["stage3_prefetch_bucket_size"] == "auto"
    assert "offload_optimizer" not in found


def test_offload_goes_to_pinned_host_memory() -> None:
    pinned = {"device": "cpu", "pin_memory": True}
    found = zero(zero_stage=3, offload_optimizer=True, offload_param=True)
    assert found["offload_optimizer"] == found["offload_param"] == pinned
    assert zero(zero_stage=2, offload_optimizer=True)["offload_optimizer"] == pinned


def read(**what: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(
        accelerate_text(*make_spec_and_layout(model=QWEN3_8B, backend="fsdp2", **what))
    )
    return found


def test_all_processes_shard_with_version_2() -> None:
    found = read()
    assert (found["distributed_type"], found["num_machines"], found["num_processes"]) == ("FSDP", 4, 32)
    assert found["rdzv_backend"] == "static"
    config = found["fsdp_config"]
    assert (config["fsdp_version"], config["fsdp_reshard_after_forward"], config["fsdp_offload_params"]) == (
        2,
        True,
        False,
    )
    assert config["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"


def test_offload_and_numbers_follow_the_plan() -> None:
    assert read(offload=True)["fsdp_config"]["fsdp_offload_params"] is True
    assert read()["mixed_precision"] == "bf16"
    assert read(job={"precision": "fp16"})["mixed_precision"] == "fp16"
    assert read(job={"pure_bf16": True})["mixed_precision"] == "no"
