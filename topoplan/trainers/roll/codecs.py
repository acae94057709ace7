"""ROLL's training role, on Megatron and on FSDP2.

On Megatron, it is mcore_adapter with the names of LLaMA-Factory: `roll/distributed/strategy/megatron_strategy.py`
builds its TrainingArguments from training_args, overridden by strategy_config. FSDP2: `fsdp2_strategy.py` beside it.
"""

from __future__ import annotations

from dataclasses import replace

from topoplan.layout.layout import Layout
from topoplan.specs.job import Job
from topoplan.trainers.codec import Codec, Reading, Row, StatedSharding, by_key, flag
from topoplan.trainers.data_parallel import read_layout, recompute_row, refuse
from topoplan.trainers.llamafactory import mca_job
from topoplan.trainers.megatron_keys import targets
from topoplan.trainers.refusal import missing_precision
from topoplan.trainers.roll import role

_MEGATRON_FREEZES = {
    "vision_model": (role.VISION, role.PROJECTOR),
    "vision_model.blocks": (role.VISION,),
    "vision_model.patch_embed": (role.VISION,),
}
"""Module prefix -> parts that it freezes; mcore_adapter has the merger in vision_model."""


def _megatron_layout(reading: Reading) -> Layout:
    keys = reading.keys
    refuse(keys, {"additional_target": ("",)})
    if keys.flag("overlap_param_gather"):
        what = "overlap_param_gather is on, which ROLL stops at (megatron_strategy.py asserts it)"
        keys.fail("overlap_param_gather", what, expected="expected false")
    if keys.degree("context_parallel_size") > 1 and reading.model.vision is not None:
        keys.not_predicted(
            ("context_parallel_size",),
            "context parallelism of a model that sees",
            remedy="set context_parallel_size: 1",
        )
    return mca_job.CODEC.layout(reading)


def _megatron_job(reading: Reading, layout: Layout, seq_len: int) -> Job:
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
        **({} if adapted else role.frozen(keys, _MEGATRON_FREEZES)),
        pin={**job.pin, "backend": "mca", "overlap_param_gather": False},
    )


MEGATRON = replace(
    mca_job.CODEC,
    reads="roll-megatron_train",
    length=role.LENGTH,
    view=role.view,
    gpus=role.gpus,
    layout=_megatron_layout,
    job=_megatron_job,
    refusals=missing_precision,
    assumptions=role.assumptions,
)


_DEFAULTS = {
    "gradient_accumulation_steps": 1,
    "lora_rank": role.LORA_RANK,
    "lora_dropout": 0.0,
    "param_dtype": "bf16",
    "reduce_scatter_during_grad_accumulation": True,
}
_OFF = {
    "ep_size": (1,),
    "apply_tiled_mlp": (False,),
    "reshard_after_forward": (True,),
    "additional_target": ("",),
    "param_dtype": ("bf16", "bfloat16"),
}
"""Keys that change memory or time in ways that no formula covers, and the values that disable them."""
_FSDP2_FREEZES = {"model.visual": (role.VISION, role.PROJECTOR), "visual": (role.VISION, role.PROJECTOR)}
"""Module prefix (from transformers 4.52 on, and before) -> parts that it freezes; the merger is in the tower."""

_FSDP2_ROWS = by_key(
    Row("ulysses_size", "ulysses"),
    Row("per_device_train_batch_size", "micro_batch_size"),
    Row("gradient_accumulation_steps", "gradient_accumulation_steps"),
    Row("reduce_scatter_during_grad_accumulation", "sync_each_batch", flag),
    recompute_row("disable_gradient_checkpointing", off=True),
)


def _fsdp2_layout(reading: Reading) -> Layout:
    keys = reading.keys
    refuse(keys, _OFF)
    size = keys.degree("fsdp_size")
    if 1 < size < reading.world:
        keys.not_predicted(
            ("fsdp_size",), f"fsdp_size {size} of {reading.world} GPUs", remedy=f"predicted are 1 and {reading.world}"
        )
    reading.sharding = StatedSharding(backend="fsdp2", offload=keys.flag("offload_policy"))
    return read_layout(_FSDP2_ROWS, reading)


def _fsdp2_job(reading: Reading, layout: Layout, seq_len: int) -> Job:
    keys = reading.keys
    adapted = targets(keys, "lora_target")
    return Job(
        seq_len=seq_len,
        global_batch_size=layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp,
        precision="fp16" if keys.flag("fp16") else "bf16",
        stage=str(keys.value("stage")),
        finetuning="lora" if adapted else "full",
        lora_rank=keys.count("lora_rank"),
        lora_dropout=keys.fraction("lora_dropout"),
        lora_target=adapted or ("all",),
        **role.packed(keys),
        # model_providers.py loads the weights in param_dtype, and AdamW updates those directly.
        pure_bf16=not adapted,
        **({} if adapted else role.frozen(keys, _FSDP2_FREEZES)),
        pin={"backend": "fsdp2"},
    )


FSDP2 = Codec(
    reads="roll-fsdp2_train",
    rows=_FSDP2_ROWS,
    defaults=lambda: _DEFAULTS,
    length=role.LENGTH,
    view=role.view,
    gpus=role.gpus,
    layout=_fsdp2_layout,
    job=_fsdp2_job,
    assumptions=role.assumptions,
)
