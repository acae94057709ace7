"""`topoplan generate`: write the files that start a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from topoplan.cli.options import (
    EXAMPLE,
    WITHOUT_SPEC,
    AsJson,
    BackendChoice,
    NoCache,
    OptionalSpecPath,
    SpecOptions,
    TrainerChoice,
    option,
)
from topoplan.cli.output import print_json, stdout_console
from topoplan.cli.plan_choice import PlanChoice, place_in_ranking, plan_of_id
from topoplan.errors import InputError, NoLayoutFitsError, OutputError

if TYPE_CHECKING:
    from topoplan.bundle.draft import Draft
    from topoplan.planner.plan import Plan, Ranking


def generate(
    spec: OptionalSpecPath = None,
    plan: PlanChoice = "1",
    recorded: Annotated[
        str | None,
        option(
            "--from PLAN",
            "The plan.json of a bundle, or the bundle: writes it again, in place of SPEC and other options.",
        ),
    ] = None,
    directory: Annotated[
        str | None,
        option(
            "--output -o DIR",
            "Where to write; by default generated/<name of the cluster>, and with --from the bundle's own directory.",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        option(
            "--scheduler slurm|none",
            "Write a job script for it too; by default as the spec has a `slurm` block or not.",
            lambda: ["slurm", "none"],
        ),
    ] = None,
    trainer: TrainerChoice = None,
    backend: BackendChoice = None,
    force: Annotated[bool, option("--force", "Overwrite files that were edited by hand.")] = False,
    *,
    options: Annotated[SpecOptions, (*WITHOUT_SPEC, "overrides", "pin", "margin", "profile")],
    as_json: AsJson = False,
    no_cache: NoCache = False,
) -> None:
    """Writes the trainer's YAML and a launch script per node, for the best plan of SPEC, another plan, or a plan.json.

    Exit code 1: no layout fits; 2: bad input, or a bundle that was edited by hand is in the way.
    """
    from topoplan.trainers.registry import trainer_name

    wanted_trainer = trainer_name(trainer, "--trainer")
    options = replace(options, backend=backend)
    if recorded is not None and directory is None:
        directory = _own_directory(recorded)
    draft, notes = (
        _planned(spec, plan, options, scheduler, wanted_trainer, fresh=no_cache)
        if recorded is None
        else _from_plan(recorded, spec, plan, options, scheduler, wanted_trainer)
    )
    _write(draft, notes, directory, force=force, as_json=as_json)


def _write(draft: Draft, notes: tuple[str, ...], directory: str | None, *, force: bool, as_json: bool) -> None:
    from topoplan.bundle.bundle import files_of, usual_directory
    from topoplan.bundle.warnings import warnings_of
    from topoplan.bundle.write import write_bundle
    from topoplan.report.bundle import bundle_to_dict, print_bundle

    if directory == "":
        raise OutputError("the name of the directory is empty", where="--output", remedy="leave -o out, or name one")
    target = usual_directory(draft.spec) if directory is None else Path(directory)
    written = write_bundle(files_of(draft), target, force=force)
    warnings, trainer = warnings_of(draft), draft.writer.name
    if as_json:
        print_json(bundle_to_dict(draft.plan, trainer, target, written, warnings, notes))
    else:
        print_bundle(stdout_console(), draft.spec, draft.plan, trainer, target, written, warnings, notes)


def _planned(
    spec: str | None, wanted: str, options: SpecOptions, scheduler: str | None, trainer: str | None, *, fresh: bool
) -> tuple[Draft, tuple[str, ...]]:
    from topoplan.bundle.draft import draft_of, scheduler_of
    from topoplan.cli.search import search
    from topoplan.planner.predict import plan_under
    from topoplan.trainers.registry import writer_of

    if spec is None and options.gpu is None:
        raise InputError("expected a SPEC, --gpu or --from PLAN", remedy=f"such as {EXAMPLE}")
    options = replace(options, trainer=trainer)
    read = options.read(spec)
    scheduler_of(read, scheduler, where="--scheduler")
    ranking = search(read, fresh=fresh)
    if not ranking.plans:
        from topoplan.report.ways_out import nothing_fits

        raise nothing_fits(ranking)
    chosen = _choose(ranking, wanted)
    if of_file := options.trainer_job(spec, chosen.layout.backend):
        read = options.read(spec, backend=chosen.layout.backend)
    chosen = plan_under(read, chosen, writer_of(read, chosen.layout, trainer)[0].name)
    draft = draft_of(read, chosen, scheduler, trainer)
    said = of_file.left_out.items() if of_file else ()
    left_out = [key for key, value in said if draft.trainer.values.get(key) != value]
    return draft, (f"left out of {options.job}: {', '.join(left_out)}",) if left_out else ()


def _from_plan(
    path: str,
    spec: str | None,
    wanted: str,
    options: SpecOptions,
    scheduler: str | None,
    trainer: str | None,
) -> tuple[Draft, tuple[str, ...]]:
    from topoplan.bundle.draft import scheduler_of
    from topoplan.bundle.plan_file import draft_again, read_plan_file

    if spec is not None or wanted != "1" or options:
        raise InputError(
            "--from has cluster, model, job and layout in its file", remedy="leave SPEC and the other options out"
        )
    recorded = read_plan_file(path)
    scheduler_of(recorded.spec, scheduler, where="--scheduler")
    return draft_again(recorded, scheduler, trainer), recorded.notes


def _own_directory(path: str) -> str | None:
    """Return the directory of the bundle that a plan was read from; None for a plan.json kept under another name."""
    from topoplan.bundle.plan_file import bundle_of

    directory = bundle_of(path)
    return None if directory is None else str(directory)


def _choose(ranking: Ranking, wanted: str) -> Plan:
    """Return the plan with a rank or id; an id that is not in the ranking is predicted."""
    place = place_in_ranking(ranking, wanted)
    if place is not None:
        return ranking.plans[place]
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
