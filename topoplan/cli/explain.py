"""`topoplan explain`: where the time and the memory of a plan go, and how two plans differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.cli.options import AsJson, JobPath, Margin, ModelName, Overrides, Pins, ProfilePath, read_spec
from topoplan.cli.plan_choice import PlanChoice, plan_of_id, plan_of_ranking, wanted_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from topoplan.planner.plan import Plan
    from topoplan.specs.spec import Spec


def explain(
    spec: Annotated[
        str | None, typer.Argument(metavar="SPEC", help="The cluster spec, a YAML file.", show_default=False)
    ] = None,
    plan: PlanChoice = "1",
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="FILE",
            help="A run document as `topoplan predict` reads it, in place of SPEC and --plan.",
            show_default=False,
        ),
    ] = None,
    versus: Annotated[
        str | None,
        typer.Option(
            "--versus",
            metavar="M|ID",
            help="Compare with another plan: what differs, and what makes the faster one faster.",
            show_default=False,
        ),
    ] = None,
    time: Annotated[bool, typer.Option("--time", help="Only the time.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Only the memory.")] = False,
    model: ModelName = None,
    job: JobPath = None,
    overrides: Overrides = None,
    pin: Pins = None,
    margin: Margin = None,
    profile: ProfilePath = None,
    as_json: AsJson = False,
) -> None:
    """Show where the time and memory of a plan go, or how two differ.

    Every figure comes with the place of its formula in the package.

    A plan that does not fit is explained too, by its id. Exit code 1: no layout fits; 2: bad input.
    """
    from topoplan.errors import InputError

    if (spec is None) == (run is None):
        raise InputError("expected either a SPEC or --run FILE")
    if run is not None:
        if model or job or overrides or pin or margin or versus is not None or plan != "1":
            raise InputError("--run has model, job and layout in its file", remedy="leave the other options out")
        read, plans = _of_run(run, profile)
    elif spec is not None:
        read = read_spec(spec, model=model, job=job, overrides=overrides, pins=pin, margin=margin, profile=profile)
        plans = _of_spec(read, {"--plan": plan} | ({} if versus is None else {"--versus": versus}))

    from topoplan.cli.output import print_json, stdout_console

    chosen, *others = plans
    wants_time, wants_memory = time or not memory, memory or not time
    if others:
        from topoplan.planner.versus import compare
        from topoplan.report.versus import comparison_to_dict, print_comparison

        (other,) = others
        if other.layout == chosen.layout:
            raise InputError(
                f"{versus!r} is the plan of --plan itself, {chosen.id}", where="--versus", remedy="name another"
            )
        comparison = compare(chosen, other)
        if as_json:
            print_json(comparison_to_dict(read, comparison, time=wants_time, memory=wants_memory))
        else:
            print_comparison(stdout_console(), read, comparison, time=wants_time, memory=wants_memory)
        return

    from topoplan.planner.breakdown import breakdown
    from topoplan.planner.time_breakdown import time_breakdown
    from topoplan.report.explanation import explanation_to_dict, print_explanation

    seconds = time_breakdown(read, chosen) if wants_time else None
    size = breakdown(read, chosen) if wants_memory else None
    if as_json:
        print_json(explanation_to_dict(read, chosen, time=seconds, memory=size))
    else:
        print_explanation(stdout_console(), read, chosen, time=seconds, memory=size)


def _of_spec(spec: Spec, wanted: Mapping[str, str]) -> list[Plan]:
    """The plans that each option wants, by rank, which takes a search, or by id, which does not unless uneven."""
    from topoplan.cli.search import search
    from topoplan.planner.predict import predict

    names = {option: wanted_id(text) for option, text in wanted.items()}
    ranking = None
    if any(name.isdecimal() or "uneven" in name.split("-") for name in names.values()):
        ranking = search(spec)
        if not ranking.plans:
            from topoplan.report.nothing_fits import nothing_fits

            raise nothing_fits(ranking)
    plans = []
    for option, name in names.items():
        found = None if ranking is None else plan_of_ranking(ranking, name, option=option)
        # Predicted once more, since a search lists no more stages than it needs.
        plans.append(plan_of_id(spec, name, option=option) if found is None else predict(spec, found.layout))
    return plans


def _of_run(source: str, profile: str | None) -> tuple[Spec, list[Plan]]:
    from pathlib import Path

    from topoplan.cli.run_documents import read_run_documents
    from topoplan.errors import SpecError
    from topoplan.planner.predict import predict
    from topoplan.specs.load import spec_from_document
    from topoplan.specs.profile import read_profile

    own = None if profile is None else read_profile(profile)
    documents = list(read_run_documents(source))
    if len(documents) != 1:
        raise SpecError(f"{len(documents)} run documents", where=source, expected="expected one")
    (document,) = documents
    if document.error:
        raise SpecError(document.error)
    base = Path.cwd() if source == "-" else Path(source).parent
    spec = spec_from_document(document.spec, where=document.where, base=base, profile=own)
    return spec, [predict(spec, document.layout)]
