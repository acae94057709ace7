"""The user's trainer keys (`job.trainer`), as LLaMA-Factory treats them with any engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from topoplan.errors import LayoutError, SpecError, nearest
from topoplan.layout.layout import Layout
from topoplan.specs.facts import facts_of
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.common import DECIDED, WARMUP_RATIO
from topoplan.trainers.llamafactory.key_list import (
    TrainerPath,
    check_key,
    keys_for,
    megatron_settings,
    needed_transformers,
)
from topoplan.trainers.llamafactory.mca_job import ROWS
from topoplan.trainers.megatron_keys import EMBEDDING, EP, ETP, LOSS
from topoplan.trainers.models import is_hub_id, model_directory
from topoplan.trainers.steps import megatron_steps, training_steps
from topoplan.trainers.train_yaml import check_user_keys, place_of, says_sync

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


def _decided(
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


def user_keys(
    spec: Spec, layout: Layout, written: Mapping[str, Any], warnings: list[str], path: TrainerPath
) -> dict[str, Any]:
    """Return `job.trainer`, each key checked and compared with the plan, whose train.yaml has the keys in `written`.

    Raises SpecError or LayoutError for an unknown key, a value of the wrong type, and what contradicts the plan.
    """
    if path == "mca":
        fixed, steps = _fixed_by_megatron(spec, written), megatron_steps(spec.job)
        remedy = "leave it out, or ask for it under job.pin, so that it is predicted"
    else:
        fixed, steps = fixed_values(spec, written), training_steps(spec.job)
        remedy = "leave it out: the plan decides it"
    user = check_user_keys(
        spec,
        _with_warmup_steps(spec.job.trainer, steps),
        lambda name, value, where: check_key(name, value, where, path=path),
        fixed,
        _OF_THE_JOB,
        remedy=remedy,
    )
    warnings += filter(None, (needed_transformers(keys_for(path)[name]) for name in user))
    if path == "mca":
        _check_megatron(user, spec, layout)
        _check_additional_configs(user.get("additional_configs"), spec, fixed)
    else:
        _check_plain(user, spec, layout)
    return user


def _with_warmup_steps(given: Mapping[str, Any], steps: int | None) -> Mapping[str, Any]:
    """Convert warmup_ratio to the number of steps it stands for, if known: transformers 5 deprecates the ratio."""
    ratio = given.get(WARMUP_RATIO)
    is_ratio = isinstance(ratio, int | float) and not isinstance(ratio, bool) and 0 <= ratio < 1
    if ratio is None or "warmup_steps" in given or steps is None or not is_ratio:
        return given
    rest = {key: value for key, value in given.items() if key != WARMUP_RATIO}
    return {**rest, "warmup_steps": math.ceil(ratio * steps)}


def evaluates(user: Mapping[str, Any]) -> bool:
    """Whether the user's keys enable evaluation, which is off by default."""
    return user.get("eval_strategy", "no") != "no" or bool(user.get("eval_on_start"))


def _check_data_to_evaluate_on(user: Mapping[str, Any], spec: Spec) -> None:
    if evaluates(user) and not user.get("val_size") and not user.get("eval_dataset"):
        where = place_of(spec, "eval_strategy" if "eval_strategy" in user else "eval_on_start")
        raise SpecError("there is nothing to evaluate on", where=where, remedy="set eval_dataset or val_size too")


def _check_model_path(user: Mapping[str, Any], spec: Spec, why: str) -> None:
    """Raise SpecError, with `why`, if the model's path is a hub id."""
    path = user.get("model_name_or_path")
    if path == spec.model.name and spec.model.config_path is None and is_hub_id(path):
        raise SpecError(
            f"{path!r} is a hub id{why}",
            where=place_of(spec, "model_name_or_path"),
            remedy=f"leave it out ({model_directory(spec.model)} is the default) or name a directory on every node",
        )


OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_8bit"}
"""The job's optimizers by their names in transformers."""
_SAME_OPTIMIZER = {"adamw": "adamw_torch", "adamw_8bit": "adamw_bnb_8bit"}


