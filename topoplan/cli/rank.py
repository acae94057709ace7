"""`topoplan rank`: search the layouts of a job and print the best."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.cli.interrupts import INTERRUPTED
from topoplan.cli.options import WITHOUT_SPEC, AsJson, NoCache, OptionalSpecPath, SpecOptions, not_both, option
from topoplan.cli.page_file import Html

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from topoplan.planner.plan import Ranking
    from topoplan.planner.what_if import Search
    from topoplan.specs.source import Source


def rank(
    spec: OptionalSpecPath = None,
    *,
    options: Annotated[SpecOptions, (*WITHOUT_SPEC, "overrides", "pin", "margin", "profile", "backend", "trainer")],
    top: Annotated[int, option("--top N", "Plans to show.", min=1)] = 10,
    rejected: Annotated[bool, option("--rejected", "Also show the layouts that are out, and why.")] = False,
    as_json: AsJson = False,
    as_csv: Annotated[bool, option("--csv", "Print one row a plan.")] = False,
    html: Html = None,
    no_cache: NoCache = False,
) -> None:
    """Exit code 1: no layout fits; 2: bad input; 130: stopped by Ctrl-C, after the best of what was searched."""
    from functools import partial

    from topoplan.cli.search import search
    from topoplan.errors import InputError

    not_both("--json", as_json, "--csv", as_csv)
    not_both("--html", html, "--json", as_json)
    not_both("--html", html, "--csv", as_csv)
    if as_csv and rejected:
        raise InputError("--csv has no rows for rejected layouts", remedy="use --rejected --json")

    find = partial(search, fresh=no_cache, partial=True)
    # CSV rows have no place for ways out.
    first, best = partial(find, keep_rejected=rejected), partial(find, best_only=True)
    ranking = answered(spec, options, first, best, has_ways_out=not as_csv)
    if html:
        from topoplan.cli.page_file import write_ranking

        write_ranking(html, ranking, top=top, words=options.words(spec), assumed=options.assumed(spec))
    elif as_csv:
        from topoplan.report.rows import write_rows

        write_rows(sys.stdout, ranking, top=top)
    elif as_json:
        from topoplan.cli.output import print_json
        from topoplan.report.document import ranking_to_dict

        words, assumed = options.words(spec), options.assumed(spec)
        print_json(ranking_to_dict(ranking, top=top, rejected=rejected, words=words, assumed=assumed))
    else:
        _print(ranking, options.words(spec), options.assumed(spec), top=top, rejected=rejected)

    if not ranking.plans:
        from topoplan.report.nothing_fits import nothing_fits

        raise nothing_fits(ranking)
    if ranking.searched < 1.0:
        raise typer.Exit(INTERRUPTED)


def answered(
    spec: str | Source | None,
    options: SpecOptions,
    first: Search,
    best: Callable[..., Ranking],
    *,
    has_ways_out: bool = True,
) -> Ranking:
    """Return the ranking with all its notes. `first` is its search; `best` runs follow-up searches for the best plan
    only, or for the best plan `with_room`."""
    from dataclasses import replace
    from functools import partial

    from topoplan.cli.ways_out import led_on, with_ways_out
    from topoplan.errors import ModelError
    from topoplan.planner.explain import liger_note

    read = options.read(spec)
    try:
        ranking = first(read)
    except ModelError as error:
        raise led_on(error, read, spec, options, best) from None
    if (note := liger_note(ranking, best)) is not None:
        ranking = replace(ranking, notes=(note, *ranking.notes))
    if read.profile is not None:
        from topoplan.planner.learn import reordered

        ranking = replace(ranking, notes=(*reordered(ranking), *ranking.notes))
    if ranking.plans and not has_ways_out:
        return ranking
    return with_ways_out(ranking, spec, options, partial(best, with_room=bool(ranking.plans)))


def _print(ranking: Ranking, words: Sequence[str], assumed: Sequence[str], *, top: int, rejected: bool) -> None:
    """Print the ranking, with the answer last, where it stays visible."""
    from topoplan.cli.output import stdout_console
    from topoplan.report.answer import answer_of, print_answer

    console, answer = stdout_console(), answer_of(ranking, top=top, words=words)
    if answer is not None:
        from topoplan.report.ranking import print_ranking
        from topoplan.report.tables import bullets, paragraph

        if assumed:
            first, *further = assumed
            paragraph(console, f"{first[0].upper()}{first[1:]}{':' if further else '.'}")
            bullets(console, further)
        print_ranking(console, ranking, answer)
    if rejected:
        from topoplan.report.rejected import print_rejected

        print_rejected(console, ranking)
    if answer is not None:
        print_answer(console, answer)
