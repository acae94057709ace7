"""Layouts from and to their JSON form (`topoplan predict`, `pin`, plan.json)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import chain
from math import prod
from typing import Any

from topoplan.errors import LayoutError, nearest
from topoplan.layout.layout import BACKENDS, MEGATRON_BACKENDS, RECOMPUTE_MODULES, SHARDED_BACKENDS, Layout, Recompute
from topoplan.layout.stages import vpp_of
from topoplan.specs.cluster import Cluster
from topoplan.specs.facts import facts_of
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.units import shown

_TYPES = {field.name: field.type for field in fields(Layout)}
_MOST = 10_000_000
_IN_FP32 = "grad_reduce_in_fp32"
"""A key of Megatron's and of one other."""
_SHARDED_KEYS = {
    "ddp": (),
    "deepspeed": ("zero_stage", "offload_optimizer", "offload_param", "ulysses"),
    "fsdp2": ("sharding", "offload", "sync_each_batch", "ulysses", _IN_FP32),
}
_ALL_SHARDED_KEYS = ("fused_linear_cross_entropy", "expandable_segments")
_COMMON_KEYS = (
    *("backend", "tp", "pp", "vpp", "cp", "ep", "etp", "dp"),
    *("micro_batch_size", "gradient_accumulation_steps", "recompute"),
)


def keys_of(backend: str) -> tuple[str, ...]:
    """The keys that layouts of a backend have. A backend that splits data alone has its degrees too, all of them 1."""
    if backend in SHARDED_BACKENDS:
        return (*_COMMON_KEYS, *_SHARDED_KEYS[backend], *_ALL_SHARDED_KEYS)
    others = {*chain.from_iterable(_SHARDED_KEYS.values()), *_ALL_SHARDED_KEYS} - {_IN_FP32}
    return tuple(key for key in _TYPES if key not in others)


def layout_to_dict(layout: Layout) -> dict[str, Any]:
    """The JSON form, every key of its backend present; what a recompute mode does not use is left out."""
    values = asdict(layout)
    form = {key: values[key] for key in keys_of(layout.backend)}
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


def with_overlap(switches: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Layout keys with overlap_param_gather off where what it needs is off, unless they say themselves.

    Off too where no checkpoint is saved: mcore_adapter then saves a final model of which a part was not gathered yet
    (`topoplan/backends/known_faults.py`, stale-final-weights).

    Source: MCA `training_args.py::MegatronArguments.__post_init__`, Megatron-LM `training/arguments.py`.
    """
    needed = switches.get("distributed_optimizer", True) and switches.get("overlap_grad_reduce", True)
    needed = needed and job.trainer.get("save_strategy") != "no"
    return {**({} if needed else {"overlap_param_gather": False}), **switches}


def with_loss(switches: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Layout keys with the fused loss that the trainer means, unless they say themselves.

    Adapters on Megatron are ms-swift's, whose fused loss is megatron-core's own (4.6.0
    `swift/megatron/arguments/megatron_args.py`); Megatron-Bridge's and SimuMax's is Transformer Engine's.
    """
    return {"cross_entropy_fusion_impl": "native", **switches} if job.finetuning == "lora" else dict(switches)


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
    elif key == "sharding" and value not in ("full", "hybrid"):
        raise LayoutError(shown(value), where=where, expected="expected full or hybrid")
    elif key == "moe_token_dispatcher_type" and value not in ("alltoall", "flex"):
        raise LayoutError(shown(value), where=where, expected="expected alltoall or flex")
    elif key == "pipeline_layout" and not isinstance(value, str):
        raise LayoutError(shown(value), where=where, expected='expected a string such as "Et*3|t*4L"')
    return value


def layout_from_dict(form: Mapping[str, Any], cluster: Cluster, model: Model, job: Job) -> Layout:
    """A layout with what its form leaves out filled in. A key that is null counts as left out.

    `dp` and `gradient_accumulation_steps` are derived from the cluster and the batch, `vpp` from `pipeline_layout`;
    `sequence_parallel` is on with tp > 1; `etp` is 1 with ep > 1 and tp without (megatron-core's own default) for a
    mixture of experts; `overlap_param_gather` is off where what it needs is off; `with_loss` says which fused loss.

    Raises LayoutError for an unknown key, a wrong type, and degrees that do not multiply to the cluster or the batch.
    """
    if not isinstance(form, Mapping):
        raise LayoutError(
            f"{shown(form)} is not a layout", where="layout", expected='expected a mapping such as {"tp": 4}'
        )
    given = {key: value for key, value in form.items() if value is not None}
    backend = given.get("backend", "mca")
    if backend not in BACKENDS:
        raise LayoutError(
            f"unknown backend {shown(backend)}",
            where="layout.backend",
            expected=f"expected {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}",
        )
    for key in form:
        if key not in _TYPES:
            hint = nearest(key, _TYPES) if isinstance(key, str) else ""
            raise LayoutError(f"unknown key {shown(key)}", where="layout", remedy=hint)
    values = {key: _checked(key, value) for key, value in given.items() if key not in ("backend", "recompute")}
    for key in values:
        if key not in keys_of(backend):
            raise LayoutError(f"{key} is not a key of backend {backend}", where=f"layout.{key}", remedy="leave it out")
    if backend in MEGATRON_BACKENDS:
        values = with_loss(with_overlap(values, job), job)
    values["recompute"] = recompute_from_value(given.get("recompute", "none"), "layout.recompute")
    degrees = {key: values.get(key, 1) for key in ("tp", "pp", "cp", "ulysses")}
    if backend in MEGATRON_BACKENDS:
        del degrees["ulysses"]
    split, world = prod(degrees.values()), cluster.world_size
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
        values["vpp"] = vpp_of(values["pipeline_layout"], degrees["pp"])
    if backend in SHARDED_BACKENDS:
        return Layout(backend=backend, distributed_optimizer=False, **values)
    values.setdefault("sequence_parallel", degrees["tp"] > 1)
    values.setdefault("etp", degrees["tp"] if facts_of(model).is_moe and values.get("ep", 1) == 1 else 1)
    return Layout(backend=backend, **values)
