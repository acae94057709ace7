"""Which plan `--plan N|ID` means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.errors import LayoutError

if TYPE_CHECKING:
    from topoplan.planner.plan import Plan, Ranking
    from topoplan.specs.spec import Spec

PlanChoice = Annotated[
    str, typer.Option("--plan", metavar="N|ID", help="Which plan: its rank, or its id such as tp4-pp1-dp8-mbs1.")
]


def wanted_id(wanted: str) -> str:
    """The id as the layouts have it: the table shows ids with spaces and colons, and they may be pasted from there."""
    return wanted.strip().replace(" ", "-").replace(":", "-")


def plan_of_ranking(ranking: Ranking, wanted: str) -> Plan | None:
    """The plan of that rank or id; None for an id that the ranking does not hold."""
    wanted = wanted_id(wanted)
    if wanted.isdecimal():
        if 1 <= int(wanted) <= len(ranking.plans):
            return ranking.plans[int(wanted) - 1]
        raise LayoutError(f"there is no plan {wanted}", where="--plan", expected=f"expected 1 to {len(ranking.plans)}")
    return next((plan for plan in ranking.plans if plan.id == wanted), None)


def plan_of_id(spec: Spec, wanted: str) -> Plan:
    """The plan of that id, whether it fits or not. What the id does not say is as the spec's pins have it."""
    from topoplan.cli.plan_id import layout_of_id
    from topoplan.planner.predict import predict

    wanted = wanted_id(wanted)
    plan = predict(spec, {**spec.job.pin, **layout_of_id(wanted)})
    if plan.id != wanted:
        raise LayoutError(
            f"{wanted!r} is not the id of a layout of this job", where="--plan", remedy=f"it is {plan.id}"
        )
    return plan


def chosen_plan(spec: Spec, wanted: str) -> Plan:
    """The plan of that rank, which takes a search, or of that id, which does not unless its stages are uneven."""
    from topoplan.cli.search import search
    from topoplan.planner.predict import predict

    name = wanted_id(wanted)
    if not name.isdecimal() and "uneven" not in name.split("-"):
        return plan_of_id(spec, name)
    ranking = search(spec)
    if not ranking.plans:
        from topoplan.report.nothing_fits import nothing_fits

        raise nothing_fits(ranking)
    found = plan_of_ranking(ranking, name)
    # Predicted once more, since a search lists no more stages than it needs.
    return plan_of_id(spec, name) if found is None else predict(spec, found.layout)
