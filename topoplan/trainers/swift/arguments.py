"""The arguments of ms-swift's commands, and checks of the user's own (`job.trainer`) against them and the plan.

Sources, at the versions of `topoplan/catalog/trainer_keys/ms_swift.json`: `swift/arguments/`,
`swift/megatron/arguments/`, `swift/trainers/arguments.py`, and `swift/pipelines/base.py`, which refuses unknown
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from topoplan.catalog import key_list
from topoplan.errors import SpecError, nearest
from topoplan.specs.secrets import NEVER_WRITTEN, REMEDY, secrets_in
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.key_list import Key, plain_keys, removed_keys, typed_value
from topoplan.trainers.megatron_keys import EMBEDDING, FIRST, LAST, LOSS
from topoplan.trainers.swift.counterparts import in_terms_of
from topoplan.trainers.train_yaml import check_user_keys

Command = Literal["swift sft", "swift rlhf", "megatron sft"]
"""`swift pt` takes the arguments of `swift sft`; `megatron pt` and `megatron rlhf` take those of `megatron sft`."""
COMMANDS: tuple[Command, ...] = ("swift sft", "swift rlhf", "megatron sft")

_FROM_TRANSFORMERS = ("predict_with_generate", "generation_config", "generation_max_length", "generation_num_beams")

OF_THE_JOB = {
    "bf16": "precision",
    "fp16": "precision",
    "fp4_format": "precision",
    "fp8_format": "precision",
    "fp8_recipe": "precision",
    "freeze_aligner": "freeze_multi_modal_projector",
    "freeze_llm": "freeze_language_model",
    "freeze_vit": "freeze_vision_tower",
    "lora_dropout": "lora_dropout",
    "lora_rank": "lora_rank",
    "max_length": "seq_len",
    "max_pixels": "image_max_pixels",
    "mtp_num_layers": "mtp_num_layers",
    "num_train_epochs": "epochs",
    "optim": "optimizer",
    "packing": "packing",
    "quant_bits": "quantization_bit",
    "quant_method": "finetuning",
    "target_modules": "lora_target",
    "torch_dtype": "precision",
    "tuner_type": "finetuning",
}
"""Argument -> the job's key that it follows from; memory and time were predicted for that."""

_OF_LLAMAFACTORY = {
    "cutoff_len": "set job.seq_len",
    "enable_liger_kernel": "pin fused_linear_cross_entropy under job.pin",
    "eval_dataset": "write val_dataset",
    "finetuning_type": "set job.finetuning",
    "flash_attn": "write attn_impl",
    "image_max_pixels": "set job.image_max_pixels",
    "lora_target": "set job.lora_target",
    "model_name_or_path": "write model",
    "neat_packing": "leave it out: ms-swift keeps the samples of a packed sequence apart by itself",
    "preprocessing_num_workers": "write dataset_num_proc",
    "quantization_bit": "set job.quantization_bit",
    "val_size": "write split_dataset_ratio",
}
"""What to write in place of LLaMA-Factory's keys that have another name in ms-swift."""

DECIDED: Mapping[str, tuple[str, ...]] = {
    "swift sft": (
        *("tuner_type", "torch_dtype", "bf16", "fp16", "freeze_vit", "freeze_aligner", "freeze_llm", "lora_rank"),
        *("lora_dropout", "target_modules", "quant_method", "quant_bits", "freeze_parameters_ratio"),
        *("trainable_parameters_regex", "bnb_4bit_quant_storage", "max_length", "packing", "max_pixels"),
        *("num_train_epochs", "optim"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "sequence_parallel_size", "deepspeed"),
        *("fsdp", "gradient_checkpointing", "use_liger_kernel", "add_version", "deepspeed_autotp_size", "device_map"),
        *("experts_impl", "fsdp_config", "zero_hpz_partition_size", "max_epochs", "optimizer", "use_galore"),
    ),
    "megatron sft": (
        *("tuner_type", "torch_dtype", "bf16", "fp16", "fp8_format", "fp8_recipe", "fp4_format", "mtp_num_layers"),
        *("freeze_vit", "freeze_aligner"),
        *("freeze_llm", "max_length", "packing", "max_pixels", "num_train_epochs", FIRST, LAST),
        *(EMBEDDING, LOSS, "use_megatron_fsdp", "moe_enable_deepep", "optimizer"),
        *("add_version", "bridge_backend", "lora_rank", "lora_dropout", "target_modules", "target_regex"),
        *("modules_to_save", "lora_bias", "lora_dtype"),
    ),
}
"""Command -> arguments that predictions assume or that the scripts rely on, besides those that express a layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of a command."""

    types: Mapping[str, Mapping[str, Any] | None]
    """Name -> type; None if only the name is known."""
    renamed: Mapping[str, str]
    """Names of version 3 -> their names in version 4."""
    gone: frozenset[str]
    """Names of version 3 without a counterpart in version 4."""


