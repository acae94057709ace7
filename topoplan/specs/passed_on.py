"""What a spec passes on: trainer keys, variables, names of secrets, package versions, Slurm's sbatch options."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from topoplan.errors import SpecError, nearest
from topoplan.specs.kinds import Checked, KeyedError
from topoplan.specs.secrets import NEVER_WRITTEN, REMEDY, is_secret, secrets_in
from topoplan.units import quote, shown

# LLaMA-Factory's YAML keys for settings that have a key of their own in a spec. Under `trainer:` they would be
# written twice, with conflicting values; anywhere else they show what the user was looking for.
TRAINER_KEYS_OF_JOB: Mapping[str, str] = {
    "cutoff_len": "seq_len",
    "finetuning_type": "finetuning",
    "bf16": "precision",
    "fp16": "precision",
    "num_train_epochs": "epochs",
    **{
        key: key
        for key in (
            *("stage", "dataset", "dataset_dir", "template", "packing", "learning_rate", "lora_rank", "lora_dropout"),
            *("lora_target", "quantization_bit", "freeze_trainable_layers", "pure_bf16", "freeze_vision_tower"),
            *("freeze_multi_modal_projector", "freeze_language_model", "image_max_pixels"),
        )
    },
}
TRAINER_KEYS_OF_LAYOUT: Mapping[str, str] = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "sequence_parallel": "sequence_parallel",
    "use_distributed_optimizer": "distributed_optimizer",
    "recompute_granularity": "recompute",
    "recompute_method": "recompute",
    "recompute_num_layers": "recompute",
    "recompute_modules": "recompute",
    "pipeline_model_parallel_layout": "pipeline_layout",
    "optimizer_offload_fraction": "optimizer_offload_fraction",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
}
HIJACKERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "NPROC_PER_NODE"),
    *("RDZV_ID", "MIN_NNODES", "MAX_NNODES", "MAX_RESTARTS", "FORCE_TORCHRUN"),
    *("USE_RAY", "USE_KT", "USE_MEGATRON_BRIDGE", "ALLOW_EXTRA_ARGS"),
)
"""Variables that change the behavior of torchrun, transformers or LLaMA-Factory's launcher; the scripts of a bundle
unset them first."""
_NAME = "[A-Za-z_][A-Za-z0-9_]"
_VARIABLE = f"{_NAME}{{0,127}}"


def block(value: Any, expected: str) -> Mapping[Any, Any]:
    """Check that a value is a block of keys. Raises a SpecError without a location."""
    if not isinstance(value, Mapping):
        raise SpecError(f"{shown(value)} is not a block of keys", expected=f"expected {expected}")
    return value


def _trainer_keys(value: Any) -> dict[str, Any]:
    """Check keys for the trainer's YAML, and refuse those that topoplan writes itself."""
    for key, content in block(value, "keys of the trainer's YAML").items():
        if not isinstance(key, str) or not re.fullmatch(_VARIABLE, key):
            raise KeyedError(key, "is not a key of the trainer")
        if key == "model_name_or_path":
            raise KeyedError(key, "is the spec's `model`", remedy="set `model` instead")
        if own := TRAINER_KEYS_OF_JOB.get(key):
            raise KeyedError(key, f"is the job's `{own}`", remedy=f"set `{own}` in `job` instead")
        if own := TRAINER_KEYS_OF_LAYOUT.get(key):
            raise KeyedError(key, "is part of the layout", remedy=f"hold it with `pin: {{{own}: ...}}` in `job`")
        if (found := next(secrets_in({key: content}), None)) is not None:
            at = f"{quote('.'.join(map(str, found[1:])))} in it " if found[1:] else ""
            raise KeyedError(key, f"{at}looks like a secret, and {NEVER_WRITTEN}", remedy=REMEDY)
        if not _is_finite(content):
            what = "is not a finite number" if isinstance(content, float) else "holds an infinite number or a NaN"
            raise KeyedError(key, what)
    return dict(value)


