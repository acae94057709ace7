"""The JSON forms of a spec and of a plan, as `topoplan rank --json` prints them and `plan.json` stores them.

Results are rounded to six significant digits: more than a prediction can know, and stable against the last bits of
floating point. Inputs are kept exactly, in the fields and units of `topoplan.specs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import groupby
from typing import Any

from topoplan.layout.forms import layout_to_dict
from topoplan.planner.plan import Plan
from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.lengths import Lengths, histogram_lines
from topoplan.specs.model import Layer, Model
from topoplan.specs.spec import Spec
from topoplan.units import GIB

_TERA = 1e12
_SIGNIFICANT_DIGITS = 6

SUMMARY = ("mean", "median", "p99", "longest")
"""Summary of the lengths of samples, in tokens."""


def rounded(value: float) -> float:
    """Return `value` rounded to six significant digits; infinity and NaN are left as they are."""
    if not math.isfinite(value):
        return value
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")


def plan_to_dict(plan: Plan, rank: int | None = None) -> dict[str, Any]:
    """Return an entry of `plans` in `topoplan.rank/1`; without `rank` for a single prediction."""
    memory, time = plan.memory, plan.time
    view: dict[str, Any] = {} if rank is None else {"rank": rank}
    view |= {
        "id": plan.id,
        "layout": layout_to_dict(plan.layout),
        "fits": plan.fits,
        "memory": {
            "allocated_gib": rounded(memory.allocated_bytes / GIB),
            "reserved_gib": rounded(memory.reserved_bytes / GIB),
            "device_gib": rounded(memory.device_bytes / GIB),
            "capacity_gib": rounded(memory.capacity_bytes / GIB),
            "band": [rounded(bound / GIB) for bound in memory.shown_bytes],
            "margin_gib": rounded(memory.margin_bytes / GIB),
            "host_gib": rounded(memory.host_bytes / GIB),
            "by_stage": [
                {
                    "stage": stage.stage,
                    "allocated_gib": rounded(stage.allocated_bytes / GIB),
                    "parts_gib": {name: rounded(size / GIB) for name, size in stage.parts_bytes.items()},
                }
                for stage in memory.by_stage
            ],
        },
        "time": {
            "step_s": rounded(time.step_s),
            "band": [rounded(bound) for bound in time.band_s],
            "parts_s": {name: rounded(seconds) for name, seconds in time.parts_s.items()},
        },
        "tokens_per_s_per_gpu": rounded(plan.tokens_per_s_per_gpu),
        "tflops_per_gpu": rounded(plan.model_flops_per_s_per_gpu / _TERA),
        "mfu": rounded(plan.mfu),
        "warnings": list(plan.warnings),
    }
    if plan.padding_share is not None:
        view["padding_share"] = rounded(plan.padding_share)
    return view


def spec_to_dict(spec: Spec, *, whole: bool = False) -> dict[str, Any]:
    """Return `cluster`, `model`, `job`, and a user's own `profile`: everything that a prediction depends on.

    The path of the spec file is left out, and so are the lengths of the samples except for a summary, unless `whole`:
    then `topoplan.planner.inputs.spec_from_dict` restores an equal spec.
    """
    view = {
        "cluster": cluster_to_dict(spec.cluster),
        "model": model_to_dict(spec.model),
        "job": job_to_dict(spec.job, whole=whole),
    }
    return view if spec.profile is None else view | {"profile": _fields_of(spec.profile)}


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Return the fields of `Cluster`, with its GPU and its hosts."""
    return _fields_of(cluster)


def job_to_dict(job: Job, *, whole: bool = False) -> dict[str, Any]:
    """Return the fields of `Job`, with a summary of the lengths of its samples, or all of them with `whole`."""
    view = _fields_of(replace(job, lengths=None))
    del view["lengths"]
    if (lengths := job.lengths) is not None:
        view["lengths"] = {
            "source": lengths.source,
            "rule": lengths.rule,
            "error": lengths.error,
            "stride": lengths.stride,
            "samples": lengths.samples,
            **length_summary(lengths),
            **({"columns": dict(lengths.columns)} if whole and lengths.columns else {}),
            **({"counts": histogram_lines(lengths.counts)} if whole else {}),
        }
    return view


def length_summary(lengths: Lengths) -> dict[str, float]:
    """Return a summary of the lengths of the samples in four numbers, in tokens."""
    values = (rounded(lengths.mean), lengths.quantile(0.5), lengths.quantile(0.99), lengths.longest)
    return dict(zip(SUMMARY, values, strict=True))


def model_to_dict(model: Model) -> dict[str, Any]:
    """Return the fields of `Model`; runs of equal layers are one entry with their `count`."""
    view = {field.name: _plain(getattr(model, field.name)) for field in fields(model) if field.name != "layers"}
    runs = ((layer, len(list(run))) for layer, run in groupby(model.layers))
    return view | {
        "num_layers": model.num_layers,
        "layers": [{"count": count, **_layer_to_dict(layer)} for layer, count in runs],
    }


def _layer_to_dict(layer: Layer) -> dict[str, Any]:
    view = _fields_of(layer)
    return view if layer.predicts_next else {key: view[key] for key in ("attention", "ffn")}


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}


def _plain(value: Any) -> Any:
    """Return `value` in types that JSON has."""
    if is_dataclass(value):
        return _fields_of(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(value)  # a date in the user's trainer keys, for one
