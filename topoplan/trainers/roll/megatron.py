"""ROLL's training role on Megatron: mcore_adapter, as in LLaMA-Factory, with the same names of keys.

`roll/distributed/strategy/megatron_strategy.py` builds mcore_adapter's TrainingArguments from training_args, overridden
by strategy_config.
"""

from __future__ import annotations

from dataclasses import replace

from topoplan.layout.layout import Layout
from topoplan.specs.job import Job
from topoplan.trainers.codec import Reading
from topoplan.trainers.data_parallel import refuse
from topoplan.trainers.llamafactory import mca_job
from topoplan.trainers.megatron_keys import targets
from topoplan.trainers.refusal import missing_precision
from topoplan.trainers.roll import role

_FREEZES = {
    "vision_model": (role.VISION, role.PROJECTOR),
    "vision_model.blocks": (role.VISION,),
    "vision_model.patch_embed": (role.VISION,),
}
"""Module prefix -> parts that it freezes; mcore_adapter has the merger in vision_model."""


def _layout(reading: Reading) -> Layout:
    keys = reading.keys
    refuse(keys, {"additional_target": ("",)})
    if keys.flag("overlap_param_gather"):
        what = "overlap_param_gather is on, which ROLL stops at (megatron_strategy.py asserts it)"
        keys.fail("overlap_param_gather", what, expected="expected false")
    if keys.degree("context_parallel_size") > 1 and reading.model.vision is not None:
        keys.not_predicted(("context_parallel_size",), "context parallelism of a model that sees")
    return mca_job.CODEC.layout(reading)


def _job(reading: Reading, layout: Layout, seq_len: int) -> Job:
    job, keys = mca_job.CODEC.job(reading, layout, seq_len), reading.keys
    adapted = targets(keys, "lora_target") if keys.given("lora_target") else ()
    return replace(
        job,
        # models/model_providers.py: adapters on mcore_adapter's layers (adapters/lora_layer.py), or else frozen parts.
        finetuning="lora" if adapted else "full",
        lora_rank=(keys.count("lora_rank") or role.LORA_RANK) if adapted else None,
        lora_dropout=keys.number("lora_dropout") or 0.0,
        lora_target=adapted or ("all",),
        **role.packed(keys),
        **({} if adapted else role.frozen(keys, _FREEZES)),
        pin={**job.pin, "backend": "mca", "overlap_param_gather": False},
    )


CODEC = replace(
    mca_job.CODEC,
    reads="roll-megatron_train",
    length=role.LENGTH,
    view=role.view,
    gpus=role.gpus,
    layout=_layout,
    job=_job,
    refusals=missing_precision,
    assumptions=role.assumptions,
)
