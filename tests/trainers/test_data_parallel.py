"""What the trainers that split data alone have in common."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reading.setups import configuration, launch
from topoplan.reading.values import Keys, NotPredictedError
from topoplan.trainers.data_parallel import expandable_segments, layout_of, optimizer_of, refuse, syncs_each_batch
from topoplan.trainers.sharding import Sharding


def keys(text: str) -> Keys:
    return Keys(configuration(text), {"optim": "adamw_torch_fused"})


def test_a_sharding_becomes_a_layout_of_all_gpus() -> None:
    sharding = Sharding(backend="deepspeed", zero_stage=3, offload_optimizer=True, offload_param=True)
    common: dict[str, Any] = {"micro_batch_size": 2, "gradient_accumulation_steps": 3}
    layout = layout_of(sharding, 8, checkpoints=True, fused=False, expandable=False, ulysses=2, **common)

    assert (layout.dp, layout.ulysses, layout.world_size) == (4, 2, 8)
    assert layout.id == "zero3-ulysses2-dp4-mbs2-full-offload+param"


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
    common: dict[str, Any] = {"micro_batch_size": 1, "gradient_accumulation_steps": 4}
    switches = {"checkpoints": True, "fused": False, "expandable": False, "sync_each_batch": syncs}
    assert layout_of(Sharding(backend="fsdp2"), 8, **switches, **common).sync_each_batch is syncs
    assert layout_of(Sharding(), 8, **switches, **common).sync_each_batch
