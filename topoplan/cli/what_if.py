"""`topoplan what-if`: how the best plan moves when the spec changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.cli.options import (
    AsJson,
    BackendChoice,
    JobPath,
    Margin,
    ModelName,
    Pins,
    ProfilePath,
    SpecPath,
    TrainerChoice,
    read_spec,
    variations,
)

if TYPE_CHECKING:
    from topoplan.specs.spec import Spec

_MOST = 200


def what_if(
    spec: SpecPath,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE[,VALUE...]",
            help="Change a key of the cluster or the job; several values are tried one by one. May be repeated.",
            show_default=False,
        ),
    ] = None,
    model: ModelName = None,
    job: JobPath = None,
    pin: Pins = None,
    backend: BackendChoice = None,
    trainer: TrainerChoice = None,
    margin: Margin = None,
    profile: ProfilePath = None,
    as_json: AsJson = False,
) -> None:
    """Show how the best plan moves when the spec changes.

    Exit code 1: no layout fits any of the changes; 2: bad input.
    """
    from topoplan.cli.search import searches

    def read(overrides: tuple[str, ...]) -> Spec:
        return read_spec(
            spec,
            model=model,
            job=job,
            overrides=list(overrides),
            pins=pin,
            margin=margin,
            profile=profile,
            backend=backend,
            trainer=trainer,
        )

    combinations = variations(changes, most=_MOST)
    before = read(())

    from topoplan.errors import LayoutError
    from topoplan.planner.what_if import Found, Outcome, found_by, outcome

    # All of them are read before the first search, so that a mistake in the last one is told at once.
    specs: list[Spec | LayoutError] = []
    for options in combinations:
        # A list of machines is one of as many as there are nodes; where they are does not matter here.
        names = {option.partition("=")[0].strip() for option in options}
        without_hosts = before.cluster.hosts and "nodes" in names and "hosts" not in names
        try:
            specs.append(read((*options, "hosts=null") if without_hosts else options))
        except LayoutError as error:  # a pin that these conditions cannot meet
            specs.append(error)
    outcomes = []
    with searches(1 + len(specs)) as search:
        old, _ = found_by(before, search)
        for options, changed in zip(combinations, specs, strict=True):
            named = dict(_key_and_value(option) for option in options)
            if isinstance(changed, LayoutError):
                found = Found(spec=None, reason=str(changed), is_legal=False)
                outcomes.append(Outcome(changes=named, found=found, fate=None))
            else:
                outcomes.append(outcome(named, changed, old.best, search))

    from topoplan.cli.output import print_json, stdout_console
    from topoplan.report.what_if import outcomes_to_dict, print_outcomes

    if as_json:
        print_json(outcomes_to_dict(before, old, outcomes))
    else:
        print_outcomes(stdout_console(), before, old, outcomes)
    if not any(outcome.found.best for outcome in outcomes):
        raise typer.Exit(1)


def _key_and_value(option: str) -> tuple[str, str]:
    key, _, value = option.partition("=")
    return key.strip(), value.strip()
