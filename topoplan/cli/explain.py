"""`topoplan explain`: where the time and the memory of a plan go, and how two plans differ."""

from __future__ import annotations

from typing import Annotated

import typer

from topoplan.cli.options import (
    AsJson,
    BackendChoice,
    JobPath,
    Margin,
    ModelName,
    Overrides,
    Pins,
    ProfilePath,
    TrainerChoice,
)
from topoplan.cli.plan_choice import OptionalSpecPath, PlanChoice, RunPath, SpecOptions, plans_of_command


def explain(
    spec: OptionalSpecPath = None,
    plan: PlanChoice = "1",
    run: RunPath = None,
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
    backend: BackendChoice = None,
    trainer: TrainerChoice = None,
    margin: Margin = None,
    profile: ProfilePath = None,
    as_json: AsJson = False,
) -> None:
    """Show where the time and memory of a plan go, or how two differ.

    Every figure comes with the place of its formula in the package.

    A plan that does not fit is explained too, by its id. Exit code 1: no layout fits; 2: bad input.
    """
    from topoplan.cli.output import print_json, stdout_console
    from topoplan.errors import InputError

    wanted = {"--plan": plan} | ({} if versus is None else {"--versus": versus})
    options = SpecOptions(
        model=model,
        job=job,
        overrides=overrides,
        pins=pin,
        margin=margin,
        profile=profile,
        backend=backend,
        trainer=trainer,
    )
    read, plans = plans_of_command(spec, run, wanted, options)

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
        comparison = compare(read, chosen, other)
        if as_json:
            print_json(comparison_to_dict(read, comparison, time=wants_time, memory=wants_memory))
        else:
            print_comparison(stdout_console(), read, comparison, time=wants_time, memory=wants_memory)
        return

    from topoplan.planner.account import memory_account, time_account
    from topoplan.report.explanation import explanation_to_dict, print_explanation

    seconds = time_account(read, chosen) if wants_time else None
    size = memory_account(read, chosen) if wants_memory else None
    if as_json:
        print_json(explanation_to_dict(read, chosen, time=seconds, memory=size))
    else:
        print_explanation(stdout_console(), read, chosen, time=seconds, memory=size)
