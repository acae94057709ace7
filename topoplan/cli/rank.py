"""`topoplan rank`: search the layouts of a job, and print the best; and ways out, as commands to paste."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from shlex import join
from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.cli.options import WITHOUT_SPEC, AsJson, Html, NoCache, OptionalSpecPath, SpecOptions, not_both, option
from topoplan.cli.output import print_json, stdout_console
from topoplan.errors import INTERRUPTED, InputError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from topoplan.cli.options import SpecOptions
    from topoplan.planner.plan import Change, Ranking
    from topoplan.planner.what_if import Search
    from topoplan.specs.source import Source
    from topoplan.specs.spec import Spec

_TOP = 10
"""Plans shown by default, other than as CSV, which is for further use and not for reading."""


def rank(
    spec: OptionalSpecPath = None,
    *,
    options: Annotated[SpecOptions, (*WITHOUT_SPEC, "overrides", "pin", "margin", "profile", "backend", "trainer")],
    top: Annotated[int | None, option("--top N", "Plans to show; by default 10, with --csv all.", min=1)] = None,
    rejected: Annotated[bool, option("--rejected", "Also show the layouts that are out, and why.")] = False,
    as_json: AsJson = False,
    as_csv: Annotated[bool, option("--csv", "Print one row a plan.")] = False,
    html: Html = None,
    no_cache: NoCache = False,
) -> None:
    """Exit code 1: no layout fits; 2: bad input; 130: stopped by Ctrl-C, after the best of what was searched."""
    from topoplan.cli.search import search

    not_both("--json", as_json, "--csv", as_csv)
    not_both("--html", html, "--json", as_json)
    not_both("--html", html, "--csv", as_csv)
    if as_csv and rejected:
        raise InputError("--csv has no rows for rejected layouts", remedy="use --rejected --json")

    shown = top or _TOP
    find = partial(search, fresh=no_cache, partial=True)
    # CSV rows have no place for ways out.
    first, best = partial(find, keep_rejected=rejected), partial(find, best_only=True)
    ranking = answered(spec, options, first, best, has_ways_out=not as_csv)
    if html:
        from topoplan.cli.page import write_ranking

        write_ranking(html, ranking, top=shown, words=options.words(spec), assumed=options.assumed(spec))
    elif as_csv:
        from topoplan.report.document import write_rows

        write_rows(sys.stdout, ranking, top=top)
    elif as_json:
        from topoplan.report.document import ranking_to_dict

        words, assumed = options.words(spec), options.assumed(spec)
        print_json(ranking_to_dict(ranking, top=shown, rejected=rejected, words=words, assumed=assumed))
    else:
        _print(ranking, options.words(spec), options.assumed(spec), top=shown, rejected=rejected)

    if not ranking.plans:
        from topoplan.report.ways_out import nothing_fits

        raise nothing_fits(ranking)
    if ranking.is_interrupted:
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

        ranking = replace(ranking, profile_notes=reordered(ranking))
    if ranking.plans and not has_ways_out:
        return ranking
    return with_ways_out(ranking, spec, options, partial(best, with_room=bool(ranking.plans)))


def _print(ranking: Ranking, words: Sequence[str], assumed: Sequence[str], *, top: int, rejected: bool) -> None:
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
        from topoplan.report.ranking import print_rejected

        print_rejected(console, ranking)
    if answer is not None:
        print_answer(console, answer)


def with_ways_out(ranking: Ranking, spec: str | Source | None, options: SpecOptions, search: Search) -> Ranking:
    """Return the ranking with its ways out, if it needs any; `options` are those that the spec was read with."""
    from topoplan.planner.rank import needs_ways_out

    if not needs_ways_out(ranking):
        return ranking
    from topoplan.planner.ways_out import ways_out

    options = options.with_explicit_batch(spec, ranking.spec)

    def read(change: Change) -> Spec:
        return changed(options, change).read(spec)

    ways = ways_out(ranking, read, search)
    commands = [join(["topoplan", "rank", *changed(options, way.change).words(spec)]) for way in ways]
    told = [replace(way, command=text if way.plan else "") for way, text in zip(ways, commands, strict=True)]
    return replace(ranking, ways_out=tuple(told))


def changed(options: SpecOptions, change: Change) -> SpecOptions:
    """Return the options with a change applied, replacing earlier settings of the same keys."""
    sets = [*change.sets, *(f"pin.{pin}" for pin in change.pins)]
    return replace(options.with_sets(sets, as_options=True), backend=change.backend or options.backend)


def led_on(
    error: ModelError, read: Spec, spec: str | Source | None, options: SpecOptions, search: Search
) -> ModelError:
    """Extend the error for a model that a backend cannot train with the command that plans it on another backend."""
    from topoplan.planner.case import another_backend

    backend = another_backend(read)
    try:
        found = backend and search(replace(read, backends=(backend,)))
    except InputError:
        return error
    if not found:
        return error
    command = join(["topoplan", "rank", *replace(options, backend=backend).words(spec)])
    return ModelError(error.what, where=error.where, remedy=f"{backend} trains it: `{command}`")
