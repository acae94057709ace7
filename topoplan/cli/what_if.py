"""`topoplan what-if`: show how the best plan moves when the spec changes."""

from __future__ import annotations

from functools import partial
from shlex import join
from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.cli.options import WITHOUT_SPEC, AsJson, NoCache, OptionalSpecPath, SpecOptions, option, variations
from topoplan.cli.output import show
from topoplan.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from topoplan.planner.plan import Plan, Ranking
    from topoplan.planner.what_if import Outcome
    from topoplan.specs.spec import Spec

_MOST = 200


def what_if(
    spec: OptionalSpecPath = None,
    changes: Annotated[
        list[str] | None,
        option(
            "--set KEY=VALUE[,VALUE...]",
            "Change a key of the cluster or the job; several values are tried one by one. May be repeated. seq_len=max "
            "is the longest sequences that fit.",
        ),
    ] = None,
    *,
    options: Annotated[SpecOptions, (*WITHOUT_SPEC, "pin", "backend", "trainer", "margin", "profile")],
    as_json: AsJson = False,
    no_cache: NoCache = False,
) -> None:
    """Exit code 1: no layout fits any of the changes; 2: bad input."""
    from topoplan.cli.search import search, searches
    from topoplan.planner.what_if import found_by
    from topoplan.report.what_if import outcomes_to_dict, print_outcomes

    before = options.read(spec)
    find = partial(search, fresh=no_cache, best_only=True)
    combinations = [_with_longest(before, options, spec, keys, find) for keys in variations(changes, most=_MOST)]
    # Read all specs before the first search, so that a mistake in the last one is reported at once.
    specs = [read_changed(before, options, spec, keys) for keys in combinations]
    with searches(1 + len(specs), fresh=no_cache) as kept:
        old, _ = found_by(before, kept)
        outcomes = [
            outcome_of(keys, changed, old.best, kept) for keys, changed in zip(combinations, specs, strict=True)
        ]
    stuck = (
        keys for keys, one in zip(combinations, outcomes, strict=True) if not one.found.best and one.found.is_legal
    )
    first = next(stuck, None)
    ways_out = "" if first is None else _ways_out(before, options, spec, first)
    show(as_json, outcomes_to_dict, partial(print_outcomes, ways_out=ways_out), before, old, outcomes)
    if not any(outcome.found.best for outcome in outcomes):
        raise typer.Exit(1)


def _with_longest(
    before: Spec, options: SpecOptions, spec: str | None, keys: tuple[str, ...], search: Callable[[Spec], Ranking]
) -> tuple[str, ...]:
    """Return changes in which the longest sequences that fit take the place of `seq_len=max`."""
    from topoplan.planner.what_if import longest

    whole = [_key_and_value(key) for key in keys]
    place = next((n for n, pair in enumerate(whole) if pair in (("seq_len", "max"), ("job.seq_len", "max"))), None)
    if place is None:
        return keys

    def with_tokens(tokens: int) -> tuple[str, ...]:
        return (*keys[:place], f"{whole[place][0]}={tokens}", *keys[place + 1 :])

    def spec_of(tokens: int) -> Spec:
        changed = read_changed(before, options, spec, with_tokens(tokens))
        if isinstance(changed, LayoutError):
            raise changed
        return changed

    return with_tokens(longest(spec_of, search))


def _ways_out(before: Spec, options: SpecOptions, spec: str | None, keys: Iterable[str]) -> str:
    """Return the command that shows the ways out of a case in which nothing fits."""
    return join(["topoplan", "rank", *options.with_sets(_whole(before, keys)).words(spec)])


def _whole(before: Spec, keys: Iterable[str]) -> list[str]:
    """Return `key=value` changes, without the hosts if the number of nodes changes: a list of hosts would fix it, and
    the addresses do not matter here."""
    names = {_key_and_value(key)[0] for key in keys}
    without_hosts = before.cluster.hosts and "nodes" in names and "hosts" not in names
    return [*keys, *(["hosts=null"] if without_hosts else [])]


def read_changed(before: Spec, options: SpecOptions, spec: str | None, keys: Iterable[str]) -> Spec | LayoutError:
    """Return the spec with `key=value` changes, or the error of a pin that it cannot meet."""
    try:
        return options.read(spec, *_whole(before, keys))
    except LayoutError as error:
        return error


def outcome_of(
    keys: Iterable[str], changed: Spec | LayoutError, best: Plan | None, search: Callable[[Spec], Ranking]
) -> Outcome:
    """Return the outcome of changes; `changed` is the result of `read_changed`."""
    from topoplan.planner.what_if import Found, Outcome, outcome

    named = dict(map(_key_and_value, keys))
    if isinstance(changed, LayoutError):
        return Outcome(changes=named, found=Found(spec=None, reason=str(changed), is_legal=False), fate=None)
    return outcome(named, changed, best, search)


def _key_and_value(option: str) -> tuple[str, str]:
    key, _, value = option.partition("=")
    return key.strip(), value.strip()
