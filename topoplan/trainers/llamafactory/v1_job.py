"""LLaMA-Factory's new engine (USE_V1=1): recognition of its files, and the job and layout that its keys describe.

Sources, at LLaMA-Factory main of August 2026 (0.9.6.dev0), `v1/`: `config/`, `core/base_trainer.py`,
`core/model_engine.py`, `core/utils/batching.py`, `plugins/trainer_plugins/distributed/` (fsdp2.py, deepspeed.py) and
`plugins/model_plugins/` (peft.py, quantization.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.layout.layout import Layout, changed
from topoplan.reading.nested import flattened
from topoplan.reading.recognizer import SURE, Recognizer
from topoplan.reading.setup import Configuration, Setup
from topoplan.specs.job import Job
from topoplan.trainers.codec import Codec, Reading, Row, StatedSharding, by_key
from topoplan.trainers.data_parallel import ALLOCATOR_ROW, read_layout, recompute_row, refuse
from topoplan.trainers.sharding import sharding_of_name

_SURE_WITH_MODEL = frozenset(["train_dataset", "dist_config", "kernel_config", "model_class", "peft_config"])

_DEFAULTS: Mapping[str, Any] = {
    "cutoff_len": 2048,
    "micro_batch_size": 1,
    "bf16": True,
    "enable_activation_checkpointing": True,
    "dist_config.reshard_after_forward": True,
    "peft_config.r": 8,
    "peft_config.lora_dropout": 0.05,  # v1/plugins/model_plugins/peft.py
    "peft_config.target_modules": "all",
    "peft_config.freeze_trainable_layers": 2,
    "quant_config.quantization_bit": 4,
}
_OFF: Mapping[str, tuple[Any, ...]] = {
    "cp_size": (1,),
    "mp_replicate_size": (1,),
    "mp_shard_size": (),
    "dp_size": (),
    "model_class": ("llm",),
    "optim_config.name": (),
    "dist_config.name": ("fsdp2", "deepspeed"),
    "dist_config.reshard_after_forward": (True,),
    "kernel_config.name": ("auto", "liger_kernel"),  # without Liger's fused loss: this trainer needs the logits
    "peft_config.name": ("lora", "freeze"),
    "peft_config.use_dora": (False,),
    "peft_config.modules_to_save": ([],),
    "peft_config.freeze_trainable_modules": ("all", ["all"]),
    "peft_config.freeze_extra_modules": ("", []),
    "peft_config.cast_trainable_params_to_fp32": (True,),
    "quant_config.name": ("bnb", "auto"),
    "quant_config.quantization_bit": (4,),
    "pref_loss": (),
}
"""Keys that change memory or time in ways that no formula covers, and the values that disable them."""


def _claim(data: Mapping[str, Any], _known: int) -> float:
    return SURE if "model" in data and data.keys() & _SURE_WITH_MODEL else 0.0


def _flat(configuration: Configuration, setup: Setup) -> Configuration:
    data = configuration.source.data
    names = [key for key, value in data.items() if not isinstance(value, Mapping)]
    names += [f"{block}.{key}" for block, held in data.items() if isinstance(held, Mapping) for key in held]
    return flattened(configuration, setup, (), {name: name for name in names})


def _gradient_accumulation(reading: Reading, key: str) -> int:
    """Read gradient accumulation: 1 unless a batch size is given, which it must divide (`batching.py`)."""
    batch = reading.keys.count(key)
    each: int = reading.parts["micro_batch_size"] * reading.replicas
    if batch is None:
        return 1
    if batch % each:
        reading.keys.fail(key, f"{key} is {batch}", expected=f"expected a multiple of {each}, of all micro batches")
    return batch // each


ROWS = by_key(
    Row("micro_batch_size", "micro_batch_size"),
    Row(
        "global_batch_size",
        "gradient_accumulation_steps",
        _gradient_accumulation,
        write=lambda _, layout: layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp,
    ),
    recompute_row("enable_activation_checkpointing"),
    ALLOCATOR_ROW,
)


def _layout(reading: Reading) -> Layout:
    keys = reading.keys
    refuse(keys, _OFF)
    if keys.given("peft_config.export_dir") is not None:
        keys.not_predicted(
            ("peft_config.export_dir",), "a run that does not train", remedy="leave it out to plan a run that does"
        )
    if keys.given("dist_config.name") is None:
        keys.not_predicted(
            ("model",),
            "LLaMA-Factory's new engine without dist_config, which has no mixed precision,",
            remedy="set dist_config.name: fsdp2 or deepspeed",
        )
    if not keys.flag("bf16"):
        keys.not_predicted(("bf16",), "training in fp32", remedy="set bf16: true")
    file = keys.given("dist_config.config_file")
    if keys.given("dist_config.name") == "deepspeed":
        reading.sharding = sharding_of_name(file, keys, Setup(parts=()), "dist_config.config_file")
        return read_layout(ROWS, reading)
    # fsdp2.py::get_mp_policy; loss.backward() without no_sync reduces after each micro-batch.
    reading.sharding = StatedSharding(backend="fsdp2", offload=keys.flag("dist_config.offload_params"))
    return changed(read_layout(ROWS, reading), grad_reduce_in_fp32=True, sync_each_batch=True)


def _job(reading: Reading, layout: Layout, seq_len: int) -> Job:
    keys, launch = reading.keys, reading.launch
    command = next(iter(launch.arguments), "") if launch else ""
    if command in ("dpo", "rm"):
        keys.not_predicted(("model",), f"stage {command} of LLaMA-Factory's new engine", remedy="predicted is sft")
    method, bits = keys.given("peft_config.name") or "full", None
    if method == "freeze":
        keys.not_predicted(
            ("peft_config.name",),
            "freeze of the new engine, which keeps what is frozen in bf16,",
            remedy="predicted are full and lora",
        )
    if keys.given("quant_config.name"):
        bits = keys.count("quant_config.quantization_bit")
        if method != "lora":
            keys.not_predicted(("quant_config.name",), remedy="predicted with peft_config.name: lora")
    targets = keys.value("peft_config.target_modules")
    return Job(
        seq_len=seq_len,
        global_batch_size=layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp,
        finetuning="qlora" if bits else str(method),
        lora_rank=keys.count("peft_config.r"),
        lora_dropout=keys.fraction("peft_config.lora_dropout"),
        lora_target=tuple(map(str, targets)) if isinstance(targets, list) else (str(targets),),
        quantization_bit=bits,
        # dtype="auto" leaves frozen weights in the checkpoint's dtype; PEFT casts only adapters to fp32.
        pure_bf16=method == "lora" and layout.backend == "fsdp2",
        freeze_vision_tower=False,
        freeze_multi_modal_projector=False,
        pin={"backend": layout.backend},
    )


def _assumptions(reading: Reading, *_: object) -> Iterator[str]:
    if reading.launch is None:
        yield "started with `USE_V1=1 llamafactory-cli sft`, as no command was given"
    if (strategy := reading.keys.given("batching_strategy")) not in (None, "normal"):
        yield f"batching_strategy {strategy}: every micro batch is taken to have micro_batch_size * cutoff_len tokens"


RECOGNIZED = Recognizer(trainer="llamafactory-v1", claim=_claim, model_keys=("model",))
CODEC = Codec(
    reads="llamafactory-v1",
    rows=ROWS,
    defaults=lambda: _DEFAULTS,
    view=_flat,
    length="cutoff_len",
    layout=_layout,
    job=_job,
    assumptions=_assumptions,
)
