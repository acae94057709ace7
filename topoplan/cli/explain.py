"""`topoplan explain`: where the memory of a plan goes."""

from __future__ import annotations

from typing import Annotated

import typer

from topoplan.cli.options import AsJson, JobPath, Margin, ModelName, Overrides, Pins
from topoplan.cli.plan_choice import OptionalSpecPath, PlanChoice, RunPath, plan_of_command


def explain(
    spec: OptionalSpecPath = None,
    plan: PlanChoice = "1",
    run: RunPath = None,
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
    read, chosen = plan_of_command(spec, run, plan, model=model, job=job, overrides=overrides, pins=pin, margin=margin)

    from topoplan.cli.output import print_json, stdout_console
    from topoplan.planner.breakdown import breakdown
    from topoplan.report.memory import memory_to_dict, print_memory

    account = breakdown(read, chosen)
    if as_json:
        print_json(memory_to_dict(read, chosen, account))
    else:
        print_memory(stdout_console(), read, chosen, account)
