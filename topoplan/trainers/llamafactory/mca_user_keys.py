"""The trainer keys of the user (`job.trainer`), held against the key list and against the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from topoplan.errors import LayoutError, SpecError
from topoplan.layout.layout import Layout
from topoplan.specs.facts import facts_of
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.key_list import check_key, known_keys, needed_transformers
from topoplan.trainers.llamafactory.mca_facts import is_hub_id, model_directory, place_of, training_steps

_JOB_KEYS = {
    "bf16": "precision",
    "cutoff_len": "seq_len",
    "finetuning_type": "finetuning",
    "fp16": "precision",
    "fp8": "precision",
    "fp8_recipe": "precision",
    "freeze_language_model": "freeze_language_model",
    "freeze_multi_modal_projector": "freeze_multi_modal_projector",
    "freeze_vision_tower": "freeze_vision_tower",
    "image_max_pixels": "image_max_pixels",
    "mtp_num_layers": "mtp_num_layers",
    "num_train_epochs": "epochs",
    "packing": "packing",
    "stage": "stage",
}
"""Trainer keys that follow from a key of the job, on which memory and time were predicted."""

_ACCOUNT_FLAGS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def user_keys(spec: Spec, layout: Layout, warnings: list[str]) -> dict[str, Any]:
    """`job.trainer`, checked key by key and against the plan."""
    given = dict(spec.job.trainer)
    if "warmup_ratio" in given and "warmup_steps" not in given:
        given = _with_warmup_steps(given, spec)
    fixed = _fixed_values(spec, layout)
    checked: dict[str, Any] = {}
    for name, value in given.items():
        where = place_of(spec, str(name))
        checked[name] = check_key(str(name), value, where)
        if name in fixed and checked[name] not in fixed[name]:
            _refuse_contradiction(name, checked[name], fixed[name][0], where)
        if needs := needed_transformers(known_keys()[name]):
            warnings.append(needs)
    _check_combinations(checked, spec, layout)
    return checked


def _with_warmup_steps(given: dict[str, Any], spec: Spec) -> dict[str, Any]:
    """A ratio as the number of steps that it stands for: transformers 5 has given up warmup_ratio."""
    ratio, steps = given["warmup_ratio"], training_steps(spec.job)
    is_ratio = isinstance(ratio, int | float) and not isinstance(ratio, bool) and 0 <= ratio < 1
    if steps is None or not is_ratio:
        return given  # check_key refuses it, and says what to write
    return {
        **{key: value for key, value in given.items() if key != "warmup_ratio"},
        "warmup_steps": math.ceil(ratio * steps),
    }


def _fixed_values(spec: Spec, layout: Layout) -> dict[str, tuple[Any, ...]]:
    """Key -> the values that agree with the plan; the first one is its own. For the keys that the plan decides."""
    job, recompute = spec.job, layout.recompute
    full, selective = recompute.granularity == "full", recompute.granularity == "selective"
    fp8 = job.precision not in ("bf16", "fp16")
    fixed: dict[str, tuple[Any, ...]] = {
        "tensor_model_parallel_size": (layout.tp,),
        "pipeline_model_parallel_size": (layout.pp,),
        "virtual_pipeline_model_parallel_size": (layout.vpp,) if layout.vpp > 1 else (None,),
        "pipeline_model_parallel_layout": (layout.pipeline_layout,),
        "context_parallel_size": (layout.cp,),
        "expert_model_parallel_size": (layout.ep,) if layout.ep > 1 else (1, None),
        "expert_tensor_parallel_size": (layout.etp,) if facts_of(spec.model).is_moe else (None, 1),
        "sequence_parallel": (layout.sequence_parallel,),
        "per_device_train_batch_size": (layout.micro_batch_size,),
        "gradient_accumulation_steps": (layout.gradient_accumulation_steps,),
        "use_distributed_optimizer": (layout.distributed_optimizer,),
        "overlap_grad_reduce": (layout.overlap_grad_reduce,),
        "overlap_param_gather": (layout.overlap_param_gather,),
        "accumulate_allreduce_grads_in_fp32": (True,) if job.precision != "fp16" else (layout.grad_reduce_in_fp32,),
        "optimizer_cpu_offload": (layout.optimizer_offload_fraction > 0,),
        "optimizer_offload_fraction": (float(layout.optimizer_offload_fraction),),
        "cross_entropy_loss_fusion": (layout.cross_entropy_fusion,),
        "recompute_granularity": (None if recompute.granularity == "none" else recompute.granularity,),
        "recompute_method": (recompute.method or "uniform",) if full else (None,),
        "recompute_num_layers": (recompute.num_layers or 1,) if full else (None,),
        "recompute_modules": (",".join(recompute.modules) or "core_attn",) if selective else (None,),
        "moe_layer_recompute": (False,),
        "mtp_num_layers": (job.mtp_num_layers,),
        **dict.fromkeys(_ACCOUNT_FLAGS, (None, False)),
        "stage": (job.stage,),
        "do_train": (True,),
        "finetuning_type": ("full",),
        "cutoff_len": (job.seq_len,),
        "num_train_epochs": (float(job.epochs),),
        "packing": (True, None) if job.packs else (False, None, job.packing),
        "bf16": (job.precision != "fp16",),
        "fp16": (job.precision == "fp16",),
    }
    fixed["fp8_param"] = (layout.fp8_param,)
    if not fp8:
        fixed |= {"fp8": (None,), "fp8_recipe": (None,)}
    if spec.model.vision is not None:
        fixed |= {
            "freeze_vision_tower": (job.freeze_vision_tower,),
            "freeze_multi_modal_projector": (job.freeze_multi_modal_projector,),
            "freeze_language_model": (job.freeze_language_model,),
            "image_max_pixels": (job.image_max_pixels,),
        }
    return fixed


def _refuse_contradiction(name: str, value: Any, planned: Any, where: str) -> None:
    what = f"{name} is {value!r}, and the plan was made for {planned!r}"
    if name in _JOB_KEYS:
        raise SpecError(what, where=where, remedy=f"set job.{_JOB_KEYS[name]} and leave {name} out")
    raise LayoutError(what, where=where, remedy="leave it out, or ask for it under job.pin, so that it is predicted")


def evaluates(user: Mapping[str, Any]) -> bool:
    """True when the user's keys make the trainer evaluate, which it does not by itself."""
    return user.get("eval_strategy", "no") != "no" or bool(user.get("eval_on_start"))


