"""`topoplan explain`: show the time and memory of a plan by part, and how two plans differ."""

from __future__ import annotations

from typing import Annotated

from topoplan.cli.completion import plans
from topoplan.cli.options import AsJson, Html, NoCache, OptionalSpecPath, SpecOptions, not_both, option
from topoplan.cli.output import show
from topoplan.cli.plan_choice import PlanChoice, RunPath, plans_of_command
from topoplan.errors import InputError


def explain(
    spec: OptionalSpecPath = None,
    plan: PlanChoice = "1",
    run: RunPath = None,
    versus: Annotated[
        str | None,
        option(
            "--versus M|ID", "Compare with another plan: what differs, and what makes the faster one faster.", plans
        ),
    ] = None,
    time: Annotated[bool, option("--time", "Only the time.")] = False,
    memory: Annotated[bool, option("--memory", "Only the memory.")] = False,
    *,
    options: SpecOptions,
    as_json: AsJson = False,
    html: Html = None,
    no_cache: NoCache = False,
) -> None:
    """Every figure comes with the location of its formula in the package.

    A plan that does not fit can be explained too, by its id. Exit code 1: no layout fits; 2: bad input.
    """
    not_both("--html", html, "--json", as_json)
    wanted = {"--plan": plan} | ({} if versus is None else {"--versus": versus})
    read, (chosen, *others) = plans_of_command(spec, run, wanted, options, fresh=no_cache)
    wants_time, wants_memory = time or not memory, memory or not time
    if others and others[0].layout == chosen.layout:
        problem = f"{versus!r} is the plan of --plan itself, {chosen.id}"
        raise InputError(problem, where="--versus", remedy="name another")
    if html:
        from topoplan.cli.page import write_plans

        not_both("--html", html, "--run", run)
        write_plans(html, read, [chosen, *others], words=options.words(spec))
        return
    if others:
        from topoplan.planner.account import compare
        from topoplan.report.explanation import comparison_to_dict, print_comparison

        (other,) = others
        comparison = compare(read, chosen, other)
        show(as_json, comparison_to_dict, print_comparison, read, comparison, time=wants_time, memory=wants_memory)
        return

    from topoplan.planner.account import memory_account, time_account
    from topoplan.report.explanation import explanation_to_dict, print_explanation

    seconds = time_account(read, chosen) if wants_time else None
    size = memory_account(read, chosen) if wants_memory else None
    show(as_json, explanation_to_dict, print_explanation, read, chosen, time=seconds, memory=size)
