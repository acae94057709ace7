"""The user's trainer keys (`job.trainer`) without Megatron, compared with the plan and with each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.errors import LayoutError, SpecError
from topoplan.layout.layout import Layout
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.user_keys import check_evaluation, check_model_path, checked_keys, decided
from topoplan.trainers.steps import training_steps
from topoplan.trainers.user_keys import place_of
from topoplan.trainers.usual import says_sync

OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_8bit"}
"""The job's optimizers by their names in transformers."""
_SAME_OPTIMIZER = {"adamw": "adamw_torch", "adamw_8bit": "adamw_bnb_8bit"}

DECIDED = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "disable_gradient_checkpointing", "pure_bf16"),
    *("quantization_bit", "quantization_method", "double_quantization", "enable_liger_kernel"),
    # Keys that change memory or time in ways that no plan covers stay off, which is their default.
    *("additional_target", "auto_find_batch_size", "freeze_extra_modules", "freeze_trainable_modules", "fp8"),
    *("gradient_checkpointing", "mixture_of_depths", "parallelism_config", "shift_attn", "upcast_lmhead_output"),
    *("use_adam_mini", "use_apollo", "use_badam", "use_dora", "use_galore", "use_kt", "use_llama_pro", "use_muon"),
    *("use_unsloth", "use_unsloth_gc", "fsdp_config"),
)


def plain_user_keys(spec: Spec, layout: Layout, written: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Return `job.trainer`, each key checked and compared with the plan, whose train.yaml has the keys in `written`.

    Raises SpecError or LayoutError for an unknown key, a value of the wrong type, and what the plan decides.
    """
    fixed = fixed_values(spec, written)
    steps, remedy = training_steps(spec.job), "leave it out: the plan decides it"
    user = checked_keys(spec, fixed, "plain", steps=steps, warnings=warnings, remedy=remedy)
    _check_combinations(user, spec, layout)
    return user


def fixed_values(spec: Spec, written: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return for each key the values that agree with the plan, the plan's own first."""
    optimizer = spec.job.optimizer
    return {
        **decided(spec, written, DECIDED, "plain"),
        "deepspeed": (None,),  # the node scripts set the file
        "fsdp": (None, [], ""),
        "optim": (OPTIMIZERS[optimizer], _SAME_OPTIMIZER[optimizer]),
        "flash_attn": ("auto", "sdpa", "fa2", "fa3"),
    }


def _check_combinations(user: dict[str, Any], spec: Spec, layout: Layout) -> None:
    """Raise an error for keys that are valid alone but not together, or not with this plan."""
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
    check_evaluation(user, spec)
    why = ": each node would download it in its own time, and the scripts look for a directory"
    check_model_path(user, spec, why)
