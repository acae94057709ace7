"""Ways out of a ranking, as commands to paste."""

from __future__ import annotations

from dataclasses import replace
from shlex import join
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topoplan.cli.options import SpecOptions
    from topoplan.errors import ModelError
    from topoplan.planner.plan import Change, Ranking
    from topoplan.planner.what_if import Search
    from topoplan.specs.source import Source
    from topoplan.specs.spec import Spec


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
    from topoplan.cli.options import OPTION_OF

    said = dict(map(_key_and_value, change.sets))
    kept = [text for text in options.overrides or () if _key_and_value(text)[0].partition(".")[0] not in said]
    sets = [text for text in change.sets if _key_and_value(text)[0] not in OPTION_OF]
    own: dict[str, Any] = {OPTION_OF[key]: value for key, value in said.items() if key in OPTION_OF}
    pin = () if change.kind == "pins" else options.pin or ()
    return replace(
        options,
        overrides=[*kept, *sets],
        pin=[*pin, *change.pins],
        backend=change.backend or options.backend,
        **own,
    )


def _key_and_value(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key.strip().removeprefix("job."), value.strip()


def led_on(
    error: ModelError, read: Spec, spec: str | Source | None, options: SpecOptions, search: Search
) -> ModelError:
    """Extend the error for a model that a backend cannot train with the command that plans it on another backend."""
    from topoplan.errors import InputError, ModelError
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
