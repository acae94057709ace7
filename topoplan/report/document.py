"""A ranking as JSON (`topoplan.rank/1`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from topoplan.layout.forms import layout_to_dict
from topoplan.planner.effort import job_effort
from topoplan.planner.oddities import machine_note
from topoplan.planner.plan import Plan, Ranking
from topoplan.planner.rank import tags_of
from topoplan.planner.view import plan_to_dict, spec_to_dict
from topoplan.report.answer import answer_of, answer_to_dict
from topoplan.report.dump import picked
from topoplan.report.effort import effort_to_dict
from topoplan.report.ways_out import way_out_to_dict
from topoplan.specs.spec import Spec

SCHEMA = "topoplan.rank/1"


def ranking_to_dict(
    ranking: Ranking, *, top: int, rejected: bool, words: Sequence[str] = (), assumed: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the best `top` plans, and the rejected layouts if requested.

    `words` are SPEC and the options given; `assumed` are sentences on what the options leave open.
    """
    answer = answer_of(ranking, top=top, words=words)
    view: dict[str, Any] = {
        "schema": SCHEMA,
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
        "notes": list(ranking.notes),
        "crossings": list(ranking.crossings),
    }
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
