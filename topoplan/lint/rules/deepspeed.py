"""A DeepSpeed configuration: a JSON file of its own, or the `deepspeed:` block of a trainer's YAML.

Sources: DeepSpeed 0.19 `runtime/config.py`, `runtime/config_utils.py` (blocks forbid unknown keys, and drop "auto"),
`runtime/zero/config.py`, `runtime/zero/offload_config.py`; transformers 5.6.0 `integrations/deepspeed.py` (fill_match).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.errors import listed
from topoplan.lint.rules.deepspeed_document import ZERO, Document, documents
from topoplan.lint.rules.deepspeed_keys import key_findings
from topoplan.reading.edits import add, change, drop
from topoplan.reading.finding import Finding
from topoplan.reading.found import found
from topoplan.reading.processes import launch_of
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.values import as_number, as_whole, at, flag, value_of, whole
from topoplan.specs.source import KeyPath
from topoplan.trainers.llamafactory.key_list import plain_keys
from topoplan.units import shown

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_SAME: tuple[tuple[KeyPath, str], ...] = (
    (("train_micro_batch_size_per_gpu",), "per_device_train_batch_size"),
    (("gradient_accumulation_steps",), "gradient_accumulation_steps"),
    (("gradient_clipping",), "max_grad_norm"),
    (("optimizer", "params", "lr"), "learning_rate"),
    (("optimizer", "params", "eps"), "adam_epsilon"),
    (("optimizer", "params", "weight_decay"), "weight_decay"),
    (("scheduler", "params", "warmup_max_lr"), "learning_rate"),
    (("fp16", "enabled"), "fp16"),
    (("bf16", "enabled"), "bf16"),
)
"""What HfTrainerDeepSpeedConfig.trainer_config_process compares with the trainer's arguments."""


def findings(setup: Setup) -> Iterator[Finding]:
    """What is wrong in the DeepSpeed configurations."""
    for document in documents(setup):
        yield from key_findings(document)
        yield from _precision(document)
        yield from _batch(document)
        yield from _trainer(document)
        yield from _offload(document)
        yield from _stages(document)
        yield from _with_llamafactory(document)
    yield from _beside_fsdp(setup)


# Precision and batch --------------------------------------------------------------------------------------------------


def _precision(document: Document) -> Iterator[Finding]:
    half, brain = document.get("fp16", "enabled") is True, document.get("bf16", "enabled") is True
    if half and brain:
        yield document.finding(
            "two-precisions",
            "error",
            ("fp16", "enabled"),
            "fp16 and bf16 are both enabled",
            why="DeepSpeedConfig: 'bfloat16 and fp16 modes cannot be simultaneously enabled'",
            remedy="keep bf16, or fp16 on cards before Ampere",
            edits=change(document.holder, (*document.path, "fp16", "enabled"), value=False),
        )
    elif half:
        yield document.finding(
            "fp16",
            "note",
            ("fp16", "enabled"),
            "fp16 is enabled: numbers above 65504 overflow, and steps are skipped until the loss scale has come down",
            why="models published in bf16 (Qwen, Llama 3, DeepSeek) use a range that fp16 does not have; Ampere and"
            " later calculate both equally fast",
            remedy="enable bf16 instead, unless the cards are Volta or Turing",
        )


def _batch(document: Document) -> Iterator[Finding]:
    total, micro, steps = (as_whole(document.get(key)) for key in _BATCH)
    for key, value in zip(_BATCH, (total, micro, steps), strict=True):
        if value is not None and value < 1:
            yield document.finding("batch", "error", (key,), f"{key} is {shown(value)}", remedy="expected 1 or more")
            return
    if total is None or micro is None or steps is None:
        return
    words = f"train_batch_size {total} = train_micro_batch_size_per_gpu {micro} * gradient_accumulation_steps {steps}"
    if total % (micro * steps):
        yield document.finding(
            "batch",
            "error",
            ("train_batch_size",),
            f"{words} * GPUs holds for no number of GPUs: {total} % {micro * steps} = {total % (micro * steps)}",
            why="DeepSpeed asserts the equation",
            remedy='write "auto" for all three with the Hugging Face Trainer, or leave one out',
        )
        return
    gpus = total // (micro * steps)
    started = _world_size(document)
    if started is not None and started != gpus:
        yield document.finding(
            "batch",
            "error",
            ("train_batch_size",),
            f"{words} * GPUs holds for {gpus} GPUs, and {started} are started",
            why="DeepSpeed asserts the equation",
            remedy=f'write "auto" for all three, or train_batch_size {micro * steps * started}',
        )
    elif started is None:
        yield document.finding(
            "batch",
            "note",
            ("train_batch_size",),
            f"{words} * GPUs holds for {gpus} GPU{'' if gpus == 1 else 's'} alone: any other number is refused",
            remedy='with the Hugging Face Trainer write "auto" for all three, else leave train_batch_size out',
        )


