"""Setups made by hand from small texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from topoplan.check.edits import applied
from topoplan.check.finding import Finding
from topoplan.check.parts import Part, PartKind
from topoplan.check.setup import Configuration, Setup, Trainer, Variable
from topoplan.specs.source import Source, parse_source

Findings = Callable[[Setup], Iterator[Finding]]


def make_setup(
    text: str,
    trainer: Trainer = "llamafactory",
    *,
    kind: PartKind = "yaml",
    name: str = "train.yaml",
    variables: Mapping[str, str] | None = None,
) -> Setup:
    """One configuration in a file, and variables that a script sets."""
    part = Part(kind=kind, name=name, text=text)
    script = Part(kind="shell", name="run.sh", text="")
    return Setup(
        parts=(part,),
        configurations=(Configuration(trainer=trainer, part=part, source=parse_source(text, name=name)),),
        variables=tuple(
            Variable(name=key, value=value, part=script, line=1) for key, value in (variables or {}).items()
        ),
    )


def make_command(arguments: Mapping[str, Any], trainer: Trainer = "swift", *, program: str = "swift sft") -> Setup:
    """One configuration from the arguments of a command, an argument a line."""
    lines = [program, *(f"    --{key} {value}" for key, value in arguments.items())]
    text = " \\\n".join(lines) + "\n"
    part = Part(kind="shell", name="run.sh", text=text)
    source = Source(
        name="run.sh", data=dict(arguments), lines={(key,): line for line, key in enumerate(arguments, start=2)}
    )
    return Setup(
        parts=(part,),
        configurations=(Configuration(trainer=trainer, part=part, source=source, from_command=True),),
    )


def make_values(data: dict[str, Any], trainer: Trainer = "llamafactory") -> Setup:
    """A configuration of any values, which no text needs to hold."""
    part = Part(kind="yaml", name="train.yaml", text="\n" * 40)
    lines = {(key,): line for line, key in enumerate(data, start=1)}
    source = Source(name="train.yaml", data=data, lines=lines, old_booleans=frozenset(list(lines)[::2]))
    return Setup(parts=(part,), configurations=(Configuration(trainer=trainer, part=part, source=source),))


def joined(first: Setup, second: Setup) -> Setup:
    """Both in one setup."""
    return Setup(
        parts=first.parts + second.parts,
        configurations=first.configurations + second.configurations,
        launches=first.launches + second.launches,
        variables=first.variables + second.variables,
    )


def rules(findings: Findings, setup: Setup) -> list[str]:
    """Names of the rules that were broken, in order."""
    return [finding.rule for finding in findings(setup)]


def only(findings: Findings, setup: Setup, rule: str) -> Finding:
    """The one finding of a rule."""
    matching = [finding for finding in findings(setup) if finding.rule == rule]
    assert len(matching) == 1, [finding.rule for finding in findings(setup)]
    return matching[0]


def fixed(finding: Finding) -> str:
    """The text of its part, with the edits made."""
    return applied(finding.part.text, finding.edits)


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
"""A LLaMA-Factory job with nothing wrong."""

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
"""A job of the Megatron path with nothing wrong."""

MOE = MEGATRON.replace("Qwen3-8B", "Qwen3-30B-A3B") + (
    "expert_model_parallel_size: 4\nexpert_tensor_parallel_size: 1\n"
    "moe_token_dispatcher_type: alltoall\nmoe_grouped_gemm: true\n"
)


def with_lines(text: str, lines: str) -> str:
    """The text with keys of its own replaced, and others added at its end."""
    keys = {line.partition(":")[0] for line in lines.splitlines()}
    kept = [line for line in text.splitlines() if line.partition(":")[0] not in keys]
    return "\n".join([*kept, *(line for line in lines.splitlines() if not line.endswith(": -"))]) + "\n"
