"""`topoplan explain`: where the memory of a plan goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.cli.options import AsJson, JobPath, Margin, ModelName, Overrides, Pins, read_spec
from topoplan.cli.plan_choice import PlanChoice, chosen_plan

if TYPE_CHECKING:
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
    memory: Annotated[
        bool,
        typer.Option("--memory", help="Explain the memory. It is all that there is to explain yet; time will follow."),
    ] = False,
    model: ModelName = None,
    job: JobPath = None,
    overrides: Overrides = None,
    pin: Pins = None,
    margin: Margin = None,
    as_json: AsJson = False,
) -> None:
    """Show where each GiB of a plan goes, and where its formula is.

    A plan that does not fit is explained too, by its id. Exit code 1: no layout fits; 2: bad input.
    """
    from topoplan.errors import InputError

    if (spec is None) == (run is None):
        raise InputError("expected either a SPEC or --run FILE")
    if run is not None:
        if model or job or overrides or pin or margin or plan != "1":
            raise InputError("--run has model, job and layout in its file", remedy="leave the other options out")
        read, chosen = _of_run(run)
    elif spec is not None:
        read = read_spec(spec, model=model, job=job, overrides=overrides, pins=pin, margin=margin)
        chosen = chosen_plan(read, plan)

    from topoplan.cli.output import print_json, stdout_console
    from topoplan.planner.breakdown import breakdown
    from topoplan.report.memory import memory_to_dict, print_memory

    account = breakdown(read, chosen)
    if as_json:
        print_json(memory_to_dict(read, chosen, account))
    else:
        print_memory(stdout_console(), read, chosen, account)


def _of_run(source: str) -> tuple[Spec, Plan]:
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
