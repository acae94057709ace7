"""`topoplan rank`: search the layouts of a job and print the best."""

from __future__ import annotations

from typing import Annotated

import typer

from topoplan.cli.exit_codes import INTERRUPTED
from topoplan.cli.options import (
    AsJson,
    BackendChoice,
    JobPath,
    Margin,
    ModelName,
    Overrides,
    Pins,
    ProfilePath,
    SpecPath,
    TrainerChoice,
    read_spec,
)


def rank(
    spec: SpecPath,
    model: ModelName = None,
    job: JobPath = None,
    overrides: Overrides = None,
    pin: Pins = None,
    margin: Margin = None,
    profile: ProfilePath = None,
    backend: BackendChoice = None,
    trainer: TrainerChoice = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Plans to show.")] = 10,
    rejected: Annotated[bool, typer.Option("--rejected", help="Also show the layouts that are out, and why.")] = False,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print one row a plan.")] = False,
) -> None:
    """Rank the layouts of a job by predicted speed.

    Exit code 1: no layout fits; 2: bad input; 130: stopped by Ctrl-C, after the best of what was searched.
    """
    from dataclasses import replace

    from topoplan.cli.search import search
    from topoplan.errors import InputError
    from topoplan.planner.liger import liger_note

    if as_json and as_csv:
        raise InputError("--json and --csv cannot be used together", remedy="leave one out")
    if as_csv and rejected:
        raise InputError("--csv has no rows for rejected layouts", remedy="use --rejected --json")

    read = read_spec(
        spec,
        model=model,
        job=job,
        overrides=overrides,
        pins=pin,
        margin=margin,
        profile=profile,
        backend=backend,
        trainer=trainer,
    )
    ranking = search(read, keep_rejected=rejected, partial=True)
    if (note := liger_note(ranking, lambda other: search(other, partial=True))) is not None:
        ranking = replace(ranking, notes=(note, *ranking.notes))

    from topoplan.cli.output import print_json, stdout_console

    if as_json:
        from topoplan.report.document import ranking_to_dict

        print_json(ranking_to_dict(ranking, top=top, rejected=rejected))
    elif as_csv:
        import sys

        from topoplan.report.rows import write_rows

        write_rows(sys.stdout, ranking, top=top)
    else:
        from topoplan.report.ranking import print_ranking

        console = stdout_console()
        if ranking.plans:
            print_ranking(console, ranking, top=top, misses=not rejected)
        if rejected:
            from topoplan.report.rejected import print_rejected

            print_rejected(console, ranking)

    if not ranking.plans:
        from topoplan.report.nothing_fits import nothing_fits

        raise nothing_fits(ranking)
    if ranking.searched < 1.0:
        raise typer.Exit(INTERRUPTED)