@cache
def swift_versions() -> tuple[str, ...]:
    """Return the versions of ms-swift whose arguments are listed, oldest first; bundles install the newest."""
    return tuple(key_list("ms_swift")["versions"]["ms_swift"])


def oldest_version(trainer: Mapping[str, Any], command: Command) -> str:
    """Return the oldest ms-swift that accepts all of these arguments."""
    types = arguments_of(command).types
    wanted = {str((types.get(name) or {}).get("since") or swift_versions()[0]) for name in trainer}
    return max((swift_versions()[0], *wanted), key=swift_versions().index)


@cache
def arguments_of(command: Command) -> Arguments:
    """Return the arguments of a command."""
    document = key_list("ms_swift")
    types: dict[str, Mapping[str, Any] | None] = {}
    chosen: dict[str, tuple[Any, ...]] = {}
    section = "megatron" if command.startswith("megatron") else "sft"
    if section == "sft":
        # The installed version of transformers is unknown, so the arguments of both 4 and 5 are accepted.
        types |= {
            name: {"types": key.types, "choices": key.choices, "nullable": key.nullable}
            for name, key in plain_keys().items()
            if key.package == "transformers"
        }
        chosen = {name: key.choices for name, key in plain_keys().items() if key.choices}
        types |= dict.fromkeys((*removed_keys(), *_FROM_TRANSFORMERS))
    types |= {**document["shared"], **document[section]}
    for name in chosen.keys() & types.keys():  # arguments that ms-swift declares as text and passes on
        types[name] = {"choices": chosen[name], **(types[name] or {"types": ["str"]})}
    if command == "swift rlhf":
        types |= {name: types.get(name) or document["rlhf_types"].get(name) for name in document["rlhf"]}
    types |= {f"no_{name}": None for name, entry in types.items() if entry and entry["types"] == ["bool"]}
    return Arguments(
        types=types,
        renamed=document["renamed_since_3"][section],
        gone=frozenset(document["gone_since_3"][section]),
    )


def user_arguments(spec: Spec, command: Command, decided: Mapping[str, Any]) -> dict[str, Any]:
    """Return `job.trainer` in terms of the command, each argument checked; `decided` has the plan's values, None for an
    argument it leaves out.

    Raises SpecError for what the command would refuse, LayoutError for what contradicts the plan.
    """

    def check(name: str, value: Any, where: str) -> Any:
        if any(secrets_in({name: value})):
            raise SpecError(NEVER_WRITTEN, where=where, remedy=REMEDY)
        _check_name(name, command, where)
        return _checked(name, value, command, where)

    fixed = {name: (value,) for name, value in decided.items()}
    given = in_terms_of(command, spec.job.trainer)
    return check_user_keys(spec, given, check, fixed, OF_THE_JOB, left_out="leaves it out")


def accepted(name: str, value: Any, command: Command) -> bool:
    """Whether a command takes a user's argument, under its name or as its counterpart."""
    if any(secrets_in({name: value})):
        return False
    try:
        for own, meant in in_terms_of(command, {name: value}).items():
            _check_name(own, command, "")
            _checked(own, meant, command, "")
    except SpecError:
        return False
    return True


def _check_name(name: str, command: Command, where: str) -> None:
    known = arguments_of(command)
    switch = name.removeprefix("no_")
    if switch != name and switch in known.types and known.types.get(name, {}) is None:
        # HfArgumentParser generates it for switches that default to true; it would bypass what the plan decides.
        raise SpecError(
            f"{name} is how a command line says {switch} false", where=where, remedy=f"write {switch}: false"
        )
    if name in known.types:
        return
    if name in known.renamed:
        what, remedy = f"ms-swift 4 refuses {name}, a name of version 3", f"write {known.renamed[name]}"
    elif name in known.gone:
        what, remedy = f"ms-swift 4 refuses {name}; version 3 had it", "leave it out"
    elif name in _OF_LLAMAFACTORY:
        what, remedy = f"{name} is a key of LLaMA-Factory, and `{command}` refuses it", _OF_LLAMAFACTORY[name]
    else:
        others = [f"`{one}`" for one in COMMANDS if one != command and name in arguments_of(one).types]
        what = f"`{command}` has no argument {name!r}" + (f", which is one of {others[0]}" if others else "")
        remedy = nearest(name, known.types)
    raise SpecError(what, where=where, remedy=remedy)


def _checked(name: str, value: Any, command: Command, where: str) -> Any:
    entry = arguments_of(command).types[name]
    key = plain_keys().get(name) if entry is None else Key.of(name, entry, "ms-swift")
    if key is None:
        return value
    if key.types == ("list",) and isinstance(value, str | int | float) and not isinstance(value, bool):
        value = [value]
    verdict = typed_value(key, value)
    if verdict.trouble:
        raise SpecError(verdict.what, where=where, expected=verdict.expected, remedy=verdict.remedy)
    return verdict.value
