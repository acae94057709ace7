"""A ranking as JSON (`topoplan.rank/1`), and as CSV for spreadsheets, one row per plan."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Any, TextIO

from topoplan.bundle.warnings import warnings_and_refusal
from topoplan.layout.forms import layout_to_dict
from topoplan.planner.effort import job_effort
from topoplan.planner.oddities import machine_note
from topoplan.planner.plan import Plan, Ranking
from topoplan.planner.rank import tags_of
from topoplan.planner.view import plan_to_dict, rounded, spec_to_dict
from topoplan.report.answer import answer_of, answer_to_dict
from topoplan.report.dump import picked
from topoplan.report.text import effort_to_dict
from topoplan.report.ways_out import next_way, way_out_to_dict
from topoplan.specs.spec import Spec


def ranking_to_dict(
    ranking: Ranking, *, top: int, rejected: bool, words: Sequence[str] = (), assumed: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the best `top` plans, and the rejected layouts if requested. `words` are SPEC and the options given;
    `assumed` are sentences on what the options leave open."""
    answer = answer_of(ranking, top=top, words=words)
    view: dict[str, Any] = {
        "schema": "topoplan.rank/1",
        **spec_to_dict(ranking.spec),
        "counts": picked(ranking.counts, "candidates illegal out_of_memory dominated ranked"),
        "elapsed_s": round(ranking.elapsed_s, 3),
        "searched": round(ranking.searched, 4),
        "plans": [
            ranked_to_dict(ranking.spec, plan, rank, warnings)
            for rank, (plan, warnings) in enumerate(zip(answer.shown, answer.warnings, strict=True), start=1)
        ]
        if answer
        else [],
        **answer_to_dict(answer),
        "assumed": [note for note in (*assumed, machine_note(ranking.spec.cluster)) if note],
        "notes": [*ranking.profile_notes, *ranking.notes],
        "crossings": list(ranking.crossings),
    }
    view["next"] = view["next"] or next_way(ranking)
    view["ways_out"] = [way_out_to_dict(way) for way in ranking.ways_out]
    if ranking.data_notes:
        view["data_notes"] = list(ranking.data_notes)
    if rejected:
        view["rejected"] = [
            {"layout": layout_to_dict(out.layout), **picked(out, "rule reason fix")} for out in ranking.rejected
        ]
    return view


def ranked_to_dict(spec: Spec, plan: Plan, rank: int, warnings: Sequence[str]) -> dict[str, Any]:
    """Return a plan with its rank (from 1) and every warning that `generate` would give."""
    return (
        plan_to_dict(plan, rank)
        | {"trainer": plan.trainer, "warnings": list(warnings), "tags": list(tags_of(plan))}
        | effort_to_dict(job_effort(spec, plan))
    )


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
    "trainer",
)
"""All columns, in order; a value that a plan lacks is empty."""


def write_rows(stream: TextIO, ranking: Ranking, *, top: int | None = None) -> None:
    """Write a header, and a row for each plan, or for each of the best `top`."""
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
        "trainer": plan.trainer,
    }
