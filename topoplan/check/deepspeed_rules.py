"""A DeepSpeed configuration: a JSON file of its own, or the `deepspeed:` block of a trainer's YAML.

Sources: DeepSpeed 0.19 `runtime/config.py`, `runtime/config_utils.py` (blocks forbid unknown keys, and drop "auto"),
`runtime/zero/config.py`, `runtime/zero/offload_config.py`; transformers 5.6.0 `integrations/deepspeed.py` (fill_match).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from topoplan import catalog
from topoplan.check.edits import add, change, drop
from topoplan.check.finding import Edit, Finding, Severity
from topoplan.check.models import known_model
from topoplan.check.setup import Configuration, Launch, Setup
from topoplan.check.values import as_number, as_whole, at, flag, value_of, whole
from topoplan.emit.trainer_keys import plain_keys
from topoplan.errors import nearest
from topoplan.specs.source import KeyPath, plain_scalar
from topoplan.units import format_gib, shown

_ZERO = "zero_optimization"
_DEVICES = ("none", "cpu", "nvme")
_BOOLEAN_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "t", "f", "y", "n", "0", "1"})
"""pydantic's."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """One DeepSpeed configuration, wherever it stands."""

    holder: Configuration
    path: KeyPath
    """Where it begins in `holder`; empty for a file of its own."""
    data: Mapping[str, Any]
    trainer: Configuration | None
    """The configuration that uses it."""
    launches: tuple[Launch, ...]

    def get(self, *path: str | int) -> Any:
        """The value at a path; None also for "auto", which DeepSpeed drops and the trainer fills in."""
        value = at(self.data, path)
        return None if value == "auto" else value

    @property
    def stage(self) -> int:
        """ZeRO stage; 0 where it is none."""
        stage = as_whole(self.get(_ZERO, "stage"))
        return stage if stage in (1, 2, 3) else 0

    def finding(
        self,
        rule: str,
        severity: Severity,
        path: KeyPath,
        what: str,
        *,
        why: str = "",
        remedy: str = "",
        edits: tuple[Edit, ...] = (),
    ) -> Finding:
        """A finding at a path of the document."""
        return Finding(
            rule=f"deepspeed-{rule}",
            severity=severity,
            part=self.holder.part,
            line=self.holder.line(*self.path, *path),
            what=what,
            why=why,
            remedy=remedy,
            edits=edits,
        )


def findings(setup: Setup) -> Iterator[Finding]:
    """What is wrong in the DeepSpeed configurations."""
    for document in _documents(setup):
        yield from _keys(document)
        yield from _precision(document)
        yield from _batch(document)
        yield from _trainer(document)
        yield from _offload(document)
        yield from _stages(document)
        yield from _with_llamafactory(document)


def _documents(setup: Setup) -> Iterator[_Document]:
    users = [
        one for one in setup.of("llamafactory", "swift") if one.get("deepspeed") is not None and not setup.uses_mca(one)
    ]
    for one in users:
        block = one.get("deepspeed")
        if isinstance(block, Mapping):
            yield _Document(holder=one, path=("deepspeed",), data=block, trainer=one, launches=setup.launches)
    files_named = [one for one in users if isinstance(one.get("deepspeed"), str)]
    own = list(setup.of("deepspeed"))
    for one in own:
        user = files_named[0] if len(files_named) == len(own) == 1 else None
        yield _Document(holder=one, path=(), data=one.source.data, trainer=user, launches=setup.launches)


# Keys ----------------------------------------------------------------------------------------------------------------


@cache
def _known() -> Mapping[str, Any]:
    path = files("topoplan.catalog").joinpath("trainer_keys", "deepspeed.json")
    document: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _keys(document: _Document) -> Iterator[Finding]:
    known = _known()
    for key in document.data:
        if key not in known["top"]:
            yield document.finding(
                "unknown-key",
                "warning",
                (key,),
                f"DeepSpeed has no key {shown(key)}, and does not read it",
                remedy=nearest(key, known["top"]) or "take it out",
                edits=() if nearest(key, known["top"]) else drop(document.holder, (*document.path, key)),
            )
    for name, fields in known["blocks"].items():
        path: KeyPath = tuple(name.split("."))
        block = document.get(*path)
        if block is None or (name == _ZERO and isinstance(block, bool)):
            continue
        if not isinstance(block, Mapping):
            yield document.finding(
                "wrong-value",
                "error",
                path,
                f"{name} is {shown(block)}",
                remedy="expected a block of keys" + (', such as {"device": "cpu"}' if "offload" in name else ""),
            )
            continue
        for key, value in block.items():
            yield from _field(document, name, (*path, key), fields, value)


