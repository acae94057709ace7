"""The user's trainer keys (`job.trainer`), as LLaMA-Factory treats them with any engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from topoplan.errors import SpecError
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.key_list import TrainerPath, check_key, keys_for, needed_transformers
from topoplan.trainers.model_directory import is_hub_id, model_directory
from topoplan.trainers.user_keys import check_user_keys, place_of

_OF_THE_JOB = {
    "bf16": "precision",
    "cutoff_len": "seq_len",
    "finetuning_type": "finetuning",
    "fp16": "precision",
    "fp8": "precision",
    "fp8_recipe": "precision",
    "freeze_language_model": "freeze_language_model",
    "freeze_multi_modal_projector": "freeze_multi_modal_projector",
    "freeze_trainable_layers": "freeze_trainable_layers",
    "freeze_vision_tower": "freeze_vision_tower",
    "image_max_pixels": "image_max_pixels",
    "lora_dropout": "lora_dropout",
    "lora_rank": "lora_rank",
    "lora_target": "lora_target",
    "mtp_num_layers": "mtp_num_layers",
    "num_train_epochs": "epochs",
    "optim": "optimizer",
    "packing": "packing",
    "pure_bf16": "pure_bf16",
    "quantization_bit": "quantization_bit",
    "stage": "stage",
}
"""Trainer key -> the job's key that it follows from; memory and time were predicted for that."""

_ALWAYS = ("stage", "do_train", "finetuning_type", "cutoff_len", "num_train_epochs", "bf16", "fp16")
_WRITTEN = (
    *("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model", "image_max_pixels"),
    *("freeze_trainable_layers", "lora_rank", "lora_dropout", "lora_target"),
)
"""Keys decided by the plan only where its train.yaml has them; elsewhere they have no effect."""


def decided(
    spec: Spec, written: Mapping[str, Any], keys: Iterable[str], path: TrainerPath
) -> dict[str, tuple[Any, ...]]:
    """Return for each key the values that agree with the plan, the plan's own first.

    `written` is the content of the plan's train.yaml without user keys; a key that is not in it has the trainer's
    default. `keys` are those of the engine.
    """
    known = keys_for(path)
    found: dict[str, tuple[Any, ...]] = {key: (known[key].default, None) for key in (*_ALWAYS, *keys)}
    found |= {key: (written[key],) for key in (*found, *_WRITTEN) if key in written}
    packs = spec.job.packs
    return {**found, "packing": (True, None) if packs else (False, None, spec.job.packing)}


def checked_keys(
    spec: Spec,
    fixed: Mapping[str, tuple[Any, ...]],
    path: TrainerPath,
    *,
    steps: int | None,
    warnings: list[str],
    remedy: str,
) -> dict[str, Any]:
    """Return `job.trainer`, each key checked and compared with the plan. Raises whatever `check_user_keys` raises.

    `steps` is the number of steps of the job.
    """
    given = _with_warmup_steps(spec.job.trainer, steps)
    user = check_user_keys(
        spec,
        given,
        lambda name, value, where: check_key(name, value, where, path=path),
        fixed,
        _OF_THE_JOB,
        remedy=remedy,
    )
    warnings += filter(None, (needed_transformers(keys_for(path)[name]) for name in user))
    return user


def _with_warmup_steps(given: Mapping[str, Any], steps: int | None) -> Mapping[str, Any]:
    """Convert warmup_ratio to the number of steps it stands for, because transformers 5 deprecates the ratio."""
    ratio = given.get("warmup_ratio")
    is_ratio = isinstance(ratio, int | float) and not isinstance(ratio, bool) and 0 <= ratio < 1
    if ratio is None or "warmup_steps" in given or steps is None or not is_ratio:
        return given  # check_key refuses the ratio and says what to write
    rest = {key: value for key, value in given.items() if key != "warmup_ratio"}
    return {**rest, "warmup_steps": math.ceil(ratio * steps)}


def evaluates(user: Mapping[str, Any]) -> bool:
    """Whether the user's keys enable evaluation, which is off by default."""
    return user.get("eval_strategy", "no") != "no" or bool(user.get("eval_on_start"))


def check_evaluation(user: Mapping[str, Any], spec: Spec) -> None:
    """Raise SpecError for an evaluation without data."""
    if evaluates(user) and not user.get("val_size") and not user.get("eval_dataset"):
        where = place_of(spec, "eval_strategy" if "eval_strategy" in user else "eval_on_start")
        raise SpecError("there is nothing to evaluate on", where=where, remedy="set eval_dataset or val_size too")


def check_model_path(user: Mapping[str, Any], spec: Spec, why: str) -> None:
    """Raise SpecError, with `why`, if the model's path is a hub id."""
    path = user.get("model_name_or_path")
    if path == spec.model.name and spec.model.config_path is None and is_hub_id(path):
        raise SpecError(
            f"{path!r} is a hub id{why}",
            where=place_of(spec, "model_name_or_path"),
            remedy=f"leave it out ({model_directory(spec.model)} is the default) or name a directory on every node",
        )
