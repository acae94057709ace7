"""`topoplan generate`: write the files that start a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.cli.options import AsJson, JobPath, Margin, ModelName, Overrides, Pins, ProfilePath, SpecPath, read_spec
from topoplan.cli.plan_choice import PlanChoice, plan_of_id, plan_of_ranking

if TYPE_CHECKING:
    from topoplan.planner.plan import Plan, Ranking


def generate(
    spec: SpecPath,
    plan: PlanChoice = "1",
    directory: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Where to write; by default generated/<name of the cluster>."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that were edited by hand.")] = False,
    model: ModelName = None,
    job: JobPath = None,
    overrides: Overrides = None,
    pin: Pins = None,
    margin: Margin = None,
    profile: ProfilePath = None,
    as_json: AsJson = False,
) -> None:
    """Write the trainer's YAML and one launch script a node.

    Exit code 1: no layout fits; 2: bad input, or a bundle that was edited by hand is in the way.
    """
    from pathlib import Path

    from topoplan.cli.search import search

    read = read_spec(spec, model=model, job=job, overrides=overrides, pins=pin, margin=margin, profile=profile)
    ranking = search(read)
    if not ranking.plans:
        from topoplan.report.nothing_fits import nothing_fits

        raise nothing_fits(ranking)
    chosen = _choose(ranking, plan)

    from topoplan.emit.bundle import bundle_warnings
    from topoplan.emit.bundle import generate as make_bundle
    from topoplan.emit.write import write_bundle

    target = Path(directory) if directory is not None else Path("generated") / bundle_name(read.cluster.name)
    written = write_bundle(make_bundle(read, chosen), target, force=force)
    warnings = bundle_warnings(read, chosen)

    from topoplan.cli.output import print_json, stdout_console
    from topoplan.report.bundle import bundle_to_dict, print_bundle

    if as_json:
        print_json(bundle_to_dict(chosen, target, written, warnings))
    else:
        print_bundle(stdout_console(), read, chosen, target, written, warnings)


def bundle_name(cluster: str) -> str:
    """The cluster's name as the name of a directory: no separators, no leading dots, never empty."""
    import re

    return re.sub(r"[^A-Za-z0-9._-]+", "-", cluster).strip("-.") or "cluster"


def _choose(ranking: Ranking, wanted: str) -> Plan:
    """The plan of that rank or id; a legal id that the ranking does not hold is predicted."""
    from topoplan.errors import NoLayoutFitsError

    plan = plan_of_ranking(ranking, wanted)
    if plan is not None:
        return plan
    plan = plan_of_id(ranking.spec, wanted)
    if not plan.fits:
        from topoplan.report.text import gib

        memory = plan.memory
        raise NoLayoutFitsError(
            f"plan {plan.id} does not fit: {gib(memory.device_bytes)} GiB and a margin of"
            f" {gib(memory.margin_bytes)} GiB on a card of {gib(memory.capacity_bytes)} GiB;"
            f" the best plan that fits is {ranking.plans[0].id}"
        )
    return plan
