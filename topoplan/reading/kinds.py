"""Classify text by its form, before parsing: a launch, variable settings, or a complete configuration."""

from __future__ import annotations

import re
from collections.abc import Collection

from topoplan.reading.parts import PartKind

_GAP = r"(?:[ \t]|\\[ \t]*\r?\n)+"
_PYTHON = rf"python3?(?:\.\d+)?{_GAP}(?:-[uOBX]{_GAP})*"
_LAUNCHER = (
    rf"(?:torchrun|deepspeed|accelerate{_GAP}launch"
    rf"|{_PYTHON}-m{_GAP}(?:torch\.distributed\.(?:run|launch)|llamafactory\.\w+|accelerate\.commands\.launch))"
)
_PROGRAM = (
    rf"(?:\S{{0,300}}/)?(?:llamafactory-cli|lmf){_GAP}(?:train|sft|dpo|rm)|(?:swift|megatron){_GAP}(?:sft|pt|rlhf)"
    rf"|{_PYTHON}[^\s-]\S{{0,300}}\.py"
)
PROGRAMS = frozenset(["llamafactory-cli", "llamafactory.launcher", "megatron", "swift"])
"""Programs of trainers as guides spell them in a launch, before anything is parsed."""
_VARIABLES = rf"(?:[A-Za-z_]\w{{0,80}}=\S{{0,300}}{_GAP}){{0,20}}"
_WRAPPER = (
    r"(?:(?:nohup|sudo|exec|time|srun|env|numactl|ssh|bash|docker|eval|tmux|screen)[ \t]+(?:[^\n#]{0,300}?[ \t'\"])??)?"
)
_LAUNCH = re.compile(
    rf"^[ \t]*{_VARIABLES}{_WRAPPER}{_VARIABLES}(?:{_LAUNCHER}(?={_GAP}[-\w$.\"'/])|(?:{_PROGRAM})(?!\S))",
    re.MULTILINE | re.ASCII,
)
_RUN_MODULE = re.compile(r"^[^#\n]{0,300}?-m[ \t]+torch\.distributed\.(?:run|launch)\b", re.MULTILINE)
_EXPORT = re.compile(r"^[ \t]*export[ \t]+([A-Za-z_]\w*)=", re.MULTILINE)
_COMMAND_LINE = re.compile(
    rf"[ \t]*(?:export[ \t]+[A-Za-z_]\w*=\S|{_VARIABLES}(?:{_LAUNCHER}[ \t]+(?:--?\w|\S{{1,300}}\.py\b|\\)"
    rf"|(?:{_PROGRAM})[ \t]+(?:--?\w|\S{{1,300}}\.(?:ya?ml|json)\b|\\)))",
    re.ASCII,
)
_KEY = r"^[ \t]*(?:\{{[ \t]*)?[\"']?(?:{})[\"']?[ \t]*:"
_MODEL_KEY = re.compile(_KEY.format("model_name_or_path|model_path|model_id_or_path|mcore_model"), re.MULTILINE)
_SHORT_MODEL_KEY = re.compile(_KEY.format("model|load"), re.MULTILINE)
_DEEPSPEED_KEY = re.compile(_KEY.format("zero_optimization|train_micro_batch_size_per_gpu"), re.MULTILINE)
_ACCELERATE_KEY = re.compile(r"^(?:compute_environment|distributed_type)[ \t]*:", re.MULTILINE)
_TOP_KEY = re.compile(r"^([a-z][a-z0-9_]*):(?=\s|$)", re.MULTILINE)
_JOB_OPTION = re.compile(
    r"\s--(?:model|model_name_or_path|model-name-or-path|load|model_id_or_path)[ =]|\.(?:ya?ml|json)\b"
)


def starts_training(text: str) -> bool:
    """Whether a text contains a command that starts training."""
    return _LAUNCH.search(text) is not None or _RUN_MODULE.search(text) is not None


def looks_like_command(line: str) -> bool:
    """Whether a line outside any code block is a command, since prose may begin with `torchrun` too."""
    return _COMMAND_LINE.match(line) is not None


def sets_variables(text: str) -> bool:
    """Whether a text exports variables, each once: setting one repeatedly shows alternatives."""
    names = _EXPORT.findall(text)
    return bool(names) and len(set(names)) == len(names)


def names_a_job(text: str, keys: Collection[str], *, kind: PartKind = "shell", fragment: bool = False) -> bool:
    """Whether a text is complete: a command with a model or file, or a configuration with a model or of DeepSpeed.

    With `fragment`, any known keys of a trainer suffice; `keys` are the known keys.
    """
    if kind == "shell":
        return starts_training(text) and _JOB_OPTION.search(text) is not None
    if kind == "json" and not text.lstrip().startswith("{"):
        return False
    if _DEEPSPEED_KEY.search(text) or _ACCELERATE_KEY.search(text):
        return True
    if _MODEL_KEY.search(text) and not fragment:
        return True
    found = _TOP_KEY.findall(text)
    known = sum(key in keys for key in found)
    if fragment:
        return known > 0 and known * 2 >= len(found)
    return _SHORT_MODEL_KEY.search(text) is not None and known > 0
