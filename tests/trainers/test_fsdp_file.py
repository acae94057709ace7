"""accelerate.yaml."""

from typing import Any

import yaml

from tests.bundle.samples import QWEN3_8B, make_spec_and_layout
from topoplan.trainers.sharding_files import accelerate_text


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