def _field(document: _Document, block: str, path: KeyPath, fields: Mapping[str, str], value: Any) -> Iterator[Finding]:
    key = str(path[-1])
    if key not in fields:
        refuses = block != "activation_checkpointing"
        yield document.finding(
            "unknown-key",
            "error" if refuses else "warning",
            path,
            f"{block} has no key {shown(key)}, and {'the configuration is refused' if refuses else 'it is not read'}",
            remedy=nearest(key, fields) or "take it out",
        )
        return
    new = _known()["deprecated"].get(key)
    if new is not None:
        edits = change(document.holder, (*document.path, *path), name=new) if new.startswith("stage3_") else ()
        what = f"{key} is deprecated: {new} has taken its place"
        yield document.finding("deprecated-key", "note", path, what, remedy=f"write {new}", edits=edits)
    if block != "activation_checkpointing" and (expected := _unfit(key, fields[key], value)):
        meant = plain_scalar(value) if isinstance(value, str) and fields[key] == "int" else None
        fits = isinstance(meant, int | float) and not isinstance(meant, bool) and float(meant).is_integer()
        yield document.finding(
            "wrong-value",
            "error",
            path,
            f"{block}.{key} is {shown(value)}",
            why="DeepSpeed checks the type when it starts",
            remedy=f"expected {expected}",
            edits=change(document.holder, (*document.path, *path), value=int(meant)) if fits and meant else (),
        )


def _unfit(key: str, kind: str, value: Any) -> str:
    """What was expected in place of a value that pydantic refuses; empty where it takes it."""
    if value is None or value == "auto" or (isinstance(value, bool) and kind in ("bool", "int", "float")):
        return ""
    if key == "stage":
        return "" if as_whole(value) in (0, 1, 2, 3) else "0, 1, 2 or 3"
    if key == "device":
        return "" if value in _DEVICES else "none, cpu or nvme"
    if kind == "bool":
        taken = value in (0, 1) if isinstance(value, int | float) else isinstance(value, str)
        words = not isinstance(value, str) or value.lower() in _BOOLEAN_WORDS
        return "" if taken and words else "true or false"
    if kind in ("int", "float"):
        if isinstance(value, str):
            return "" if value.strip().lstrip("+-").isdigit() or kind == "float" else "a number, without quotes"
        fits = as_whole(value) is not None if kind == "int" else as_number(value) is not None
        return "" if fits else "a whole number" if kind == "int" else "a number"
    if kind == "dict":
        told = key in ("offload_param", "offload_optimizer")  # as blocks of their own
        return "" if told or isinstance(value, Mapping) else "a block of keys"
    return "" if isinstance(value, str) else "text"


# Precision and batch -------------------------------------------------------------------------------------------------


def _precision(document: _Document) -> Iterator[Finding]:
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


def _batch(document: _Document) -> Iterator[Finding]:
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


def _world_size(document: _Document) -> int | None:
    """GPUs that the one launch of the setup starts, where it says so."""
    if len(document.launches) != 1:
        return None
    options = document.launches[0].options
    sizes = [options[name].value if name in options else default for name, default in _COUNTS]
    if any(not size.isdecimal() or len(size) > 9 for size in sizes):
        return None
    return math.prod(int(size) for size in sizes) or None


_COUNTS = (("nproc_per_node", ""), ("nnodes", "1"))


# The trainer's own values --------------------------------------------------------------------------------------------