def _check_combinations(user: Mapping[str, Any], spec: Spec, layout: Layout) -> None:
    """Keys that are right alone and wrong together, or with this plan."""
    _check_packing(user, spec, layout)
    _check_evaluation(user, spec, layout)
    steps, warmup = training_steps(spec.job, user.get("max_steps")), user.get("warmup_steps")
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
    path = user.get("model_name_or_path")
    if path == spec.model.name and spec.model.config_path is None and is_hub_id(path):
        raise SpecError(
            f"{path!r} is a hub id, and the Megatron adapter reads local directories only",
            where=place_of(spec, "model_name_or_path"),
            remedy=f"leave it out ({model_directory(spec.model)} is the default) or name a directory on every node",
        )
    additional = user.get("additional_configs")
    if isinstance(additional, Mapping):
        _check_additional_configs(additional, spec, layout)


def _check_packing(user: Mapping[str, Any], spec: Spec, layout: Layout) -> None:
    packs_exactly = user.get("neat_packing") or user.get("sequence_packing")
    if packs_exactly:
        key = "neat_packing" if user.get("neat_packing") else "sequence_packing"
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
            # trainer/trainer.py, _prepare_train_inputs takes positions that it has made without packing alone.
            raise SpecError(f"{key} and mtp_num_layers exclude each other in the Megatron adapter", where=where)


def _check_evaluation(user: Mapping[str, Any], spec: Spec, layout: Layout) -> None:
    """An evaluation needs samples, and a whole global batch of them.

    trainer/trainer.py, _stream_eval_inputs takes as many micro batches at a time as a training step has; without one
    such step gather_metrics ends in an IndexError.
    """
    if not evaluates(user):
        return
    where = place_of(spec, "eval_strategy" if "eval_strategy" in user else "eval_on_start")
    share = user.get("val_size") or 0.0
    if not share and not user.get("eval_dataset"):
        raise SpecError("there is nothing to evaluate on", where=where, remedy="set eval_dataset or val_size too")
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


def _check_additional_configs(additional: Mapping[str, Any], spec: Spec, layout: Layout) -> None:
    where = place_of(spec, "additional_configs")
    for name in additional:
        if str(name).startswith(("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")):
            raise LayoutError(
                f"the adapter refuses {name}: layers must divide evenly by its own count",
                where=where,
                remedy="pin a pipeline_layout for uneven stages",
            )
        if name in _fixed_values(spec, layout):
            raise LayoutError(
                f"{name} is decided by the plan", where=where, remedy="leave it out, or ask for it under job.pin"
            )
