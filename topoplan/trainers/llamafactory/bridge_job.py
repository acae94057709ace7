"""LLaMA-Factory with Megatron Bridge (USE_MEGATRON_BRIDGE=1): the job and the layout that its keys describe.

Source, at LLaMA-Factory main of August 2026 (0.9.6.dev0): `hparams/megatron_bridge_args.py`,
`train/megatron_bridge/config_builder.py`; Megatron-Bridge `training/mixed_precision.py` (bf16_mixed sums gradients in
fp32).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.specs.job import Job
from topoplan.trainers.codec import Codec, Reading, Row, by_key, flag, layout_of, nothing
from topoplan.trainers.data_parallel import refuse
from topoplan.trainers.llamafactory.common import carried
from topoplan.trainers.llamafactory.key_list import defaults_of
from topoplan.trainers.llamafactory.mca_job import packs
from topoplan.trainers.megatron_keys import DEGREES, MEMORY

_OFF: Mapping[str, tuple[Any, ...]] = {
    "mixed_precision": ("bf16_mixed",),
    "extra_config": ("",),
    "quantization_bit": (),
    "use_hyper_parallel": (False,),
}

ROWS = by_key(
    *DEGREES.values(),
    Row("per_device_train_batch_size", "micro_batch_size"),
    Row("gradient_accumulation_steps", "gradient_accumulation_steps"),
    *MEMORY.values(),
    Row("cross_entropy_loss_fusion", "cross_entropy_fusion", flag, show=nothing),
)


def _layout(reading: Reading) -> Layout:
    refuse(reading.keys, _OFF)
    return layout_of(ROWS, reading, backend="megatron", grad_reduce_in_fp32=True)


def _job(reading: Reading, layout: Layout, seq_len: int) -> Job:
    keys = reading.keys
    stage, method = keys.text("stage") or "sft", keys.text("finetuning_type") or "lora"
    if stage not in ("pt", "sft"):
        keys.not_predicted(("stage",), remedy="predicted are pt and sft")
    if method not in ("full", "lora"):
        keys.not_predicted(("finetuning_type",), remedy="predicted are full and lora")
    if method == "lora" and keys.value("lora_target") not in (None, "all"):
        keys.not_predicted(("lora_target",), remedy="predicted is all")
    if reading.model.vision is not None:
        keys.not_predicted(
            ("model_name_or_path",),
            "a model that sees with Megatron Bridge",
            remedy="unset USE_MEGATRON_BRIDGE to plan it without",
        )
    return Job(
        seq_len=seq_len,
        global_batch_size=layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp,
        finetuning=method,
        stage=stage,
        packing=keys.flag("use_packed_sequences") or packs(stage, keys.given("packing")),
        lora_rank=keys.count("lora_rank"),
        lora_dropout=0.0,  # of Megatron Bridge's LoRA: config_builder.py does not hand on lora_dropout
        lora_target=("all",),
        pin={"backend": "megatron"},
    )


CODEC = Codec(
    reads="bridge",
    rows=ROWS,
    defaults=partial(defaults_of, "bridge"),
    length="cutoff_len",
    layout=_layout,
    job=_job,
    carries=carried,
)
