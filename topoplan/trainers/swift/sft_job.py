"""ms-swift's `swift sft`, `pt` and `rlhf`: the job and the layout that their arguments describe.

Sources, at ms-swift 4.5.2: `swift/arguments/` (base_args/, tuner_args.py, sft_args.py) and
`swift/trainers/arguments.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.reading.values import Keys
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers.codec import Codec, Reading, Row, by_key
from topoplan.trainers.data_parallel import (
    ALLOCATOR_ROW,
    liger_row,
    optimizer_of,
    read_layout,
    recompute_row,
    refuse,
    sharding_rows,
    zero_preset,
)
from topoplan.trainers.megatron_keys import check_something_trained, targets
from topoplan.trainers.swift.arguments import accepted
from topoplan.trainers.swift.common import TASKS, labels_of, of_images
from topoplan.trainers.swift.megatron_job import ROWS as MEGATRON_ROWS
from topoplan.trainers.swift.reading import carried, rlhf_assumptions, stage_of, with_answers
from topoplan.trainers.swift.refusals import LIGER_MODEL_TYPES
from topoplan.trainers.train_yaml import why_accumulation

DEFAULTS: Mapping[str, Any] = {
    "tuner_type": "lora",  # base_args/base_args.py
    "lora_rank": 8,  # tuner_args.py, also for the next five
    "lora_dropout": 0.05,
    "target_modules": "all-linear",
    "freeze_vit": True,
    "freeze_aligner": True,
    "freeze_llm": False,
    "per_device_train_batch_size": 1,  # trainers/arguments.py, also for the next one
    "gradient_checkpointing": True,
    "torch_dtype": "bfloat16",
    "optim": "adamw_torch_fused",
    "packing": False,
    "sequence_parallel_size": 1,
}
"""ms-swift's defaults. torch_dtype defaults to the checkpoint's, which is bfloat16 for nearly all models."""

_BATCH = 16
"""Minimum sequences per step if gradient_accumulation_steps is not given (trainers/arguments.py)."""

_OFF: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("use_galore", "use_dora"), (False,)),
    **dict.fromkeys(("optimizer", "target_regex", "target_parameters", "trainable_parameters_regex"), ("",)),
    **dict.fromkeys(("freeze_parameters", "trainable_parameters", "modules_to_save", "freeze_parameters_regex"), ("",)),
    "freeze_parameters_ratio": (0, 0.0),
    "lisa_activated_layers": (0,),
    "deepspeed_autotp_size": (1,),
    "zero_hpz_partition_size": (1,),
    "tuner_backend": ("peft",),
    "quant_method": ("bnb",),
    "task_type": TASKS,
}


_FREEZING = ("freeze_parameters_ratio", "trainable_parameters_regex")


def _own_loss(keys: Keys) -> bool:
    """Whether the loss comes from full logits rather than from Liger (trainers/seq2seq_trainer.py, compute_loss)."""
    scaled = keys.given("loss_scale") not in (None, "default")
    return (
        scaled
        or keys.given("task_type") == "seq_cls"
        or any(keys.flag(key) for key in ("enable_dft_loss", "enable_channel_loss"))
        or (keys.degree("sequence_parallel_size") > 1)
    )


def _ulysses(reading: Reading, key: str) -> int:
    ulysses, launch = reading.keys.degree(key), reading.launch
    if ulysses > 1 and reading.sharding.backend == "ddp":
        reading.keys.not_predicted(
            (key,), f"{key} without DeepSpeed or FSDP", remedy="add deepspeed: zero2, or fsdp: fsdp2"
        )
    pieces = launch.variable("CELOSS_PARALLEL_SIZE") if launch and ulysses > 1 else None
    if pieces is not None and pieces.value != "0":
        # trainers/utils.py::per_token_loss_func_sp
        reading.keys.not_predicted(
            (key,),
            f"a loss in pieces (CELOSS_PARALLEL_SIZE={pieces.value})",
            remedy="leave the variable out to plan it without",
        )
    return ulysses


def _experts(reading: Reading, key: str) -> str | None:
    written = reading.keys.text(key)
    if written not in (None, "eager", "grouped_mm"):
        reading.keys.not_predicted((key,), remedy="predicted are eager and grouped_mm")
    return written


def _presets(layout: Layout) -> tuple[str, str]:
    """Return the names of ms-swift's presets (swift/config/), or what a file must contain."""
    own = not layout.offload and layout.recompute.granularity != "none"
    fsdp = "fsdp2" if own else f"FSDP2{' with fsdp_offload_params' if layout.offload else ''}"
    return zero_preset(layout, "zero"), fsdp


def _why_checkpointing(_: Spec, layout: Layout) -> str:
    if layout.recompute.granularity != "full":
        return "on by default"
    in_file = layout.backend == "fsdp2"
    return "set in fsdp.json: activation_checkpointing" if in_file else "keeps only the input of each layer"


_SHARDING = by_key(*sharding_rows(_presets))


def _accelerator(spec: Spec, layout: Layout) -> Mapping[str, Any] | None:
    # sft_args.py sets dispatch_batches only if there is no accelerator_config.
    syncs = _SHARDING["accelerator_config"].value(spec, layout)
    return {"dispatch_batches": False, **syncs} if syncs else None


