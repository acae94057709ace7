"""Layouts from and to their JSON form (`topoplan predict`, `pin`, plan.json)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from topoplan.errors import LayoutError, nearest
from topoplan.layout.layout import Layout, Recompute
from topoplan.layout.rules import RECOMPUTE_MODULES, facts_of
from topoplan.layout.stages import vpp_of
from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.units import shown

_TYPES = {field.name: field.type for field in fields(Layout)}
_MOST = 10_000_000
OTHER_BACKENDS = ("deepspeed", "fsdp2", "ddp")


def layout_to_dict(layout: Layout) -> dict[str, Any]:
    """The JSON form, every key present; what a recompute mode does not use is left out of `recompute`."""
    form = asdict(layout)
    form["recompute"] = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in form["recompute"].items()
        if value not in (None, ())
    }
    return form


def recompute_from_value(value: Any, where: str = "recompute") -> Recompute:
    """A recompute mode from its JSON form, or from its granularity alone. Raises LayoutError.

    Without a granularity, modules mean selective, a method or a number of layers full.
    """
    if isinstance(value, str):
        value = {"granularity": value}
    if not isinstance(value, Mapping):
        raise LayoutError(
            f"{shown(value)} is not a recompute mode", where=where, expected='expected {"granularity": "none"}'
        )
    given = {key: item for key, item in value.items() if item is not None}
    for key in given:
        if key not in ("granularity", "modules", "method", "num_layers"):
            raise LayoutError(f"unknown key {shown(key)}", where=where)
    of_full = "method" in given or "num_layers" in given
    implied = "selective" if "modules" in given else "full" if of_full else "none"
    granularity = given.get("granularity", implied)
    if granularity not in ("none", "selective", "full"):
        raise LayoutError(f"granularity {shown(granularity)}", where=where, expected="expected none, selective or full")
    if (given.get("modules") and granularity != "selective") or (of_full and granularity != "full"):
        extra = next(key for key in ("modules", "method", "num_layers") if key in given)
        raise LayoutError(
            f"{extra} with granularity {granularity}",
            where=where,
            expected="expected modules with selective, method and num_layers with full",
        )
    if granularity == "selective":
        return Recompute(granularity="selective", modules=_modules(given.get("modules", ()), where) or ("core_attn",))
    if granularity == "full":
        method, num_layers = given.get("method", "uniform"), given.get("num_layers", 1)
        if method not in ("uniform", "block"):
            raise LayoutError(f"method {shown(method)}", where=where, expected="expected uniform or block")
        if not _is_count(num_layers):
            raise LayoutError(
                f"num_layers {shown(num_layers)}", where=where, expected=f"expected a whole number from 1 to {_MOST}"
            )
        return Recompute(granularity="full", method=method, num_layers=num_layers)
    return Recompute()


def _modules(value: Any, where: str) -> tuple[str, ...]:
    modules = value.split(",") if isinstance(value, str) else value
    if not isinstance(modules, Sequence):
        raise LayoutError(f"modules {shown(value)}", where=where, expected='expected a list such as ["mlp"]')
    for module in modules:
        if module not in RECOMPUTE_MODULES:
            raise LayoutError(
                f"unknown module {shown(module)}",
                where=f"{where}.modules",
                expected=f"expected some of {', '.join(RECOMPUTE_MODULES)}",
                remedy=nearest(module, RECOMPUTE_MODULES) if isinstance(module, str) else "",
            )
    return tuple(dict.fromkeys(modules))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST


def with_overlap(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Layout keys with overlap_param_gather off where what it needs is off, unless they say themselves.

    Source: MCA `training_args.py::MegatronArguments.__post_init__`, Megatron-LM `training/arguments.py`.
    """
    needed = switches.get("distributed_optimizer", True) and switches.get("overlap_grad_reduce", True)
    return {**({} if needed else {"overlap_param_gather": False}), **switches}


