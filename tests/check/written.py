"""Setups made by hand: configurations and commands as the readers give them."""

from __future__ import annotations

from typing import Any

from topoplan.check.parts import Part
from topoplan.check.setup import Configuration, Launch, Option, Setup, Trainer, Variable
from topoplan.specs.source import parse_source

FULL_YAML = """\
# Qwen3-VL-8B on 32 GPUs, as an article has it
model_name_or_path: Qwen/Qwen3-VL-8B-Instruct
stage: sft
do_train: true
finetuning_type: full
freeze_vision_tower: false
freeze_multi_modal_projector: false
freeze_language_model: false
dataset: your_dataset
cutoff_len: 4096
image_max_pixels: 451584
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
tensor_model_parallel_size: 4  # 4 GPUs
pipeline_model_parallel_size: 1
sequence_parallel: false
apply_rope_fusion: true
use_distributed_optimizer: true
overlap_param_gather: true
overlap_grad_reduce: true
"""


def configuration(
    text: str, *, trainer: Trainer = "llamafactory", name: str = "train.yaml", from_command: bool = False
) -> Configuration:
    """Keys with their values."""
    part = Part(kind="shell" if from_command else "yaml", name=name, text=text)
    return Configuration(trainer=trainer, part=part, source=parse_source(text, name=name), from_command=from_command)


def mca(**keys: Any) -> Configuration:
    """A Megatron configuration of Qwen3-8B with these keys."""
    lines = {"model_name_or_path": "Qwen/Qwen3-8B", "finetuning_type": "full", "bf16": True} | keys
    lines = {"tensor_model_parallel_size": 1} | lines
    return configuration("".join(f"{key}: {_yaml(value)}\n" for key, value in lines.items()))


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def launch(
    program: str = "llamafactory-cli",
    *arguments: str,
    starter: Any = "torchrun",
    options: dict[str, str] | None = None,
    variables: dict[str, str] | None = None,
    of: Configuration | None = None,
    name: str = "run.sh",
) -> Launch:
    """One command, on line 3 of a script."""
    part = Part(kind="shell", name=name, text="#!/bin/bash\n\n...\n")
    return Launch(
        part=part,
        first_line=3,
        last_line=3,
        starter=starter,
        options={key: Option(value=value, line=3) for key, value in (options or {}).items()},
        program=program,
        arguments=arguments,
        variables=tuple(Variable(name=key, value=value, part=part, line=1) for key, value in (variables or {}).items()),
        configuration=of,
    )


def setup(*configurations: Configuration, launches: tuple[Launch, ...] = ()) -> Setup:
    """All of it together."""
    parts = dict.fromkeys([one.part for one in configurations] + [one.part for one in launches])
    return Setup(parts=tuple(parts), configurations=configurations, launches=launches)


def swift_zero2(**keys: Any) -> tuple[Configuration, Setup]:
    """Qwen3-30B-A3B, full, under ZeRO-2 on five GPUs, as a guide explains it."""
    text = "".join(
        f"{key}: {_yaml(value)}\n"
        for key, value in (
            {"model": "Qwen/Qwen3-30B-A3B-Thinking-2507", "train_type": "full", "deepspeed": "zero2"} | keys
        ).items()
    )
    command = configuration(text, trainer="swift", name="guide.md", from_command=True)
    return command, setup(
        command,
        launches=(launch("swift", "sft", options={"nproc_per_node": "5", "no_python": ""}, of=command),),
    )
