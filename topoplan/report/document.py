"""A ranking as JSON: the form `topoplan.rank/1`."""

from __future__ import annotations

from typing import Any

from topoplan.layout.forms import layout_to_dict
from topoplan.planner.assumed import machine_note
from topoplan.planner.plan import Ranking
from topoplan.planner.view import plan_to_dict, spec_to_dict
from topoplan.report.dump import picked
from topoplan.report.effort import effort_to_dict, job_effort

SCHEMA = "topoplan.rank/1"


def ranking_to_dict(ranking: Ranking, *, top: int, rejected: bool) -> dict[str, Any]:
    """The best `top` plans; the rejected layouts only when asked for."""
    view: dict[str, Any] = {
        "schema": SCHEMA,
        **spec_to_dict(ranking.spec),
        "counts": picked(ranking.counts, "candidates illegal out_of_memory dominated ranked"),
        "elapsed_s": round(ranking.elapsed_s, 3),
        "searched": round(ranking.searched, 4),
        "plans": [
            plan_to_dict(plan, rank) | {"trainer": plan.trainer} | effort_to_dict(job_effort(ranking.spec, plan))
            for rank, plan in enumerate(ranking.plans[:top], start=1)
        ],
        "assumed": [note for note in (machine_note(ranking.spec.cluster),) if note],
        "notes": list(ranking.notes),
        "crossings": list(ranking.crossings),
    }
    if ranking.data_notes:
        view["data_notes"] = list(ranking.data_notes)
    if rejected:
        view["rejected"] = [
            {"layout": layout_to_dict(out.layout), **picked(out, "rule reason fix")} for out in ranking.rejected
        ]
    return view
