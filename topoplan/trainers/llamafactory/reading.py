"""Recognition of LLaMA-Factory's files and commands."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from topoplan.reading.recognizer import SURE, Recognizer
from topoplan.reading.setup import Configuration, Launch, Variable
from topoplan.reading.words import is_open
from topoplan.trainers.llamafactory.key_list import TrainerPath, bridge_keys, known_keys, plain_keys

MODEL_KEY = "model_name_or_path"

_MARKS = frozenset(
    ["model_name_or_path", "stage", "finetuning_type", "cutoff_len", "dataset_dir", "template", "do_train"]
)
_OF_DEEPSPEED = frozenset(["zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"])
"""DeepSpeed keys that may occur next to LLaMA-Factory's own."""
_CLI = re.compile(r"(?:.*[/\s(`])?(?:llamafactory-cli|lmf)[\s)`'\"]*", re.DOTALL)
"""Matches the command by name, by path, or as `$(which llamafactory-cli)`."""
V1_SUBCOMMANDS = ("sft", "dpo", "rm", "merge")
"""Subcommands of `v1/launcher.py`, which USE_V1=1 selects."""
_SUBCOMMANDS = (
    *("api", "chat", "env", "eval", "export", "help", "train", "version", "webchat", "webui"),
    *V1_SUBCOMMANDS,
)
_SCRIPT = re.compile(r"(?:.*/)?(?:src/)?train(?:_bash)?\.py")
_KEYS_OF_SCRIPTS = frozenset(["stage", "finetuning_type"])
"""Keys by which any script is recognized as training with LLaMA-Factory; its further keys occur elsewhere too."""
_KEYS_OF_ITS_OWN = frozenset(["template", "cutoff_len", "dataset_dir", *_KEYS_OF_SCRIPTS])


def _claim(data: Mapping[str, Any], known: int) -> float:
    marks = len(data.keys() & _MARKS)
    if marks and data.keys() & _OF_DEEPSPEED:
        return SURE + 1
    blocks = {key for key, value in data.items() if isinstance(value, dict)}
    is_likely = known and 2 * known >= len(data) and blocks <= known_keys().keys()
    return 2.0 * marks or (0.25 if is_likely else 0.0)


def path_of(configuration: Configuration, variables: Sequence[Variable]) -> TrainerPath:
    """Return the training path of a configuration.

    USE_MCA and USE_MEGATRON_BRIDGE decide (hparams/parser.py, get_train_args), or else keys that only one path knows.
    """
    mca, bridge = _enabled("USE_MCA", variables), _enabled("USE_MEGATRON_BRIDGE", variables)
    if mca or bridge:
        return "mca" if mca else "bridge"
    special = [key for key in configuration.source.data if key not in plain_keys()]
    of_mca = [key for key in special if key in known_keys()]
    of_bridge = [key for key in special if key in bridge_keys() and key not in of_mca]
    if bridge is None and (configuration.get("use_megatron_bridge") is True or of_bridge):
        return "bridge"
    return "mca" if mca is None and of_mca else "plain"


def _enabled(name: str, variables: Sequence[Variable]) -> bool | None:
    """Whether a variable is enabled, as extras/misc.py::is_env_enabled reads it; None if it is not set."""
    said = [one.value.strip().lower() for one in variables if one.name == name]
    return said[-1] in ("true", "y", "1") if said else None


def _usual(text: str, module: bool) -> str:
    if _CLI.fullmatch(text) or (module and text in ("llamafactory.cli", "llamafactory")):
        return "llamafactory-cli"
    return "llamafactory.launcher" if text.endswith(("llamafactory/launcher.py", "llamafactory.launcher")) else ""


def _runs(script: str, keys: Collection[str], first: str) -> bool:
    is_own = _SCRIPT.fullmatch(script) is not None
    if MODEL_KEY in keys and not (_KEYS_OF_ITS_OWN if is_own else _KEYS_OF_SCRIPTS).isdisjoint(keys):
        return True
    return is_own and (first.endswith((".yaml", ".yml")) or first == "--config")


def is_enabled(launch: Launch, name: str) -> bool:
    """Whether a variable has a value that extras/misc.py::is_env_enabled takes for true."""
    return _enabled(name, launch.variables) is True


def sets_allocator(launch: Launch) -> bool:
    """Whether the program replaces PYTORCH_CUDA_ALLOC_CONF: `launcher.py`, unless OPTIM_TORCH is off."""
    switch = launch.variable("OPTIM_TORCH")
    is_off = (
        switch is not None and not switch.assumed and not is_open(switch.value) and not is_enabled(launch, switch.name)
    )
    return launch.starts_torchrun and not is_off


@cache
def _accepted() -> Collection[str]:
    """Return the keys of all training paths, which a variable may select."""
    return frozenset([*known_keys(), *plain_keys(), *bridge_keys()])


LLAMAFACTORY = Recognizer(
    trainer="llamafactory",
    package="llamafactory",
    claim=_claim,
    keys=known_keys,
    accepts=_accepted,
    model_keys=(MODEL_KEY,),
    names=("llamafactory-cli", "lmf"),
    rule_name_of=_usual,
    programs=r"llamafactory-cli|llamafactory\.launcher",
    command="llamafactory-cli",
    methods=r"train|sft|dpo|rm|(?s:.*)\.(?:yaml|yml|json)",
    subcommands=_SUBCOMMANDS,
    starts_torchrun=True,
    takes_all_gpus=True,
    sets_allocator=sets_allocator,
    is_training_script=_runs,
    program_substring="llamafactory",
    takes_deepspeed=True,
    default_of=lambda key: plain_keys()[key].default,
    path=path_of,
)
