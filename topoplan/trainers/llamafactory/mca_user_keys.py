"""The user's trainer keys (`job.trainer`) on the Megatron path, compared with the plan and with each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.errors import LayoutError, SpecError, nearest
from topoplan.layout.layout import Layout
from topoplan.specs.facts import facts_of
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.key_list import megatron_settings
from topoplan.trainers.llamafactory.mca_job import ROWS
from topoplan.trainers.llamafactory.user_keys import (
    check_evaluation,
    check_model_path,
    checked_keys,
    decided,
    evaluates,
)
from topoplan.trainers.megatron_keys import EMBEDDING, EP, ETP, LOSS
from topoplan.trainers.steps import megatron_steps
from topoplan.trainers.user_keys import place_of

_FP8 = ("fp8", "fp8_recipe")


def user_keys(spec: Spec, layout: Layout, written: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Return `job.trainer`, each key checked and compared with the plan, whose train.yaml has the keys in `written`."""
    fixed = _fixed_values(spec, written)
    remedy = "leave it out, or ask for it under job.pin, so that it is predicted"
    steps = megatron_steps(spec.job)
    user = checked_keys(spec, fixed, "mca", steps=steps, warnings=warnings, remedy=remedy)
    _check_combinations(user, spec, layout)
    additional = user.get("additional_configs")
    if isinstance(additional, Mapping):
        _check_additional_configs(additional, spec, fixed)
    return user


def _fixed_values(spec: Spec, written: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return for each key the values that agree with the plan, the plan's own first."""
    keys = (*ROWS, "moe_layer_recompute", "mtp_num_layers", *(_FP8 if "fp8" not in written else ()))
    fixed = decided(spec, written, keys, "mca")
    fixed |= {key: (1, None) for key in (EP, ETP) if key not in written}
    fixed |= dict.fromkeys((EMBEDDING, LOSS), (None, False))
    if spec.job.precision != "fp16":
        fixed["accumulate_allreduce_grads_in_fp32"] = (True,)  # bf16 enables it
    return fixed


def _check_combinations(user: Mapping[str, Any], spec: Spec, layout: Layout) -> None:
    """Raise an error for keys that are valid alone but not together, or not with this plan."""
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
    check_model_path(user, spec, ", and the Megatron adapter reads local directories only")


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
            # trainer/trainer.py, _prepare_train_inputs only builds the positions it needs without packing.
            raise SpecError(f"{key} and mtp_num_layers exclude each other in the Megatron adapter", where=where)


def _check_evaluation(user: Mapping[str, Any], spec: Spec, layout: Layout) -> None:
    """Raise an error unless an evaluation has a whole global batch of samples.

    trainer/trainer.py, _stream_eval_inputs takes as many micro-batches at a time as a training step has; without one
    such step, gather_metrics ends in an IndexError.
    """
    if not evaluates(user):
        return
    check_evaluation(user, spec)
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


def _check_additional_configs(additional: Mapping[str, Any], spec: Spec, fixed: Mapping[str, Any]) -> None:
    where = place_of(spec, "additional_configs")
    for name in additional:
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