def _trainer(document: _Document) -> Iterator[Finding]:
    trainer = document.trainer
    if trainer is None:
        fixed = [".".join(map(str, path)) for path, _ in _SAME[:4] if document.get(*path) is not None]
        if fixed:
            path = next(path for path, _ in _SAME if document.get(*path) is not None)
            yield document.finding(
                "fixed-values",
                "note",
                path,
                f"{' and '.join(fixed)} must equal what the trainer is given",
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


# Offload and stages --------------------------------------------------------------------------------------------------


def _offload(document: _Document) -> Iterator[Finding]:
    stage = document.stage
    optimizer, parameters = document.get(_ZERO, "offload_optimizer"), document.get(_ZERO, "offload_param")
    for key, block, stages in (("offload_optimizer", optimizer, "1, 2 or 3"), ("offload_param", parameters, "3")):
        device = at(block, ("device",))
        if device not in ("cpu", "nvme"):
            continue
        path: KeyPath = (_ZERO, key)
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
            (_ZERO, "offload_optimizer", "ratio"),
            f"ratio {ratio:g} with ZeRO stage {stage}: a part of the optimizer is offloaded with stage 3 alone",
            why="DeepSpeedZeroConfig: 'Partial offloading only supported for ZeRO Stage 3'",
            remedy="take it out, or set stage 3",
            edits=drop(document.holder, (*document.path, _ZERO, "offload_optimizer", "ratio")),
        )
    yield from _host_memory(document)


def _host_memory(document: _Document) -> Iterator[Finding]:
    """`estimate_zero3_model_states_mem_needs` and `estimate_zero2_...` in DeepSpeed's `runtime/zero/stage*.py`."""
    if at(document.data, (_ZERO, "offload_optimizer", "device")) != "cpu" or document.trainer is None:
        return
    trainer = document.trainer
    name = trainer.get("model_name_or_path") if trainer.trainer == "llamafactory" else trainer.get("model")
    model = known_model(name, trainer.part)
    full = trainer.get("finetuning_type") if trainer.trainer == "llamafactory" else trainer.get("tuner_type")
    if model is None or full != "full" or not catalog.knows_model(model.name) or document.stage == 0:
        return
    parameters_too = document.stage == 3 and at(document.data, (_ZERO, "offload_param", "device")) == "cpu"
    per_parameter = 18 if parameters_too else 16
    needed = catalog.model_parameters(model.name) * per_parameter * 1.5
    yield document.finding(
        "host-memory",
        "note",
        (_ZERO, "offload_optimizer"),
        f"offloading takes about {format_gib(needed)} of host memory for {model.name}"
        f"{', over all nodes together' if document.stage == 3 else ' on one node'}",
        why=f"{per_parameter} bytes a parameter, and half as much again for buffers (DeepSpeed's own estimate)",
    )


def _stages(document: _Document) -> Iterator[Finding]:
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
        document.get(_ZERO, key)
        for key in (
            "stage3_gather_16bit_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        )
    ]
    if stage == 3 and not lora and not any(gathers):
        key = "stage3_gather_16bit_weights_on_model_save"
        place = (*document.path, _ZERO, key)
        yield document.finding(
            "weights-not-gathered",
            "warning",
            (_ZERO, key) if document.get(_ZERO, key) is not None else (_ZERO, "stage"),
            f"ZeRO-3 without {key}: checkpoints hold shards alone, and no model that vLLM or Transformers can load",
            why="transformers then saves an empty model, and says 'use zero_to_fp32.py to recover weights'",
            remedy=f'set "{key}": true',
            edits=change(document.holder, place, value=True)
            if at(document.data, (_ZERO, key)) is not None
            else add(document.holder, (*document.path, _ZERO, "stage"), key, True),
        )
    if stage != 3 and document.get(_ZERO) is not None:
        for key in ("zero_quantized_weights", "zero_hpz_partition_size", "zero_quantized_nontrainable_weights"):
            value = document.get(_ZERO, key)
            if (value and value != 1) or value is True:
                yield document.finding(
                    "stage3-key",
                    "warning",
                    (_ZERO, key),
                    f"{key} has no effect with ZeRO stage {stage}: engine.py passes it on for stage 3 alone",
                    remedy="take it out, or set stage 3",
                )


def _with_llamafactory(document: _Document) -> Iterator[Finding]:
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
        yield Finding(
            rule="deepspeed-zero3-conflict",
            severity="error",
            part=trainer.part,
            line=trainer.line(key),
            what=f"{key}{value} with ZeRO-3 is refused by LLaMA-Factory",
            remedy="use ZeRO-2, or take it out"
            + ("; quantized weights go with ZeRO-3 in 4 bits with bitsandbytes alone" if value else ""),
        )
