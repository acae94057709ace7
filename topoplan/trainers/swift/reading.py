"""Recognition of ms-swift's files and commands, for `swift sft` and `megatron sft`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from topoplan.reading.recognizer import Recognizer
from topoplan.trainers.swift.arguments import arguments_of

_MARKS = frozenset(["train_type", "tuner_type", "torch_dtype", "max_length", "split_dataset_ratio", "model", "ENV"])
_MARKS_OF_MEGATRON = frozenset(
    [
        *("micro_batch_size", "global_batch_size", "train_iters", "mcore_model", "lr_warmup_fraction", "no_save_optim"),
        *("no_save_rng", "load_safetensors", "attention_backend", "cross_entropy_loss_fusion", "finetune"),
    ]
)
_METHODS = "sft|pt|rlhf"
_SUBCOMMANDS = (
    *("pt", "sft", "infer", "merge-lora", "web-ui", "deploy", "rollout", "rlhf", "sample", "export", "eval"),
    *("app", "merge_lora", "web_ui"),
)
_CLI = re.compile(r"(?:.*[/\s(`])?(swift|megatron)[\s)`'\"]*", re.DOTALL)
_FILE = re.compile(rf"(?:.*/)?swift[./]cli[./](_megatron[./])?({_METHODS})(?:\.py)?")


def _claim(data: Mapping[str, Any], known: int) -> float:
    is_likely = known < len(data) and data.keys() <= arguments_of("swift sft").types.keys()
    return 2.0 * len(data.keys() & _MARKS) or (0.5 if is_likely else 0.0)


def _claim_megatron(data: Mapping[str, Any], _known: int) -> float:
    return 2.0 * len(data.keys() & _MARKS_OF_MEGATRON) + ("model" in data)


def _usual(text: str, _module: bool) -> str:
    if match := _FILE.fullmatch(text):
        return f"swift.cli.{match.group(1) or ''}{match.group(2)}".replace("/", ".")
    return match.group(1) if (match := _CLI.fullmatch(text)) else ""


SWIFT = Recognizer(
    trainer="swift",
    package="ms-swift",
    claim=_claim,
    model_keys=("model",),
    names=("swift",),
    rule_name_of=_usual,
    command="swift",
    methods=_METHODS,
    subcommands=_SUBCOMMANDS,
    starts_torchrun=True,
    spreads_models=True,
    programs=r"swift|swift\.cli\.(?!_megatron\.).*",
    program_substring="swift",
    takes_deepspeed=True,
    text_keys=("system", "new_special_tokens"),
)
MEGATRON = Recognizer(
    trainer="swift-megatron",
    claim=_claim_megatron,
    model_keys=("model",),
    names=("megatron",),
    rule_name_of=_usual,
    command="megatron",
    methods=_METHODS,
    subcommands=("pt", "sft", "rlhf", "export"),
    starts_torchrun=True,
    spreads_models=True,
    programs=r"megatron|swift\.cli\._megatron\..*",
    program_substring="megatron",
    text_keys=("system", "new_special_tokens"),
)