def _world_size(document: Document) -> int | None:
    """GPUs that the one launch of the setup starts, where it says so."""
    if len(document.launches) != 1:
        return None
    options = document.launches[0].options
    sizes = [options[name].value if name in options else default for name, default in _COUNTS]
    if any(not size.isdecimal() or len(size) > 9 for size in sizes):
        return None
    return math.prod(int(size) for size in sizes) or None


_COUNTS = (("nproc_per_node", ""), ("nnodes", "1"))


# The trainer's own values ---------------------------------------------------------------------------------------------


def _trainer(document: Document) -> Iterator[Finding]:
    trainer = document.trainer
    if trainer is None:
        fixed = [".".join(map(str, path)) for path, _ in _SAME[:4] if document.get(*path) is not None]
        if fixed:
            path = next(path for path, _ in _SAME if document.get(*path) is not None)
            yield document.finding(
                "fixed-values",
                "note",
                path,
                f"{listed(fixed)} must equal what the trainer is given",
                why="transformers compares them and refuses a difference; LLaMA-Factory and ms-swift train with it",
                remedy='write "auto", and transformers fills in its own',
            )
        return
    for path, key in _SAME:
        value = document.get(*path)
        wanted = _argument(trainer, key)
        if value is None or wanted is None or value == wanted:
            continue
        name = ".".join(map(str, path))
        yield document.finding(
            "trainer-mismatch",
            "error",
            path,
            f"{name} is {shown(value)}, and {key} is {shown(wanted)}",
            why="transformers stops: 'Please correct the following DeepSpeed config values'",
            remedy=f'write "{name}": "auto"' if len(path) == 1 else f'write "auto" for {name}',
            edits=change(document.holder, (*document.path, *path), value="auto"),
        )


def _argument(trainer: Configuration, key: str) -> Any:
    """What the trainer uses for a key: as given, or LLaMA-Factory's default. None where it is not known."""
    given = value_of(trainer, key)
    if key in ("fp16", "bf16"):
        if trainer.trainer == "swift" and given is None:
            return None
        return flag(trainer, key)
    if given is None:
        return plain_keys()[key].default if trainer.trainer == "llamafactory" else None
    return as_number(given)


# Offload and stages ---------------------------------------------------------------------------------------------------


def _offload(document: Document) -> Iterator[Finding]:
    stage = document.stage
    optimizer, parameters = document.get(ZERO, "offload_optimizer"), document.get(ZERO, "offload_param")
    for key, block, stages in (("offload_optimizer", optimizer, "1, 2 or 3"), ("offload_param", parameters, "3")):
        device = at(block, ("device",))
        if device not in ("cpu", "nvme"):
            continue
        path: KeyPath = (ZERO, key)
        if (stage == 0) if key == "offload_optimizer" else (stage != 3):
            yield document.finding(
                "offload-without-stage",
                "warning",
                path,
                f"{key} has no effect with ZeRO stage {stage}: it works with stage {stages}",
                remedy="raise the stage, or take it out",
            )
        elif device == "nvme" and stage == 3 and not at(block, ("nvme_path",)):
            yield document.finding(
                "nvme-path",
                "error",
                path,
                f"{key} goes to nvme, and nvme_path does not say where",
                remedy='add "nvme_path": a directory on a local NVMe disk',
            )
    ratio = as_number(at(optimizer, ("ratio",)))
    if ratio is not None and 0 <= ratio < 1 and stage != 3:
        yield document.finding(
            "partial-offload",
            "error",
            (ZERO, "offload_optimizer", "ratio"),
            f"ratio {ratio:g} with ZeRO stage {stage}: a part of the optimizer is offloaded with stage 3 alone",
            why="DeepSpeedZeroConfig: 'Partial offloading only supported for ZeRO Stage 3'",
            remedy="take it out, or set stage 3",
            edits=drop(document.holder, (*document.path, ZERO, "offload_optimizer", "ratio")),
        )