def fixed_values(spec: Spec, written: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the values that agree with a plan without Megatron, the plan's own first."""
    optimizer = spec.job.optimizer
    return {
        **_decided(spec, written, DECIDED, "plain"),
        "deepspeed": (None,),  # the node scripts set the file
        "fsdp": (None, [], ""),
        "optim": (OPTIMIZERS[optimizer], _SAME_OPTIMIZER[optimizer]),
        "flash_attn": ("auto", "sdpa", "fa2", "fa3"),
    }


def _check_plain(user: Mapping[str, Any], spec: Spec, layout: Layout) -> None:
    job = spec.job
    if user.get("neat_packing") and (job.stage != "sft" or not job.packing):
        # hparams/parser.py: "`neat_packing` cannot be set as True except SFT"
        raise SpecError(
            "neat_packing packs, which needs stage sft and packing: true", where=place_of(spec, "neat_packing")
        )
    if user.get("pissa_init") and (job.finetuning == "qlora" or layout.zero_stage == 3):
        raise SpecError(
            "LLaMA-Factory refuses pissa_init with quantized weights and with ZeRO-3",
            where=place_of(spec, "pissa_init"),
            remedy="leave it out",
        )
    if user.get("resize_vocab") and job.finetuning == "qlora":
        raise SpecError(
            "LLaMA-Factory refuses resize_vocab with quantized weights", where=place_of(spec, "resize_vocab")
        )
    accumulates = layout.backend == "fsdp2" and layout.gradient_accumulation_steps > 1 and "accelerator_config" in user
    if accumulates and layout.sync_each_batch != says_sync(user["accelerator_config"]):
        wanted = str(layout.sync_each_batch).lower()
        raise LayoutError(
            f"accelerator_config without sync_each_batch {wanted}, with which memory and time were predicted",
            where=place_of(spec, "accelerator_config"),
            expected=f"expected gradient_accumulation_kwargs: {{sync_each_batch: {wanted}}} in it",
            remedy=f"write that, or pin sync_each_batch={str(not layout.sync_each_batch).lower()}",
        )
    _check_data_to_evaluate_on(user, spec)
    why = ": each node would download it in its own time, and the scripts look for a directory"
    _check_model_path(user, spec, why)


def _fixed_by_megatron(spec: Spec, written: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    keys = (*ROWS, "moe_layer_recompute", "mtp_num_layers", *(("fp8", "fp8_recipe") if "fp8" not in written else ()))
    fixed = _decided(spec, written, keys, "mca")
    fixed |= {key: (1, None) for key in (EP, ETP) if key not in written}
    fixed |= dict.fromkeys((EMBEDDING, LOSS), (None, False))
    if spec.job.precision != "fp16":
        fixed["accumulate_allreduce_grads_in_fp32"] = (True,)  # bf16 enables it
    return fixed


def _check_megatron(user: Mapping[str, Any], spec: Spec, layout: Layout) -> None:
    _check_packing(user, spec, layout)
    _check_evaluation(user, spec, layout)
    steps, warmup = megatron_steps(spec.job, user.get("max_steps")), user.get("warmup_steps")
    if steps is not None and warmup is not None and warmup >= steps:
        raise SpecError(
            f"warmup_steps {warmup:g} of a run of {steps} steps: Megatron's scheduler takes fewer than all of them",
            where=place_of(spec, "warmup_steps"),
        )
    if user.get("moe_token_dispatcher_type") == "allgather" and (
        facts_of(spec.model).is_moe or user.get("variable_seq_lengths")
    ):
        raise LayoutError(
            "the plan was made for the alltoall dispatcher",
            where=place_of(spec, "moe_token_dispatcher_type"),
            remedy="leave it out",
        )
    _check_model_path(user, spec, ", and the Megatron adapter reads local directories only")


def _check_packing(user: Mapping[str, Any], spec: Spec, layout: Layout) -> None:
    if key := next((key for key in ("neat_packing", "sequence_packing") if user.get(key)), None):
        where = place_of(spec, key)
        if spec.job.stage != "sft" or not spec.job.packing:
            raise SpecError(f"{key} packs, which needs stage sft and packing: true", where=where)
        if layout.cp > 1:
            raise LayoutError(
                f"{key} fails under context parallelism (cp {layout.cp}): sub-sequences are not multiples of 2 * cp",
                where=where,
                remedy="leave it out or pin cp=1",
            )
        if spec.model.vision is not None:
            # trainer/trainer.py, _packing_sequence reshapes the 3 x batch x tokens of mRoPE as if batch came first.
            raise SpecError(f"{key} garbles the positions of images: leave it out for {spec.model.name}", where=where)
        if spec.job.mtp_num_layers:
            # trainer/trainer.py, _prepare_train_inputs only builds the positions it needs without packing.
            raise SpecError(f"{key} and mtp_num_layers exclude each other in the Megatron adapter", where=where)


def _check_evaluation(user: Mapping[str, Any], spec: Spec, layout: Layout) -> None:
    """Raise an error unless an evaluation has a whole global batch of samples.

    trainer/trainer.py, _stream_eval_inputs takes as many micro-batches at a time as a training step has; without one
    such step, gather_metrics ends in an IndexError.
    """
    if not evaluates(user):
        return
    _check_data_to_evaluate_on(user, spec)
    share = user.get("val_size") or 0.0
    batch = user.get("per_device_eval_batch_size", layout.micro_batch_size)
    least = batch * layout.dp * layout.gradient_accumulation_steps
    samples = int(share) if share >= 1 else None if spec.job.samples is None else int(share * spec.job.samples)
    if share and samples is not None and samples < least:
        raise SpecError(
            f"val_size leaves {samples} samples, and an evaluation takes {least} at a time (per_device_eval_batch_size"
            f" {batch} * dp {layout.dp} * gradient accumulation {layout.gradient_accumulation_steps})",
            where=place_of(spec, "val_size"),
            remedy="raise val_size",
        )


def _check_additional_configs(additional: Any, spec: Spec, fixed: Mapping[str, Any]) -> None:
    where = place_of(spec, "additional_configs")
    for name in additional if isinstance(additional, Mapping) else ():
        if str(name).startswith(("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")):
            raise LayoutError(
                f"the adapter refuses {name}: layers must divide evenly by its own count",
                where=where,
                remedy="pin a pipeline_layout for uneven stages",
            )
        if name in fixed:
            raise LayoutError(
                f"{name} is decided by the plan", where=where, remedy="leave it out, or ask for it under job.pin"
            )
        if name not in megatron_settings():
            what = f"{name} is not a setting of megatron-core, and would be ignored"
            raise SpecError(what, where=where, remedy=nearest(str(name), megatron_settings()))
