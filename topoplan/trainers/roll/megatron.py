"""ROLL's training role on Megatron: mcore_adapter, as LLaMA-Factory has it, with keys of the same names.

`roll/distributed/strategy/megatron_strategy.py` makes the TrainingArguments of mcore_adapter from training_args, with
strategy_config over them.
"""

from __future__ import annotations

from dataclasses import replace

from topoplan.layout.layout import Layout
from topoplan.reading.setup import Configuration, Setup
from topoplan.specs.job import Job
from topoplan.trainers.codec import Reading
from topoplan.trainers.data_parallel import refuse
from topoplan.trainers.llamafactory import mca_job
from topoplan.trainers.roll import role
from topoplan.trainers.shared_refusals import missing_precision

_TOWER = "vision_model"
_FREEZES = {
    _TOWER: ("freeze_vision_tower", "freeze_multi_modal_projector"),
    f"{_TOWER}.blocks": ("freeze_vision_tower",),
    f"{_TOWER}.patch_embed": ("freeze_vision_tower",),
}
"""Prefixes of freeze_module_prefix, and what LLaMA-Factory calls it: mcore_adapter has the merger in vision_model."""


def _view(configuration: Configuration, setup: Setup) -> Configuration:
    found = role.view(configuration, setup)
    data = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False, **found.source.data}
    prefixes = str(data.get("freeze_module_prefix", "")).split(",")
    if all(one.strip() in _FREEZES for one in prefixes):
        data |= {key: True for one in prefixes for key in _FREEZES[one.strip()]}
        del data["freeze_module_prefix"]
    return replace(found, source=replace(found.source, data=data))


def _layout(reading: Reading) -> Layout:
    keys = reading.keys
    role.refuse_batches_by_tokens(keys)
    refuse(keys, dict.fromkeys(("lora_target", "freeze_module_prefix"), ("",)))
    if keys.flag("overlap_param_gather"):
        what = "overlap_param_gather is on, which ROLL stops at (megatron_strategy.py asserts it)"
        keys.fail("overlap_param_gather", what, expected="expected false")
    if keys.degree("context_parallel_size") > 1 and reading.model.vision is not None:
        keys.not_predicted(("context_parallel_size",), "context parallelism of a model that sees")
    return mca_job.CODEC.layout(reading)


def _job(reading: Reading, layout: Layout, seq_len: int) -> Job:
    job = mca_job.CODEC.job(reading, layout, seq_len)
    return replace(job, pin={**job.pin, "backend": "mca", "overlap_param_gather": False})


CODEC = replace(
    mca_job.CODEC,
    reads="roll-megatron_train",
    length=role.LENGTH,
    view=_view,
    gpus=role.gpus,
    layout=_layout,
    job=_job,
    refusals=missing_precision,
    assumptions=role.assumptions,
)
