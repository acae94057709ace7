"""Setups built by hand or read from small texts."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from topoplan.reading.edits import applied
from topoplan.reading.finding import Finding
from topoplan.reading.parts import Part, PartKind
from topoplan.reading.read_setup import read_setup
from topoplan.reading.recognizer import of_program
from topoplan.reading.setup import Configuration, Launch, Option, Setup, Trainer, Variable
from topoplan.specs.source import Source, parse_source
from topoplan.trainers.recognizers import recognizers

# From texts and values ------------------------------------------------------------------------------------------------


def setup_of(text: str, *, name: str = "run.sh", **others: str) -> Setup:
    """Return the setup of one file; `others` are files beside it: `a_yaml="stage: sft"` is a.yaml."""
    with TemporaryDirectory() as directory:
        for other, content in others.items():
            (Path(directory) / other.replace("_", ".")).write_text(content, encoding="utf-8")
        path = Path(directory) / name
        path.write_bytes(text.encode())
        return read_setup([str(path)], recognizers())


def make_setup(
    text: str,
    trainer: Trainer = "llamafactory",
    *,
    kind: PartKind = "yaml",
    name: str = "train.yaml",
    variables: Mapping[str, str] | None = None,
) -> Setup:
    """Return a setup with one configuration file, and variables that a script sets."""
    part = Part(kind=kind, name=name, text=text)
    script = Part(kind="shell", name="run.sh", text="")
    return Setup(
        parts=(part,),
        configurations=(Configuration(trainer=trainer, part=part, source=parse_source(text, name=name)),),
        variables=tuple(
            Variable(name=key, value=value, part=script, line=1) for key, value in (variables or {}).items()
        ),
        recognizers=recognizers(),
    )


def make_command(arguments: Mapping[str, Any], trainer: Trainer = "swift", *, program: str = "swift sft") -> Setup:
    """Return a setup with one configuration from the arguments of a command, one argument per line."""
    lines = [program, *(f"    --{key} {value}" for key, value in arguments.items())]
    text = " \\\n".join(lines) + "\n"
    part = Part(kind="shell", name="run.sh", text=text)
    source = Source(
        name="run.sh", data=dict(arguments), lines={(key,): line for line, key in enumerate(arguments, start=2)}
    )
    return Setup(
        parts=(part,),
        configurations=(Configuration(trainer=trainer, part=part, source=source, from_command=True),),
        recognizers=recognizers(),
    )


def make_values(data: dict[str, Any], trainer: Trainer = "llamafactory") -> Setup:
    """Return a configuration with arbitrary values, which need not be expressible as text."""
    part = Part(kind="yaml", name="train.yaml", text="\n" * 40)
    lines = {(key,): line for line, key in enumerate(data, start=1)}
    source = Source(name="train.yaml", data=data, lines=lines, old_booleans=frozenset(list(lines)[::2]))
    configuration = Configuration(trainer=trainer, part=part, source=source)
    return Setup(parts=(part,), configurations=(configuration,), recognizers=recognizers())


# As the readers give them ---------------------------------------------------------------------------------------------

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
    """Return a configuration with the keys in a text."""
    part = Part(kind="shell" if from_command else "yaml", name=name, text=text)
    return Configuration(trainer=trainer, part=part, source=parse_source(text, name=name), from_command=from_command)


def mca(**keys: Any) -> Configuration:
    """Return a Megatron configuration of Qwen3-8B with these keys."""
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
    """Return one command, on line 3 of a script."""
    part = Part(kind="shell", name=name, text="#!/bin/bash\n\n...\n")
    return Launch(
        part=part,
        first_line=3,
        last_line=3,
        starter=starter,
        options={key: Option(value=value, line=3) for key, value in (options or {}).items()},
        program=program,
        trains=of_program(recognizers(), program),
        arguments=arguments,
        variables=tuple(Variable(name=key, value=value, part=part, line=1) for key, value in (variables or {}).items()),
        configuration=of,
    )


def all_of(*configurations: Configuration, launches: tuple[Launch, ...] = ()) -> Setup:
    """Return a setup of these configurations and launches."""
    parts = dict.fromkeys([one.part for one in configurations] + [one.part for one in launches])
    return Setup(parts=tuple(parts), configurations=configurations, launches=launches, recognizers=recognizers())


def swift_zero2(**keys: Any) -> tuple[Configuration, Setup]:
    """Return a guide's command for full fine-tuning of Qwen3-30B-A3B with ZeRO-2 on five GPUs, and its setup."""
    text = "".join(
        f"{key}: {_yaml(value)}\n"
        for key, value in (
            {"model": "Qwen/Qwen3-30B-A3B-Thinking-2507", "train_type": "full", "deepspeed": "zero2"} | keys
        ).items()
    )
    command = configuration(text, trainer="swift", name="guide.md", from_command=True)
    return command, all_of(
        command,
        launches=(launch("swift", "sft", options={"nproc_per_node": "5", "no_python": ""}, of=command),),
    )


# Corrections ----------------------------------------------------------------------------------------------------------


def fixed(finding: Finding) -> str:
    """Return the text of the finding's part with its edits applied."""
    assert finding.edits
    return applied(finding.part.text, finding.edits)


# Jobs -----------------------------------------------------------------------------------------------------------------

PLAIN = """model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: lora
dataset: identity
template: qwen3
cutoff_len: 4096
output_dir: saves/a
learning_rate: 1.0e-4
bf16: true
"""
"""A LLaMA-Factory job without faults."""

FULL = PLAIN.replace("finetuning_type: lora", "finetuning_type: full").replace("1.0e-4", "1.0e-5")

MEGATRON = """model_name_or_path: models/Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: full
dataset: identity
template: qwen3
cutoff_len: 4096
output_dir: saves/a
save_hf_model: true
learning_rate: 1.0e-5
bf16: true
tensor_model_parallel_size: 2
sequence_parallel: true
use_distributed_optimizer: true
"""
"""A job of the Megatron path without faults."""

MOE = MEGATRON.replace("Qwen3-8B", "Qwen3-30B-A3B") + (
    "expert_model_parallel_size: 4\nexpert_tensor_parallel_size: 1\n"
    "moe_token_dispatcher_type: alltoall\nmoe_grouped_gemm: true\n"
)


def with_lines(text: str, lines: str) -> str:
    """Return the text with some keys replaced, and others added at its end."""
    keys = {line.partition(":")[0] for line in lines.splitlines()}
    kept = [line for line in text.splitlines() if line.partition(":")[0] not in keys]
    return "\n".join([*kept, *(line for line in lines.splitlines() if not line.endswith(": -"))]) + "\n"
