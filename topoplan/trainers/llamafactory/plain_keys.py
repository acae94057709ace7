"""The trainer keys of the user (`job.trainer`) without Megatron: held against the key list and against the plan."""

from __future__ import annotations

import math
from typing import Any

from topoplan.errors import LayoutError, SpecError
from topoplan.layout.layout import Layout
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.key_list import check_key, needed_transformers, plain_keys
from topoplan.trainers.llamafactory.mca_facts import is_hub_id, model_directory, place_of
from topoplan.trainers.steps import training_steps
from topoplan.trainers.usual import says_sync

OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_8bit"}
"""Of the job, as transformers calls them."""

_JOB_KEYS = {
    "bf16": "precision",
    "cutoff_len": "seq_len",
    "finetuning_type": "finetuning",
    "fp16": "precision",
    "fp8": "precision",
    "freeze_language_model": "freeze_language_model",
    "freeze_multi_modal_projector": "freeze_multi_modal_projector",
    "freeze_trainable_layers": "freeze_trainable_layers",
    "freeze_vision_tower": "freeze_vision_tower",
    "image_max_pixels": "image_max_pixels",
    "lora_rank": "lora_rank",
    "lora_target": "lora_target",
    "num_train_epochs": "epochs",
    "optim": "optimizer",
    "packing": "packing",
    "pure_bf16": "pure_bf16",
    "quantization_bit": "quantization_bit",
    "stage": "stage",
}
"""Trainer keys that follow from a key of the job, on which memory and time were predicted."""

_NOT_PLANNED: dict[str, tuple[Any, ...]] = {
    "additional_target": (None,),
    "auto_find_batch_size": (False,),
    "freeze_extra_modules": (None,),
    "freeze_trainable_modules": ("all",),
    "fp8": (False,),
    "gradient_checkpointing": (False,),
    "mixture_of_depths": (None,),
    "parallelism_config": (None,),
    "shift_attn": (False,),
    "upcast_lmhead_output": (False,),
    "use_adam_mini": (False,),
    "use_apollo": (False,),
    "use_badam": (False,),
    "use_dora": (False,),
    "use_galore": (False,),
    "use_kt": (False,),
    "use_llama_pro": (False,),
    "use_muon": (False,),
    "use_unsloth": (False,),
    "use_unsloth_gc": (False,),
}
"""Keys that change memory or time in ways that no plan has: the values that leave them off."""


def plain_user_keys(spec: Spec, layout: Layout, warnings: list[str]) -> dict[str, Any]:
    """`job.trainer`, checked key by key and against the plan.

    Raises SpecError or LayoutError for an unknown key, a value of the wrong type, and what the plan decides.
    """
    given = dict(spec.job.trainer)
    if "warmup_ratio" in given and "warmup_steps" not in given:
        given = _with_warmup_steps(given, spec)
    fixed = fixed_values(spec, layout)
    checked: dict[str, Any] = {}
    for name, value in given.items():
        where = place_of(spec, str(name))
        checked[name] = check_key(str(name), value, where, path="plain")
        if name in fixed and checked[name] not in fixed[name]:
            _refuse_contradiction(name, checked[name], fixed[name][0], where)
        if needs := needed_transformers(plain_keys()[name]):
            warnings.append(needs)
    _check_combinations(checked, spec, layout)
    return checked


def fixed_values(spec: Spec, layout: Layout) -> dict[str, tuple[Any, ...]]:
    """Key -> the values that agree with the plan; the first one is its own. For the keys that the plan decides."""
    job = spec.job
    full_recompute = layout.recompute.granularity == "full"
    adapters = job.finetuning in ("lora", "qlora")
    fixed: dict[str, tuple[Any, ...]] = {
        **_NOT_PLANNED,
        "per_device_train_batch_size": (layout.micro_batch_size,),
        "gradient_accumulation_steps": (layout.gradient_accumulation_steps,),
        "disable_gradient_checkpointing": (not full_recompute,),
        "deepspeed": (None,),
        "fsdp": (None, [], ""),
        "fsdp_config": (None,),
        "stage": (job.stage,),
        "do_train": (True,),
        "finetuning_type": ("lora" if adapters else job.finetuning,),
        "cutoff_len": (job.seq_len,),
        "num_train_epochs": (float(job.epochs),),
        "packing": (True, None) if job.packs else (False, None, job.packing),
        "bf16": (job.precision == "bf16" and not job.pure_bf16,),
        "fp16": (job.precision == "fp16",),
        "pure_bf16": (job.pure_bf16,),
        "optim": (OPTIMIZERS[job.optimizer], *_SAME_OPTIMIZER[job.optimizer]),
        "quantization_bit": ((job.quantization_bit or 4) if job.finetuning == "qlora" else None,),
        "quantization_method": ("bnb",),
        "double_quantization": (True,),
        "enable_liger_kernel": (layout.fused_linear_cross_entropy,),
        "flash_attn": ("auto", "sdpa", "fa2", "fa3"),
    }
    if adapters:
        fixed |= {"lora_rank": (job.lora_rank or 8,), "lora_target": (",".join(job.lora_target),)}
    if job.finetuning == "freeze":
        fixed["freeze_trainable_layers"] = (job.freeze_trainable_layers,)
    if spec.model.vision is not None:
        fixed |= {
            "freeze_vision_tower": (job.freeze_vision_tower,),
            "freeze_multi_modal_projector": (job.freeze_multi_modal_projector,),
            "freeze_language_model": (job.freeze_language_model,),
            "image_max_pixels": (job.image_max_pixels,),
        }
    return fixed


_SAME_OPTIMIZER = {"adamw": ("adamw_torch",), "adamw_8bit": ("adamw_bnb_8bit",)}


def _with_warmup_steps(given: dict[str, Any], spec: Spec) -> dict[str, Any]:
    """A ratio as the number of steps that it stands for: transformers 5 has given up warmup_ratio."""
    ratio, steps = given["warmup_ratio"], training_steps(spec.job)
    is_ratio = isinstance(ratio, int | float) and not isinstance(ratio, bool) and 0 <= ratio < 1
    if steps is None or not is_ratio:
        return given  # check_key refuses it, and says what to write
    rest = {key: value for key, value in given.items() if key != "warmup_ratio"}
    return {**rest, "warmup_steps": math.ceil(ratio * steps)}


def _refuse_contradiction(name: str, value: Any, planned: Any, where: str) -> None:
    what = f"{name} is {value!r}, and the plan was made for {planned!r}"
    if name in _JOB_KEYS:
        raise SpecError(what, where=where, remedy=f"set job.{_JOB_KEYS[name]} and leave {name} out")
    raise LayoutError(what, where=where, remedy="leave it out: the plan decides it")


def _check_combinations(user: dict[str, Any], spec: Spec, layout: Layout) -> None:
    """Keys that are right alone and wrong together, or with this plan."""
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
    evaluates = user.get("eval_strategy", "no") != "no" or bool(user.get("eval_on_start"))
    if evaluates and not user.get("val_size") and not user.get("eval_dataset"):
        where = place_of(spec, "eval_strategy" if "eval_strategy" in user else "eval_on_start")
        raise SpecError("there is nothing to evaluate on", where=where, remedy="set eval_dataset or val_size too")
    path = user.get("model_name_or_path")
    if path == spec.model.name and spec.model.config_path is None and is_hub_id(path):
        raise SpecError(
            f"{path!r} is a hub id: each node would download it in its own time, and the scripts look for a directory",
            where=place_of(spec, "model_name_or_path"),
            remedy=f"leave it out ({model_directory(spec.model)} is the default) or name a directory on every node",
        )