def _stages(document: Document) -> Iterator[Finding]:
    stage = document.stage
    activations = document.get("activation_checkpointing")
    if isinstance(activations, Mapping):
        acts = any(activations.get(key) for key in activations)
        yield document.finding(
            "activation-checkpointing",
            "warning" if acts else "note",
            ("activation_checkpointing",),
            "activation_checkpointing is not read by the Hugging Face Trainer: it saves and offloads nothing",
            why="it configures deepspeed.checkpointing, which only programs that call it use (Megatron-DeepSpeed)",
            remedy="take it out; the Trainer's key is gradient_checkpointing, and LLaMA-Factory recomputes by itself",
            edits=drop(document.holder, (*document.path, "activation_checkpointing")),
        )
    lora = document.trainer is not None and (
        document.trainer.get("finetuning_type") == "lora" or document.trainer.get("tuner_type") == "lora"
    )
    gathers = [
        document.get(ZERO, key)
        for key in (
            "stage3_gather_16bit_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        )
    ]
    if stage == 3 and not lora and not any(gathers):
        key = "stage3_gather_16bit_weights_on_model_save"
        place = (*document.path, ZERO, key)
        yield document.finding(
            "weights-not-gathered",
            "warning",
            (ZERO, key) if document.get(ZERO, key) is not None else (ZERO, "stage"),
            f"ZeRO-3 without {key}: checkpoints hold shards alone, and no model that vLLM or Transformers can load",
            why="transformers then saves an empty model, and says 'use zero_to_fp32.py to recover weights'",
            remedy=f'set "{key}": true',
            edits=change(document.holder, place, value=True)
            if at(document.data, (ZERO, key)) is not None
            else add(document.holder, (*document.path, ZERO, "stage"), key, True),
        )
    if stage != 3 and document.get(ZERO) is not None:
        for key in ("zero_quantized_weights", "zero_hpz_partition_size", "zero_quantized_nontrainable_weights"):
            value = document.get(ZERO, key)
            if (value and value != 1) or value is True:
                yield document.finding(
                    "stage3-key",
                    "warning",
                    (ZERO, key),
                    f"{key} has no effect with ZeRO stage {stage}: engine.py passes it on for stage 3 alone",
                    remedy="take it out, or set stage 3",
                )


def _beside_fsdp(setup: Setup) -> Iterator[Finding]:
    """`accelerate launch` with FSDP, and DeepSpeed in the trainer's own file: accelerate 1.11, `state.py`,
    AcceleratorState.__init__ asks for DeepSpeed first."""
    told = [one for one in setup.of("accelerate") if one.get("distributed_type") == "FSDP"]
    for trainer in setup.of("llamafactory", "swift"):
        launch = launch_of(setup, trainer)
        if told and value_of(trainer, "deepspeed") and launch is not None and launch.starter == "accelerate":
            yield found(
                trainer,
                "deepspeed-beside-fsdp",
                "warning",
                "deepspeed",
                f"deepspeed, and FSDP in {told[0].part.name}: DeepSpeed shards, and fsdp_config is not used",
                why="accelerate takes DeepSpeed where both are set up",
                remedy="take deepspeed out to train with FSDP, or start it with torchrun",
            )


def _with_llamafactory(document: Document) -> Iterator[Finding]:
    """What LLaMA-Factory refuses with ZeRO-3: `hparams/parser.py::get_train_args`, `model_utils/quantization.py`."""
    trainer = document.trainer
    if trainer is None or trainer.trainer != "llamafactory" or document.stage != 3:
        return
    refused = [
        key
        for key in ("predict_with_generate", "pure_bf16", "pissa_init", "use_unsloth", "use_kt")
        if flag(trainer, key)
    ]
    bits, method = whole(trainer, "quantization_bit"), trainer.get("quantization_method", "bnb")
    if bits is not None and (bits != 4 or method in ("hqq", "eetq")):
        refused.append("quantization_bit")
    for key in refused:
        value = f" {bits}" if key == "quantization_bit" else ""
        yield found(
            trainer,
            "deepspeed-zero3-conflict",
            "error",
            key,
            f"{key}{value} with ZeRO-3 is refused by LLaMA-Factory",
            remedy="use ZeRO-2, or take it out"
            + ("; quantized weights go with ZeRO-3 in 4 bits with bitsandbytes alone" if value else ""),
        )
