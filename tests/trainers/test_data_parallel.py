"""What data-parallel trainers have in common."""

from typing import Any

import pytest

from tests.bundle.samples import make_spec_and_plan
from tests.reading.setups import configuration, launch
from topoplan.layout.layout import Layout
from topoplan.reading.values import Keys, NotPredictedError
from topoplan.trainers import deepspeed_alone
from topoplan.trainers.codec import shown
from topoplan.trainers.data_parallel import expandable_segments, optimizer_of, refuse, syncs_each_batch
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


@pytest.mark.parametrize(
    ("text", "name"),
    [("a: 1", "adamw"), ("optim: adamw_torch", "adamw"), ("optim: adamw_bnb_8bit", "adamw_8bit")],
)
def test_optimizers_are_known_by_transformers_names(text: str, name: str) -> None:
    assert optimizer_of(keys(text)) == name


def test_other_optimizers_are_not_predicted() -> None:
    with pytest.raises(NotPredictedError, match="optim 'lion_32bit' is not predicted"):
        optimizer_of(keys("optim: lion_32bit"))


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


SYNC = "{gradient_accumulation_kwargs: {sync_each_batch: true}}"


@pytest.mark.parametrize(
    ("text", "syncs"),
    [
        ("a: 1", False),
        ("accelerator_config: {even_batches: false}", False),
        ("accelerator_config: accelerator.json", False),
        (f"accelerator_config: {SYNC}", True),
        ("""accelerator_config: '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'""", True),
        ("accelerator_config: '{'", False),
    ],
)
def test_gradients_are_summed_whole_unless_the_file_says_otherwise(text: str, syncs: bool) -> None:
    assert syncs_each_batch(keys(text)) is syncs
