"""`topoplan timeline`: one optimizer step on every pipeline rank, or on one GPU under pure data parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from topoplan.cli.options import AsJson, NoCache, OptionalSpecPath, SpecOptions, not_both, option
from topoplan.cli.output import show, write_and_tell
from topoplan.cli.plan_choice import PlanChoice, RunPath, plans_of_command
from topoplan.errors import InputError, OutputError

if TYPE_CHECKING:
    from topoplan.engines.timeline import Timeline
    from topoplan.planner.plan import Plan
    from topoplan.specs.spec import Spec


def timeline(
    spec: OptionalSpecPath = None,
    plan: PlanChoice = "1",
    run: RunPath = None,
    output: Annotated[
        str | None,
        option("--output -o FILE", "Write a picture (.svg), or a trace for chrome://tracing and Perfetto (.json)."),
    ] = None,
    force: Annotated[bool, option("--force", "Overwrite a file that topoplan did not write.")] = False,
    *,
    options: SpecOptions,
    as_json: AsJson = False,
    no_cache: NoCache = False,
) -> None:
    """Shows what every pipeline rank does when, from a simulation.

    Without a pipeline (ddp, deepspeed and fsdp2), shows one GPU, its network, PCIe and host.
    Exit code 1: no layout fits; 2: bad input, or a file that topoplan did not write is in the way.
    """
    not_both("--output", output is not None, "--json", as_json)
    target = None if output is None else _checked(output)
    if force and target is None:
        raise InputError("--force is for --output", remedy="leave it out")
    read, (chosen,) = plans_of_command(spec, run, {"--plan": plan}, options, fresh=no_cache)

    from topoplan.planner.account import timeline as simulated

    drawn = simulated(read, chosen)
    if target is not None:
        _write(target, read, chosen, drawn, force=force)
        return

    from topoplan.report.timeline import print_timeline, timeline_to_dict

    show(as_json, timeline_to_dict, print_timeline, read, chosen, drawn)


def _checked(output: str) -> Path:
    """Return the output path, refused before the search if its suffix does not select a format."""
    if Path(output).suffix not in (".svg", ".json"):
        raise OutputError("neither a picture nor a trace", where=output, expected="expected a name in .svg or .json")
    return Path(output)


def _write(target: Path, spec: Spec, plan: Plan, drawn: Timeline, *, force: bool) -> None:
    from topoplan.report import timeline, timeline_svg
    from topoplan.report.text import spec_line

    title = spec_line(spec)
    if target.suffix == ".svg":
        text, mark = timeline_svg.svg(title, plan, drawn), timeline_svg.MARK
    else:
        text, mark = timeline.trace(title, plan, drawn), timeline.MARK
    write_and_tell(target, text, mark=mark, writer="topoplan timeline", force=force)
