"""LLaMA-Factory without Megatron: the job and the layout that its keys describe.

Defaults are those of the key list in `catalog/trainer_keys` (LLaMA-Factory 0.9.5 `hparams/`, transformers
`training_args.py`): finetuning_type lora with lora_rank 8 and lora_target all, cutoff_len 2048, and gradient
checkpointing on (`hparams/model_args.py::disable_gradient_checkpointing`, `model/model_utils/checkpointing.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from topoplan.errors import listed
from topoplan.layout.layout import Layout
from topoplan.reading.values import as_whole, is_for_training
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers.codec import Codec, Reading, Row, StatedSharding, by_key
from topoplan.trainers.data_parallel import (
    ALLOCATOR_ROW,
    expandable_segments,
    liger_row,
    optimizer_of,
    read_layout,
    recompute_row,
    refuse,
    sharding_rows,
    zero_preset,
)
from topoplan.trainers.llamafactory.common import carried, takes
from topoplan.trainers.llamafactory.key_list import defaults_of
from topoplan.trainers.llamafactory.mca_job import of_stage
from topoplan.trainers.llamafactory.mca_refusals import STAGES
from topoplan.trainers.llamafactory.plain_refusals import FREEZABLE_MODEL_TYPES, LIGER_MODEL_TYPES
from topoplan.trainers.megatron_keys import check_something_trained, targets
from topoplan.units import shown

_OFF: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "use_llama_pro", "use_dora"),
            *("use_unsloth", "use_unsloth_gc", "use_kt", "shift_attn", "fp8", "upcast_lmhead_output"),
            *("use_asft_loss", "use_dft_loss", "use_eaft_loss"),
        ),
        (False,),
    ),
    **dict.fromkeys(("additional_target", "freeze_extra_modules", "parallelism_config", "ref_model"), ("",)),
    "mixture_of_depths": (False, "load"),
    "freeze_trainable_modules": ("all",),
    "quantization_method": ("bnb", "bitsandbytes"),
    "optim_target_modules": ("",),
}
"""Keys that change memory or time in ways that no formula covers, and the values that disable them."""


def _allocates(reading: Reading, _: str) -> bool:
    launch, said = reading.launch, expandable_segments(reading.launch)
    if said is not None:
        return said
    # launcher.py sets the variable when it starts torchrun itself, as it does on more than one GPU.
    by_itself = launch is None or (launch.program == "llamafactory-cli" and not launch.starter)
    return by_itself and reading.world > 1


def _presets(layout: Layout) -> tuple[str, str]:
    """Return the names of LLaMA-Factory's example files (examples/deepspeed/), or what a file must contain."""
    zero = zero_preset(layout, "ds_z", "_config.json", stages=(2, 3))
    return zero, f"FSDP2{' with fsdp_offload_params' if layout.offload else ''}"


def _why_accumulation(spec: Spec, layout: Layout) -> str:
    batch = layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp
    what = "pairs" if spec.job.sequences_per_sample > 1 else "sequences"
    return f"micro batch * this * {layout.dp} GPUs = {batch} {what} per step"


def _why_checkpointing(_: Spec, layout: Layout) -> str:
    again = "each layer is recomputed in backward; LLaMA-Factory's default"
    return "activations are kept" if layout.recompute.granularity == "none" else again


ROWS = by_key(
    *sharding_rows(_presets),
    Row("gradient_accumulation_steps", "gradient_accumulation_steps", comment=_why_accumulation),
    recompute_row("disable_gradient_checkpointing", _why_checkpointing, off=True),
    # model/model_utils/liger_kernel.py: only for these types; stages that need the logits disable the fused loss.
    liger_row(
        "enable_liger_kernel",
        LIGER_MODEL_TYPES,
        lambda keys: keys.value("stage") == "dpo",
        "the full logits are never in memory",
    ),
    replace(ALLOCATOR_ROW, read=_allocates),
)


