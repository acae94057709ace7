"""What data-parallel trainers have in common."""

from typing import Any

import pytest

from tests.bundle.samples import make_spec_and_plan
from tests.reading.setups import configuration, launch
from topoplan.layout.layout import Layout
from topoplan.reading.values import Keys, NotPredictedError
from topoplan.trainers import deepspeed_alone
from topoplan.trainers.codec import shown
from topoplan.trainers.data_parallel import expandable_segments, refuse
from topoplan.trainers.llamafactory import plain_job
from topoplan.trainers.swift import sft_job


def keys(text: str) -> Keys:
    return Keys(configuration(text), {"optim": "adamw_torch_fused"})


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
    spec, _ = make_spec_and_plan()
    assert shown(sft_job.CODEC.rows, spec, layout)["deepspeed"] == swift
    assert shown(plain_job.CODEC.rows, spec, layout)["deepspeed"] == llamafactory


def test_a_deepspeed_file_alone_has_its_own_keys() -> None:
    keys = shown(deepspeed_alone.CODEC.rows, make_spec_and_plan()[0], sharded(**OFFLOADED, micro_batch_size=4))

    assert keys["zero_optimization"] == "stage 3, offload_optimizer and offload_param on cpu"
    assert keys["train_micro_batch_size_per_gpu"] == 4


def test_keys_that_are_off_are_no_reason() -> None:
    off = {"use_galore": (False,), "modules_to_save": ("",)}
    refuse(keys("use_galore: false\nmodules_to_save:\n"), off)
    with pytest.raises(NotPredictedError, match="use_galore true and modules_to_save 'lm_head' is not predicted"):
        refuse(keys("use_galore: true\nmodules_to_save: lm_head\n"), off)


def test_the_last_word_on_the_allocator_counts() -> None:
    assert expandable_segments(None) is None
    assert expandable_segments(launch()) is None
    for value, expandable in (("expandable_segments:True", True), ("max_split_size_mb:128", False)):
        assert expandable_segments(launch(variables={"PYTORCH_CUDA_ALLOC_CONF": value})) is expandable
    assert expandable_segments(launch(variables={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}))