def _is_finite(value: Any) -> bool:
    """Return whether every number in a value can be written as JSON."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _environment(value: Any) -> dict[str, str]:
    variables: dict[str, str] = {}
    for name, content in block(value, "NAME: value, one a line").items():
        if not isinstance(name, str) or not re.fullmatch(_VARIABLE, name):
            raise KeyedError(name, "is not a variable's name", expected="expected letters, digits and _")
        if name in HIJACKERS:
            raise KeyedError(name, "is for the scripts of a bundle to set", remedy="leave it out")
        if is_secret(name, content):
            raise KeyedError(name, f"looks like a secret, and {NEVER_WRITTEN}", remedy=REMEDY)
        if isinstance(content, bool | float) or not isinstance(content, str | int):
            raise KeyedError(name, f"{shown(content)} is not text", remedy="put it in quotes")
        text = str(content)
        if not text.isprintable() or len(text) > 4096:
            raise KeyedError(name, f"{shown(text)} is not usable", expected="expected text on one line")
        variables[name] = text
    return variables


def _secret_names(value: Any) -> tuple[str, ...]:
    """Check names of variables. An invalid one is not quoted in the message: it may be the secret itself."""
    expected = "expected names of variables alone, such as [HF_TOKEN, WANDB_API_KEY]"
    names = re.split(r"\s*,\s*", value.strip()) if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        raise SpecError("is not a list", expected=expected)
    for index, name in enumerate(names):
        if not isinstance(name, str) or not re.fullmatch(_VARIABLE, name) or is_secret("", name):
            raise SpecError(f"item {index + 1} is not the name of a variable", expected=expected)
        if name.startswith("TOPOPLAN_"):
            raise SpecError(f"{name} is topoplan's own", expected=expected)
    return tuple(dict.fromkeys(names))


def _versions(value: Any) -> dict[str, str]:
    """Check versions, which must be quoted: YAML reads an unquoted 3.10 as 3.1."""
    from topoplan.catalog.packages import PYTHON, is_version

    for name, version in block(value, f"packages and their versions, such as `{PYTHON}: '3.12'`").items():
        if name not in _package_names():
            expected = f"expected some of {', '.join(_package_names())}"
            raise KeyedError(name, "is not a package that a trainer needs", expected=expected)
        if not is_version(version):
            expected = "expected a version in quotes, such as '3.12' or '2.11.0'"
            raise KeyedError(name, f"{shown(version)} is not a version", expected=expected)
    return dict(value)


def _package_names() -> list[str]:
    from topoplan.catalog.packages import PYTHON, packages  # only needed where versions are given

    return [PYTHON, *packages()]


def mapping_schema(pattern: str, *types: str) -> dict[str, Any]:
    """Return the JSON Schema of a block whose keys match a pattern."""
    values = {pattern: {"type": list(types)}}
    return {"type": "object", "patternProperties": values, "additionalProperties": False}


TRAINER_KEYS = Checked(_trainer_keys, {"type": "object"})
ENVIRONMENT = Checked(_environment, mapping_schema(f"^{_NAME}*$", "string", "integer"))
SECRET_NAMES = Checked(
    _secret_names,
    {"anyOf": [{"type": "array", "items": {"type": "string", "pattern": f"^{_NAME}*$"}}, {"type": "string"}]},
)
VERSIONS = Checked(
    _versions,
    lambda: {
        "type": "object",
        "propertyNames": {"enum": _package_names()},
        "additionalProperties": {"type": "string"},
    },
)


NAME_PATTERN = "[a-z][a-z0-9_-]{1,63}"

# Options set by the job script, because the plan determines them.
_OURS: Mapping[str, tuple[str, str]] = {
    "nodes": ("is the spec's `nodes`", "set `nodes` instead"),
    "ntasks": ("is one a node, which starts the processes of all its GPUs", "leave it out"),
    "ntasks-per-node": ("is 1, a task that starts the processes of all GPUs of its node", "leave it out"),
    "array": ("would start one training several times", "leave it out"),
    "wrap": ("would take the place of the job script", "leave it out"),
}
_LARGEST = 10**9


def check_option(name: object, value: object) -> tuple[str, str | bool]:
    """Return an option's name and value for sbatch; true means no value, false removes one of topoplan's own options.

    Underscores in names become hyphens. Raises a SpecError without a location.
    """
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise SpecError("is not an option of sbatch", expected="expected a long name, such as partition")
    option = name.replace("_", "-")
    if option in _OURS:
        what, remedy = _OURS[option]
        raise SpecError(what, remedy=remedy)
    if isinstance(value, bool):
        return option, value
    if not isinstance(value, str | int):
        raise SpecError(f"{shown(value)} is not text", remedy="put it in quotes")
    text = value.strip() if isinstance(value, str) else str(value) if abs(value) <= _LARGEST else ""
    # Neither ' nor \ can appear within the single quotes of an #SBATCH line.
    if not text.isprintable() or not re.fullmatch(r"[^'\\]{1,1024}", text):
        raise SpecError(f"{shown(value)} is not usable", expected="expected text on one line without ' and \\")
    return option, text


def output_variables() -> frozenset[str]:
    """Return the environment variables that Slurm sets for a job and its steps."""
    return frozenset(_document()["variables"])


def unknown_option(option: str) -> str:
    """Return a warning about an option unknown to sbatch itself (a cluster's plugin may add it), or an empty string."""
    document = _document()
    if option in document["options"]:
        return ""
    oldest, newest = document["versions"]
    what = f"sbatch of Slurm {oldest} to {newest} has no option {option!r}, unless a plugin of the cluster has it"
    return "; ".join(filter(None, (what, nearest(option, document["options"]))))


@cache
def _document() -> Mapping[str, Any]:
    text = files("topoplan.catalog").joinpath("sbatch_options.json").read_text(encoding="utf-8")
    document: Mapping[str, Any] = json.loads(text)
    return document


def _options(value: Any) -> dict[str, str | bool]:
    options: dict[str, str | bool] = {}
    for name, content in block(value, "options of sbatch, such as `partition: gpu`").items():
        if content is None:
            continue
        words = str(content).split(",")  # such as `export: ALL,HF_TOKEN=...`
        if is_secret("", content) or any(is_secret(*word.partition("=")[::2]) for word in words):
            raise KeyedError(name, f"looks like a secret, and {NEVER_WRITTEN}", remedy=REMEDY)
        try:
            option, usable = check_option(name, content)
        except SpecError as error:
            raise KeyedError(name, error.what, expected=error.expected, remedy=error.remedy) from None
        if option in options:
            raise KeyedError(name, "is given twice", remedy="keep one of them")
        options[option] = usable
    return options


BATCH_OPTIONS = Checked(_options, mapping_schema(f"^{NAME_PATTERN}$", "string", "integer", "boolean"))
