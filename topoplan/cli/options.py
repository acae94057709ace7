"""Arguments that several verbs share, and how they become a Spec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from topoplan.specs.spec import Spec

SpecPath = Annotated[str, typer.Argument(metavar="SPEC", help="The cluster spec, a YAML file.", show_default=False)]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Model to use in place of the spec's: a name (`topoplan models`), a directory or a config.json.",
        show_default=False,
    ),
]
JobPath = Annotated[
    str | None,
    typer.Option(
        "--job", metavar="FILE", help="YAML file whose job takes the place of the spec's.", show_default=False
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set one key of the job or the cluster; may be repeated.", show_default=False
    ),
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin", metavar="KEY=N,...", help="Layout keys that must hold, such as tp=4,pp=1.", show_default=False
    ),
]
Margin = Annotated[
    str | None,
    typer.Option(
        "--margin",
        metavar="SHARE",
        help="Share of the card that a plan must leave free, such as 5%; 0% takes predictions at their word.",
        show_default=False,
    ),
]
ProfilePath = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="Calibration constants of your own, over those of the GPU; `topoplan profile GPU -o FILE` makes a start.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def read_spec(
    spec: str,
    *,
    model: str | None,
    job: str | None,
    overrides: list[str] | None,
    pins: list[str] | None,
    margin: str | None = None,
    profile: str | None = None,
) -> Spec:
    """The spec file with everything that the command line says on top of it."""
    from topoplan.specs.load import load_spec

    keys = [*(overrides or ()), *([f"margin={margin}"] if margin is not None else [])]
    return load_spec(spec, model=model, job=job, overrides=tuple(keys), pins=tuple(pins or ()), profile=profile)
