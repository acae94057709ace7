"""ROLL's training role on FSDP2 (`roll/distributed/strategy/fsdp2_strategy.py`)."""

from __future__ import annotations

from topoplan.layout.layout import Layout
from topoplan.specs.job import Job
from topoplan.trainers.codec import Codec, Reading, Row, by_key, flag
from topoplan.trainers.data_parallel import read_layout, recompute_row, refuse
from topoplan.trainers.megatron_keys import targets
from topoplan.trainers.roll import role
from topoplan.trainers.sharding import Sharding

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
_FREEZES = {"model.visual": (role.VISION, role.PROJECTOR), "visual": (role.VISION, role.PROJECTOR)}
"""Module prefix (from transformers 4.52 on, and before) -> parts that it freezes; the merger is in the tower."""

ROWS = by_key(
    Row("ulysses_size", "ulysses"),
    Row("per_device_train_batch_size", "micro_batch_size"),
    Row("gradient_accumulation_steps", "gradient_accumulation_steps"),
    Row("reduce_scatter_during_grad_accumulation", "sync_each_batch", flag),
    recompute_row("disable_gradient_checkpointing", off=True),
)


def _layout(reading: Reading) -> Layout:
    keys = reading.keys
    refuse(keys, _OFF)
    size = keys.degree("fsdp_size")
    if 1 < size < reading.world:
        keys.not_predicted(("fsdp_size",), f"fsdp_size {size} of {reading.world} GPUs")
    reading.sharding = Sharding(backend="fsdp2", offload=keys.flag("offload_policy"))
    return read_layout(ROWS, reading)


def _job(reading: Reading, layout: Layout, seq_len: int) -> Job:
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
        **({} if adapted else role.frozen(keys, _FREEZES)),
        pin={"backend": "fsdp2"},
    )


CODEC = Codec(
    reads="roll-fsdp2_train",
    rows=ROWS,
    defaults=lambda: _DEFAULTS,
    length=role.LENGTH,
    view=role.view,
    gpus=role.gpus,
    layout=_layout,
    job=_job,
    assumptions=role.assumptions,
)