def _layout(reading: Reading) -> Layout:
    launch = reading.launch
    if reading.keys.given("ray_num_workers") is not None and (launch is None or launch.variable("USE_RAY")):
        # train/tuner.py::_ray_training_function: Ray places the workers wherever it has GPUs.
        reading.keys.not_predicted(
            ("ray_num_workers",), "training under Ray", remedy="leave ray_num_workers out to plan it without"
        )
    return read_layout(ROWS, reading)


def _assumptions(reading: Reading, _: Layout, __: Job) -> Iterator[str]:
    if reading.launch is None:
        yield "started with `llamafactory-cli train`, as no command was given"


def _job(reading: Reading, layout: Layout, seq_len: int) -> Job:
    keys, sharding = reading.keys, reading.sharding
    refuse(keys, _OFF)
    if not keys.flag("do_train"):
        others = [key for key in ("do_predict", "do_eval") if keys.flag(key)]
        if others or not is_for_training(keys.configuration):
            keys.not_predicted(
                (*others, "model_name_or_path"), "a run that does not train", remedy="set do_train: true if it trains"
            )
    stage, method = keys.text("stage") or "sft", keys.text("finetuning_type")
    if stage not in (stages := (*STAGES, "kto")):
        keys.not_predicted(("stage",), remedy=f"predicted are {listed(stages)}")
    if method not in ("full", "freeze", "lora"):
        keys.not_predicted(("finetuning_type",), remedy="predicted are full, freeze and lora")
    bits = keys.count("quantization_bit")
    if bits is not None and (bits not in (4, 8) or method != "lora"):
        keys.not_predicted(("quantization_bit",), remedy="predicted are 4 and 8 bits, with finetuning_type lora")
    pure = keys.flag("pure_bf16")
    if not (pure or keys.flag("bf16") or keys.flag("fp16")):
        keys.not_predicted(("bf16",), "training with neither bf16 nor fp16", remedy="set bf16: true, or fp16: true")
    if keys.flag("bf16") and keys.flag("fp16"):
        keys.not_predicted(
            ("fp16",), "training with both bf16 and fp16", remedy="keep one of them: the trainer refuses both"
        )
    layers = as_whole(keys.value("freeze_trainable_layers"))
    if not layers or abs(layers) > 1000:
        keys.fail(
            "freeze_trainable_layers", f"freeze_trainable_layers is {shown(layers)}", expected="expected a number"
        )
    apart = stage == "sft" and keys.flag("neat_packing")
    job = Job(
        seq_len=seq_len,
        global_batch_size=layout.micro_batch_size * layout.gradient_accumulation_steps * layout.dp,
        precision="fp16" if keys.flag("fp16") else "bf16",
        finetuning="qlora" if bits else str(method),
        **of_stage(reading, stage, apart=apart, freezes=reading.model.model_type in FREEZABLE_MODEL_TYPES),
        lora_rank=keys.count("lora_rank"),
        lora_dropout=keys.fraction("lora_dropout"),
        lora_target=targets(keys, "lora_target") or ("all",),
        quantization_bit=bits,
        freeze_trainable_layers=layers,
        pure_bf16=pure and not _keeps_fp32(sharding),
        optimizer=optimizer_of(keys),
    )
    check_something_trained(keys, "freeze_language_model", job)
    return job


def _keeps_fp32(sharding: StatedSharding) -> bool:
    """Whether trained weights are kept in fp32 despite pure_bf16.

    With mixed precision, accelerate casts what FSDP2 trains to fp32. DeepSpeed's stages 1 and 2 have fp32 weights of
    their own (`stage_1_and_2.py`). With stage 3, LLaMA-Factory refuses the key.
    """
    return (sharding.backend == "fsdp2" and sharding.casts) or sharding.zero_stage in (1, 2)


CODEC = Codec(
    reads="plain",
    rows=ROWS,
    defaults=partial(defaults_of, "plain"),
    length="cutoff_len",
    shards=True,
    layout=_layout,
    job=_job,
    carries=carried,
    takes=partial(takes, path="plain"),
    tells_faults=True,
    assumptions=_assumptions,
)
