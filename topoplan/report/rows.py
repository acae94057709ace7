"""A ranking as CSV, one row per plan, for spreadsheets."""

from __future__ import annotations

import csv
from typing import TextIO

from topoplan.bundle.warnings import warnings_and_refusal
from topoplan.planner.effort import job_effort
from topoplan.planner.plan import Plan, Ranking
from topoplan.planner.rank import tags_of
from topoplan.planner.view import plan_to_dict, rounded
from topoplan.specs.spec import Spec

_LAYOUT = (
    "backend",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "etp",
    "dp",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "sequence_parallel",
    "distributed_optimizer",
    "pipeline_layout",
    "optimizer_offload_fraction",
    "zero_stage",
    "sharding",
    "offload_optimizer",
    "offload_param",
    "offload",
    "ulysses",
    "fused_linear_cross_entropy",
    "expandable_segments",
)
_MEMORY = ("allocated_gib", "reserved_gib", "device_gib", "capacity_gib", "host_gib")
_SPEED = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
COLUMNS = (
    "rank",
    "id",
    *_LAYOUT,
    "recompute",
    "fits",
    *_MEMORY,
    "step_s",
    "step_low_s",
    "step_high_s",
    *_SPEED,
    "hours",
    "gpu_hours",
    "warnings",
    "tags",
)
"""All columns, in order; a value that a plan lacks is empty."""


def write_rows(stream: TextIO, ranking: Ranking, *, top: int) -> None:
    """Write a header, and a row for each of the best `top` plans."""
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for rank, plan in enumerate(ranking.plans[:top], start=1):
        writer.writerow(_row(ranking.spec, plan, rank))


def _row(spec: Spec, plan: Plan, rank: int) -> dict[str, object]:
    view = plan_to_dict(plan, rank)
    effort = job_effort(spec, plan)
    recompute = plan.layout.recompute
    low_s, high_s = view["time"]["band"]
    return {
        "rank": rank,
        "id": view["id"],
        **{key: view["layout"].get(key) for key in _LAYOUT},
        "recompute": " ".join(
            str(word)
            for word in (recompute.granularity, *recompute.modules, recompute.method, recompute.num_layers)
            if word is not None
        ),
        "fits": view["fits"],
        **{key: view["memory"][key] for key in _MEMORY},
        "step_s": view["time"]["step_s"],
        "step_low_s": low_s,
        "step_high_s": high_s,
        **{key: view[key] for key in _SPEED},
        "hours": rounded(effort.hours) if effort else None,
        "gpu_hours": rounded(effort.gpu_hours) if effort else None,
        "warnings": "; ".join(warnings_and_refusal(spec, plan)[0]),
        "tags": " ".join(tags_of(plan)),
    }