def _checked(key: str, value: Any) -> Any:
    kind = str(_TYPES[key])
    where = f"layout.{key}"
    if kind == "int":
        if not _is_count(value):
            raise LayoutError(shown(value), where=where, expected=f"expected a whole number from 1 to {_MOST}")
    elif kind == "bool":
        if not isinstance(value, bool):
            raise LayoutError(shown(value), where=where, expected="expected true or false")
    elif kind == "float":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise LayoutError(shown(value), where=where, expected="expected a fraction from 0 to 1")
        return float(value)
    elif key == "cross_entropy_fusion_impl" and value not in ("te", "native"):
        raise LayoutError(shown(value), where=where, expected="expected te or native")
    elif key == "moe_token_dispatcher_type" and value not in ("alltoall", "flex"):
        raise LayoutError(shown(value), where=where, expected="expected alltoall or flex")
    elif key == "pipeline_layout" and not isinstance(value, str):
        raise LayoutError(shown(value), where=where, expected='expected a string such as "Et*3|t*4L"')
    return value


def layout_from_dict(form: Mapping[str, Any], cluster: Cluster, model: Model, job: Job) -> Layout:
    """A layout with what its form leaves out filled in. A key that is null counts as left out.

    `dp` and `gradient_accumulation_steps` are derived from the cluster and the batch, `vpp` from `pipeline_layout`;
    `sequence_parallel` is on with tp > 1; `etp` is 1 with ep > 1 and tp without (megatron-core's own default) for a
    mixture of experts; `overlap_param_gather` is off where what it needs is off.

    Raises LayoutError for an unknown key, a wrong type, and degrees that do not multiply to the cluster or the batch.
    """
    if not isinstance(form, Mapping):
        raise LayoutError(
            f"{shown(form)} is not a layout", where="layout", expected='expected a mapping such as {"tp": 4}'
        )
    given = {key: value for key, value in form.items() if value is not None}
    backend = given.get("backend", "mca")
    if backend in OTHER_BACKENDS:
        raise LayoutError(
            f"backend {shown(backend)} is not predicted yet",
            where="layout.backend",
            expected="expected mca or megatron",
        )
    if backend not in ("mca", "megatron"):
        raise LayoutError(
            f"unknown backend {shown(backend)}", where="layout.backend", expected="expected mca or megatron"
        )
    for key in form:
        if key not in _TYPES:
            hint = nearest(key, _TYPES) if isinstance(key, str) else ""
            raise LayoutError(f"unknown key {shown(key)}", where="layout", remedy=hint)
    values = with_overlap(
        {key: _checked(key, value) for key, value in given.items() if key not in ("backend", "recompute")}
    )
    values["recompute"] = recompute_from_value(given.get("recompute", "none"), "layout.recompute")
    tp, pp, cp, ep = (values.get(key, 1) for key in ("tp", "pp", "cp", "ep"))
    world = cluster.world_size
    if world % (tp * pp * cp):
        raise LayoutError(
            f"world size {world} % (tp {tp} * pp {pp} * cp {cp}) = {world % (tp * pp * cp)}",
            where="layout",
            expected="expected degrees whose product divides the number of GPUs",
        )
    dp = world // (tp * pp * cp)
    if values.setdefault("dp", dp) != dp:
        product = tp * pp * cp * values["dp"]
        raise LayoutError(
            f"tp {tp} * pp {pp} * cp {cp} * dp {values['dp']} = {product}, the cluster has {world} GPUs",
            where="layout.dp",
            remedy="leave dp out: it is derived",
        )
    micro_batch, batch = values.get("micro_batch_size", 1), job.global_batch_size
    if batch % (micro_batch * dp):
        raise LayoutError(
            f"global_batch_size {batch} % (micro_batch_size {micro_batch} * dp {dp}) = {batch % (micro_batch * dp)}",
            where="layout",
        )
    steps = batch // (micro_batch * dp)
    if values.setdefault("gradient_accumulation_steps", steps) != steps:
        raise LayoutError(
            f"micro_batch_size {micro_batch} * dp {dp} * gradient_accumulation_steps "
            f"{values['gradient_accumulation_steps']} != global_batch_size {batch}",
            where="layout.gradient_accumulation_steps",
            remedy="leave it out: it is derived",
        )
    if "pipeline_layout" in values and "vpp" not in values:
        values["vpp"] = vpp_of(values["pipeline_layout"], pp)
    values.setdefault("sequence_parallel", tp > 1)
    values.setdefault("etp", tp if facts_of(model).is_moe and ep == 1 else 1)
    return Layout(backend=backend, **values)