_CHECKPOINTING = recompute_row("gradient_checkpointing", _why_checkpointing)
ROWS = by_key(
    *_SHARDING.values(),
    replace(_SHARDING["accelerator_config"], write=_accelerator),
    Row(
        "gradient_accumulation_steps",
        "gradient_accumulation_steps",
        lambda reading, key: (
            reading.keys.count(key) or ceil(_BATCH / reading.parts["micro_batch_size"] / reading.world)
        ),
        why_accumulation,
    ),
    replace(
        _CHECKPOINTING,
        # _check_fsdp2_compatibility: "Should use activation_checkpointing in fsdp_config instead".
        write=lambda _, layout: layout.recompute.granularity == "full" and layout.backend != "fsdp2",
        show=_CHECKPOINTING.write,
    ),
    Row(
        "sequence_parallel_size",
        "ulysses",
        _ulysses,
        "Ulysses: GPUs that share a sequence; attention is split by heads",
        lambda _, layout: layout.ulysses if layout.ulysses > 1 else None,
        lambda _, layout: layout.ulysses,
    ),
    liger_row(
        "use_liger_kernel",
        LIGER_MODEL_TYPES,
        _own_loss,
        "the loss is computed from hidden states, without the full logits",
    ),
    Row("experts_impl", "experts_impl", _experts, "needs transformers 5"),
    ALLOCATOR_ROW,
)


def _job(reading: Reading, layout: Layout, seq_len: int) -> Job:
    """Read the job; the command determines pt or sft. Raises NotPredictedError for what is not predicted."""
    keys, model = reading.keys, reading.model
    count = _layers_of(keys, model)
    refuse(keys, {key: values for key, values in _OFF.items() if count is None or key not in _FREEZING})
    kind_key = "tuner_type" if keys.given("tuner_type") is not None else "train_type"
    method = keys.given(kind_key) or DEFAULTS["tuner_type"]
    of_stage = stage_of(reading)
    if method not in ("full", "lora") or (count is not None and method != "full"):
        keys.not_predicted((kind_key,), remedy="predicted are full and lora, and part of the layers with full")
    bits = keys.count("quant_bits")
    if bits is not None and (bits not in (4, 8) or method != "lora"):
        keys.not_predicted(("quant_bits",), remedy="predicted are 4 and 8 bits, with tuner_type lora")
    dtype = str(keys.value("torch_dtype"))
    if dtype not in ("bfloat16", "float16", "float32"):
        keys.not_predicted(("torch_dtype",), remedy="predicted are bfloat16, float16 and float32")
    # base_args/model_args.py::_init_mixed_precision: the same half precision as the weights', or fp16 for float32
    # weights.
    half = keys.flag("fp16") if keys.given("fp16") is not None else dtype != "bfloat16" and not keys.flag("bf16")
    job = Job(
        seq_len=seq_len,
        global_batch_size=layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp,
        precision="fp16" if half else "bf16",
        finetuning="qlora" if bits else "freeze" if count is not None else str(method),
        packing=keys.flag("packing"),
        trainer={"padding_free": True} if of_stage["stage"] == "dpo" and keys.flag("packing") else {},
        lora_rank=keys.count("lora_rank"),
        lora_dropout=keys.fraction("lora_dropout"),
        lora_target=targets(keys, "target_modules") or ("all",),
        quantization_bit=bits,
        # With DDP, trained weights keep their loaded dtype: only DeepSpeed, FSDP and PEFT convert them to fp32.
        pure_bf16=layout.backend == "ddp" and method == "full" and dtype == "bfloat16",
        optimizer=optimizer_of(keys),
        num_labels=labels_of(keys),
        **of_stage,
        **of_images(reading),
    )
    check_something_trained(keys, "freeze_llm", job)
    return job if count is None else replace(job, freeze_trainable_layers=count)


def trained_layers(model: Model, count: int) -> range:
    """Return the indices of the last `count` layers, or of the first ones for a negative number."""
    total = model.num_layers
    return range(max(0, total - count), total) if count > 0 else range(min(-count, total))


def trained_layers_regex(model: Model, count: int) -> str:
    """Return ms-swift's trainable_parameters_regex for these layers, by their names in Hugging Face's model."""
    numbers = "|".join(map(str, trained_layers(model, count)))
    tower = r"language_model\.(?:model\.)?" if model.vision is not None else r"^model\."
    return rf"{tower}layers\.(?:{numbers})\."


def _layers_of(keys: Keys, model: Model) -> int | None:
    """Return how many of the last layers are trained (negative for the first ones), if two keys express just that.

    swift/arguments/tuner_args.py: freeze_parameters_ratio 1 freezes everything, except what the other key matches.
    """
    written = tuple(keys.given(key) for key in _FREEZING)
    counts = range(1, model.num_layers + 1)
    wanted = ((count, trained_layers_regex(model, count)) for one in counts for count in (one, -one))
    return next((count for count, regex in wanted if written == (1, regex)), None)


CODEC = Codec(
    reads="swift",
    rows=ROWS,
    defaults=lambda: DEFAULTS,
    length="max_length",
    needs_length=False,
    shards=True,
    view=with_answers,
    layout=lambda reading: read_layout(ROWS, reading),
    job=_job,
    carries=partial(carried, rows={**MEGATRON_ROWS, **ROWS}),
    takes=partial(accepted, command="swift sft"),
    tells_faults=True,
    assumptions=lambda reading, *_: rlhf_assumptions(reading),
)
