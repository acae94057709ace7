"""Layouts from and to their JSON form (`topoplan predict`, `pin`, plan.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from topoplan.errors import LayoutError, nearest
from topoplan.layout.layout import Layout, Recompute
from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.model import Model, Moe

_TYPES = {field.name: field.type for field in fields(Layout)}
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
    """A recompute mode from its JSON form, or from its granularity alone. Raises LayoutError."""
    if isinstance(value, str):
        value = {"granularity": value}
    if not isinstance(value, Mapping):
        raise LayoutError(f"{value!r} is not a recompute mode", where=where, expected='expected {"granularity": "none"}')
    if unknown := set(value) - {"granularity", "modules", "method", "num_layers"}:
        raise LayoutError(f"unknown key {sorted(unknown)[0]!r}", where=where)
    granularity = value.get("granularity", "none")
    if granularity not in ("none", "selective", "full"):
        raise LayoutError(f"granularity {granularity!r}", where=where, expected="expected none, selective or full")
    modules = tuple(value.get("modules") or ())
    if granularity == "selective":
        return Recompute(granularity="selective", modules=modules or ("core_attn",))
    if granularity == "full":
        method, num_layers = value.get("method") or "uniform", value.get("num_layers") or 1
        if method not in ("uniform", "block"):
            raise LayoutError(f"method {method!r}", where=where, expected="expected uniform or block")
        if not _is_whole(num_layers) or num_layers < 1:
            raise LayoutError(f"num_layers {num_layers!r}", where=where, expected="expected a whole number from 1")
        return Recompute(granularity="full", method=method, num_layers=num_layers)
    return Recompute()


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked(key: str, value: Any) -> Any:
    kind = str(_TYPES[key])
    if kind == "int":
        if not _is_whole(value) or value < 1:
            raise LayoutError(f"{value!r}", where=f"layout.{key}", expected="expected a whole number from 1")
    elif kind == "bool":
        if not isinstance(value, bool):
            raise LayoutError(f"{value!r}", where=f"layout.{key}", expected="expected true or false")
    elif kind == "float":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise LayoutError(f"{value!r}", where=f"layout.{key}", expected="expected a fraction from 0 to 1")
        return float(value)
    elif key == "pipeline_layout" and value is not None and not isinstance(value, str):
        raise LayoutError(f"{value!r}", where=f"layout.{key}", expected='expected a string such as "Et*3|t*4L"')
    return value


def layout_from_dict(form: Mapping[str, Any], cluster: Cluster, model: Model, job: Job) -> Layout:
    """A layout with what its form leaves out filled in.

    `dp` and `gradient_accumulation_steps` are derived from the cluster and the batch; `sequence_parallel` is on with
    tp > 1; `etp` is 1 with ep > 1 and tp without (megatron-core's own default) for a mixture of experts.

    Raises LayoutError for an unknown key, a wrong type, and degrees that do not multiply to the cluster or the batch.
    """
    backend = form.get("backend", "mca")
    if backend in OTHER_BACKENDS:
        raise LayoutError(
            f"backend {backend!r} is not predicted yet", where="layout.backend", expected="expected mca or megatron"
        )
    if backend not in ("mca", "megatron"):
        raise LayoutError(f"unknown backend {backend!r}", where="layout.backend", expected="expected mca or megatron")
    for key in form:
        if key not in _TYPES:
            hint = nearest(key, _TYPES)
            raise LayoutError(f"unknown key {key!r}", where="layout", remedy=hint)
    values = {
        key: _checked(key, value) for key, value in form.items() if key not in ("backend", "recompute") and value is not None
    }
    values["recompute"] = recompute_from_value(form.get("recompute") or "none", "layout.recompute")
    tp, pp, cp, ep = (values.get(key, 1) for key in ("tp", "pp", "cp", "ep"))
    world = cluster.world_size
    if world % (tp * pp * cp):
        raise LayoutError(f"world size {world} % (tp {tp} * pp {pp} * cp {cp}) = {world % (tp * pp * cp)}", where="layout")
    dp = world // (tp * pp * cp)
    if values.setdefault("dp", dp) != dp:
        raise LayoutError(
            f"tp {tp} * pp {pp} * cp {cp} * dp {values['dp']} = {tp * pp * cp * values['dp']}, the cluster has {world} GPUs",
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
    values.setdefault("sequence_parallel", tp > 1)
    is_moe = any(isinstance(layer.ffn, Moe) for layer in model.layers)
    values.setdefault("etp", tp if is_moe and ep == 1 else 1)
    return Layout(backend=backend, **values)
