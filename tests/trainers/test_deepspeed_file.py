"""ds_config.json."""

import json
from typing import Any

import pytest

from tests.bundle.samples import make_layout
from topoplan.trainers.sharding_files import deepspeed_text


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
