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

OptionalSpecPath = Annotated[
    str | None, typer.Argument(metavar="SPEC", help="The cluster spec, a YAML file.", show_default=False)
]
RunPath = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="FILE",
        help="A run document as `topoplan predict` reads it, in place of SPEC and --plan.",
        show_default=False,
    ),
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


def plan_of_command(
    spec: str | None,
    run: str | None,
    plan: str,
    *,
    model: str | None,
    job: str | None,
    overrides: list[str] | None,
    pins: list[str] | None,
    margin: str | None,
) -> tuple[Spec, Plan]:
    """The spec and the plan that a command line names, by SPEC and --plan or by --run."""
    from topoplan.cli.options import read_spec
    from topoplan.errors import InputError

    if (spec is None) == (run is None):
        raise InputError("expected either a SPEC or --run FILE")
    if run is not None:
        if model or job or overrides or pins or margin or plan != "1":
            raise InputError("--run has model, job and layout in its file", remedy="leave the other options out")
        return plan_of_run(run)
    read = read_spec(str(spec), model=model, job=job, overrides=overrides, pins=pins, margin=margin)
    return read, plan_of_spec(read, plan)


def plan_of_spec(spec: Spec, wanted: str) -> Plan:
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


def plan_of_run(source: str) -> tuple[Spec, Plan]:
    """The job of a run document, and its layout."""
    from pathlib import Path

    from topoplan.cli.run_documents import read_run_documents
    from topoplan.errors import SpecError
    from topoplan.planner.predict import predict
    from topoplan.specs.load import spec_from_document

    documents = list(read_run_documents(source))
    if len(documents) != 1:
        raise SpecError(f"{len(documents)} run documents", where=source, expected="expected one")
    (document,) = documents
    if document.error:
        raise SpecError(document.error)
    base = Path.cwd() if source == "-" else Path(source).parent
    spec = spec_from_document(document.spec, where=document.where, base=base)
    return spec, predict(spec, document.layout)
