"""The data of a page of plans: the answer as in `rank --json`, and everything to show about one plan."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import topoplan
from topoplan.bundle.bundle import generate, usual_directory
from topoplan.bundle.warnings import warnings_and_refusal
from topoplan.errors import InputError
from topoplan.layout.layout import Layout
from topoplan.planner.account import memory_account, time_account, timeline
from topoplan.planner.communication import group_links, step_flows
from topoplan.planner.plan import Counts, Plan, Plans, Ranking, Rejection
from topoplan.planner.predict import predict
from topoplan.planner.view import plan_to_dict
from topoplan.report.answer import answer_lines, answer_of, figures, generate_command
from topoplan.report.bundle import starts
from topoplan.report.document import ranked_to_dict, ranking_to_dict
from topoplan.report.explanation import explanation_to_dict
from topoplan.report.text import band, counts_line, layout_label, spec_line
from topoplan.report.timeline_svg import svg
from topoplan.report.topology_drawing import topology_svg
from topoplan.report.ways_out import nothing_fits, ways_out_lines
from topoplan.specs.spec import Spec


def page_to_dict(
    ranking: Ranking, *, top: int, words: Sequence[str], assumed: Sequence[str], with_others: bool = False
) -> dict[str, Any]:
    """Return a ranking with the sentences that a terminal shows, and its nearest misses with their figures.

    Contains the best `top` plans; `with_others` adds the best plan of every way to split the job, for filtering.
    `words` are SPEC and the options of the search.
    """
    answer = answer_of(ranking, top=1, words=words)
    shown = ranking.plans[:top]
    splits = _best_of_splits(ranking.plans.layouts) if with_others else []
    others = {place + 1: ranking.plans[place] for place in splits if place >= top}
    if answer is None:
        first, *rest = str(nothing_fits(ranking)).splitlines()
        lines, further, counts = [{"title": "Answer", "first": first, "further": ""}], rest, ""
    else:
        lines, further = [asdict(line) for line in answer_lines(answer)], list(ways_out_lines(ranking))
        counts = counts_line(ranking)
    return {
        **_head(ranking.spec, ["topoplan", "rank", *words]),
        "counts": counts,
        "lines": lines,
        "further": further,
        **_said((*shown, *others.values())),
        "ranking": ranking_to_dict(ranking, top=top, rejected=False, words=words, assumed=assumed),
        "others": [
            ranked_to_dict(ranking.spec, plan, rank, warnings_and_refusal(ranking.spec, plan)[0])
            for rank, plan in others.items()
        ],
        "out": [_out_to_dict(ranking.spec, one) for one in ranking.rejected],
    }


def _best_of_splits(layouts: Sequence[Layout]) -> list[int]:
    """Return the index of the first layout of each split (backend, tp, pp, cp and ep)."""
    first: dict[tuple[str, int, int, int, int], int] = {}
    for place, one in enumerate(layouts):
        first.setdefault((one.backend, one.tp, one.pp, one.cp, one.ep), place)
    return list(first.values())


def plans_page_to_dict(spec: Spec, plans: Sequence[Plan], words: Sequence[str]) -> dict[str, Any]:
    """Return the page data of chosen plans, whether they fit or not; `words` are the arguments of `explain`."""
    layouts = [plan.layout for plan in plans]
    chosen = Ranking(spec=spec, plans=Plans(layouts, plans.__getitem__), counts=Counts(), elapsed_s=0.0)
    ranking = ranking_to_dict(chosen, top=len(plans), rejected=False, words=())
    names = ("Plan", "Versus")
    return {
        **_head(spec, ["topoplan", "explain", *words]),
        "counts": "",
        "lines": [
            {"title": name, "first": plan.id, "further": figures(plan) + ("" if plan.fits else "; it does not fit")}
            for name, plan in zip(names, plans, strict=False)
        ],
        "further": [],
        **_said(plans),
        "ranking": ranking | {"best": None, "safe": None, "next": None},
        "others": [],
        "out": [],
        "explained": True,
    }


def _head(spec: Spec, command: Sequence[str]) -> dict[str, Any]:
    return {
        "schema": "topoplan.page/1",
        "version": topoplan.__version__,
        "title": spec_line(spec),
        "command": shlex.join(command),
    }


def _said(plans: Sequence[Plan]) -> dict[str, Any]:
    return {
        "labels": {plan.id: layout_label(plan.layout) for plan in plans},
        "bands": {plan.id: band(plan.time) for plan in plans},
    }


def _out_to_dict(spec: Spec, out: Rejection) -> dict[str, Any]:
    """Return why a layout is out, with its figures if it only lacks memory."""
    view = {
        "id": out.layout.id,
        "label": layout_label(out.layout),
        "rule": out.rule,
        "reason": out.reason,
        "fix": out.fix,
    }
    return view | {"plan": plan_to_dict(predict(spec, out.layout, all_stages=False))} if out.rule == "memory" else view


def details_to_dict(spec: Spec, plan: Plan, words: Sequence[str]) -> dict[str, Any]:
    """Return the details of one plan: `explain --json`, two pictures, and its files or why there are none."""
    whole = predict(spec, plan.layout)
    rows = group_links(spec.cluster, plan.layout, spec.profile)
    view = {
        "explain": explanation_to_dict(spec, whole, time=time_account(spec, whole), memory=memory_account(spec, whole)),
        "timeline": svg(spec_line(spec), whole, timeline(spec, whole)),
        "topology": topology_svg(spec.cluster, plan.layout, rows, step_flows(spec, whole, rows)),
    }
    return view | {"bundle": _bundle_to_dict(spec, whole, words)}


def _bundle_to_dict(spec: Spec, plan: Plan, words: Sequence[str]) -> dict[str, Any]:
    if not plan.fits:
        return {"files": {}, "refused": "the plan does not fit", "commands": []}
    try:
        files = generate(spec, plan)
    except InputError as error:
        return {"files": {}, "refused": str(error), "commands": []}
    directory = usual_directory(spec)
    launches = [shlex.join(["topoplan", "launch", str(directory)])] if spec.cluster.hosts else []
    by_hand = starts(spec, [directory / name for name in files])
    return {"files": files, "refused": "", "commands": [generate_command(words, plan), *launches, *by_hand]}
