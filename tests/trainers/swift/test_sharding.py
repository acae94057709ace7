"""The sharding files beside train.yaml."""

import json
from typing import Any

import pytest

from tests.trainers.swift.plans import files_for
from topoplan.trainers.swift.sft import DEEPSPEED_FILE, FSDP_FILE


def config_for(name: str, **what: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files_for(**what)[name])
    return found


def test_each_backend_has_its_own_file_and_ddp_none() -> None:
    for backend, names in {"ddp": set(), "deepspeed": {DEEPSPEED_FILE}, "fsdp2": {FSDP_FILE}}.items():
        assert {DEEPSPEED_FILE, FSDP_FILE} & set(files_for(backend=backend)) == names


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_and_its_offload_are_those_of_the_layout(stage: int) -> None:
    zero = config_for(DEEPSPEED_FILE, backend="deepspeed", zero_stage=stage, offload_optimizer=True)[
        "zero_optimization"
    ]
    assert zero["stage"] == stage
    assert zero["offload_optimizer"]["device"] == "cpu"
    assert "offload_param" not in zero


def test_fsdp2_is_told_of_offload_in_the_string_that_ms_swift_hands_on() -> None:
    assert config_for(FSDP_FILE, backend="fsdp2")["fsdp"] == "full_shard auto_wrap"
    assert config_for(FSDP_FILE, backend="fsdp2", offload=True)["fsdp"] == "full_shard auto_wrap offload"


def test_four_bit_weights_are_read_by_every_rank() -> None:
    def efficient(finetuning: str) -> bool:
        job = {"finetuning": finetuning}
        loads: bool = config_for(FSDP_FILE, backend="fsdp2", job=job)["fsdp_config"]["cpu_ram_efficient_loading"]
        return loads

    assert efficient("lora")
    assert not efficient("qlora")
