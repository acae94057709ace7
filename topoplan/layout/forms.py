"""Layouts from and to their JSON form (`topoplan predict`, `pin`, plan.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from typing import Any

from topoplan.errors import InputError, LayoutError
from topoplan.layout.layout import SHARDED_BACKENDS, Layout, batch_remedy, keys_of, pinned_keys_of, undivided
from topoplan.layout.stages import sized_pipeline_layout, vpp_of
from topoplan.specs.cluster import Cluster
from topoplan.specs.facts import facts_of
from topoplan.specs.forms import Form, PinForm, RecomputeForm
from topoplan.specs.job import Job
from topoplan.specs.layout_parts import SIZE_KEYS, Recompute, completed_recompute, stage_sizes_in
from topoplan.specs.mistakes import check_form
from topoplan.specs.model import Model
from topoplan.specs.source import dotted


def layout_to_dict(layout: Layout) -> dict[str, Any]:
    """Return the JSON form with every key of the backend; unused fields of the recompute mode are left out."""
    form = {key: getattr(layout, key) for key in keys_of(layout.backend)}
    form["recompute"] = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in asdict(layout.recompute).items()
        if value not in (None, ())
    }
    return form


def recompute_from_value(value: Any, where: str = "recompute") -> Recompute:
    """Return a recompute mode from its JSON form, or from its granularity alone. Raises LayoutError."""
    return completed_recompute(_given(RecomputeForm, value, where), where)


def _given(kind: type[Form], value: Any, where: str) -> dict[str, Any]:
    """Return the keys of a form and their values; a null key counts as left out. Raises LayoutError."""
    try:
        return check_form(kind, value, lambda path: dotted((where, *path))).given()
    except InputError as error:
        raise LayoutError(error.what, where=error.where, expected=error.expected, remedy=error.remedy) from None


def with_overlap(switches: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Return layout keys with overlap_param_gather off if its requirements are off, unless the keys set it themselves.

    It is also off if no checkpoint is saved: mcore_adapter then saves a final model with parts that have not been
    gathered yet (`topoplan/trainers/known_faults.py`, stale-final-weights).

    Source: MCA `training_args.py::MegatronArguments.__post_init__`, Megatron-LM `training/arguments.py`.
    """
    needed = switches.get("distributed_optimizer", True) and switches.get("overlap_grad_reduce", True)
    needed = needed and job.trainer.get("save_strategy") != "no"
    return {**({} if needed else {"overlap_param_gather": False}), **switches}


def with_loss(switches: Mapping[str, Any], backend: str) -> dict[str, Any]:
    """Return layout keys with the trainer's default loss, unless the keys set it themselves.

    On backend megatron it is ms-swift's default, megatron-core's own fused function (4.6.0
    `swift/megatron/arguments/megatron_args.py`); mcore_adapter's default is not fused.
    """
    usual = {"cross_entropy_fusion": True, "cross_entropy_fusion_impl": "native"} if backend == "megatron" else {}
    return {**usual, **switches}


def layout_from_dict(form: Mapping[str, Any], cluster: Cluster, model: Model, job: Job) -> Layout:
    """Return a layout with what its form leaves out filled in; a null key counts as left out.

    `dp` and `gradient_accumulation_steps` are derived from the cluster and the batch; `vpp` from `pipeline_layout`,
    which is derived from the sizes of first and last stage if these are given. `sequence_parallel` is on with tp > 1.
    For a mixture of experts, `etp` is 1 with ep > 1, and tp otherwise (megatron-core's own default).
    `overlap_param_gather` is off if its requirements are off; `with_loss` determines the fused loss.

    Raises LayoutError for an unknown key, a wrong value, and degrees that do not multiply to the cluster or the batch.
    """
    values = {"backend": "mca", **_given(PinForm, form, "layout")}
    backend = values["backend"]
    for key in values:
        if key not in pinned_keys_of(backend):
            raise LayoutError(f"{key} is not a key of backend {backend}", where=f"layout.{key}", remedy="leave it out")
    values["recompute"] = completed_recompute(values.get("recompute", {}), "layout.recompute")
    _fill_world_and_batch(values, cluster.world_size, job.global_batch_size)
    if "pipeline_layout" in values and "vpp" not in values:
        values["vpp"] = vpp_of(values["pipeline_layout"], values.get("pp", 1))
    _fill_stage_sizes(values, model, job)
    if backend in SHARDED_BACKENDS:
        return Layout.of(**values, distributed_optimizer=False)
    values = with_loss(with_overlap(values, job), backend)
    tp = values.get("tp", 1)
    values.setdefault("sequence_parallel", tp > 1)
    values.setdefault("etp", tp if facts_of(model).is_moe and values.get("ep", 1) == 1 else 1)
    return Layout.of(**values)


def _fill_stage_sizes(values: dict[str, Any], model: Model, job: Job) -> None:
    """Replace Megatron's stage sizes by the pipeline_layout that they amount to. Raises LayoutError."""
    sizes = stage_sizes_in(values)
    given = [key for key in SIZE_KEYS if values.pop(key, None)]
    if sizes is None:
        return
    split = model.num_layers, values.get("pp", 1), values.get("vpp", 1)
    try:
        text = sized_pipeline_layout(*split, sizes, job.mtp_num_layers)
    except LayoutError as error:
        raise LayoutError(error.what, where=f"layout.{given[0]}") from None
    if text != values.setdefault("pipeline_layout", text):
        raise LayoutError(f"{given[0]} beside another pipeline_layout", where=f"layout.{given[0]}")


def _fill_world_and_batch(values: dict[str, Any], world: int, batch: int) -> None:
    """Add dp and gradient_accumulation_steps. Raises LayoutError if they do not multiply to the world or the batch."""
    degrees = {key: values.get(key, 1) for key in ("tp", "pp", "cp", "ulysses") if key in keys_of(values["backend"])}
    split = prod(degrees.values())
    words = " * ".join(f"{key} {value}" for key, value in degrees.items())
    if world % split:
        raise LayoutError(
            f"world size {world} % ({words}) = {world % split}",
            where="layout",
            expected="expected degrees whose product divides the number of GPUs",
        )
    dp = world // split
    if values.setdefault("dp", dp) != dp:
        raise LayoutError(
            f"{words} * dp {values['dp']} = {split * values['dp']}, the cluster has {world} GPUs",
            where="layout.dp",
            remedy="leave dp out: it is derived",
        )
    micro_batch = values.get("micro_batch_size", 1)
    if equation := undivided(batch, micro_batch, dp):
        raise LayoutError(equation, where="layout", remedy=batch_remedy(batch, micro_batch, dp))
    steps = batch // (micro_batch * dp)
    if values.setdefault("gradient_accumulation_steps", steps) != steps:
        raise LayoutError(
            f"micro_batch_size {micro_batch} * dp {dp} * gradient_accumulation_steps "
            f"{values['gradient_accumulation_steps']} != global_batch_size {batch}",
            where="layout.gradient_accumulation_steps",
            remedy="leave it out: it is derived",
        )
