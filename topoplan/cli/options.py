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
BackendChoice = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="all|NAME,...",
        help="What to search: mca, ddp, deepspeed, fsdp2, megatron, or all; by default mca where it trains the job.",
        show_default=False,
    ),
]
TrainerChoice = Annotated[
    str | None,
    typer.Option(
        "--trainer",
        metavar="llamafactory|swift|trinity",
        help="Only what this trainer runs; by default LLaMA-Factory's, or another one's for what it cannot.",
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
    backend: str | None = None,
    trainer: str | None = None,
) -> Spec:
    """The spec file with everything that the command line says on top of it."""
    from dataclasses import replace

    from topoplan.specs.load import load_spec

    keys = [*(overrides or ()), *([f"margin={margin}"] if margin is not None else [])]
    read = load_spec(spec, model=model, job=job, overrides=tuple(keys), pins=tuple(pins or ()), profile=profile)
    if backend is None and trainer is None:
        return read
    from topoplan.errors import InputError
    from topoplan.trainers.registry import backend_names, trainer_name

    whose = trainer_name(trainer, "--trainer")
    backends = () if backend is None else backend_names(backend, whose, "--backend", finetuning=read.job.finetuning)
    pinned = read.job.pin.get("backend")
    if backends and pinned is not None and (pinned,) != backends:
        raise InputError(f"the job pins backend {pinned}", where=f"--backend {backend}", remedy="leave one of them out")
    return replace(read, backends=backends, trainer=whose)


def variations(overrides: list[str] | None, *, most: int) -> list[tuple[str, ...]]:
    """Every combination of the values of `--set key=a,b,c` options, each as options of one value.

    A value that holds a comma stands in quotes, or is a YAML list in brackets. Raises InputError for no option at all,
    an empty value, a key that is set twice, and more than `most` combinations.
    """
    from itertools import product
    from math import prod

    from topoplan.errors import InputError, SpecError
    from topoplan.units import quote

    if not overrides:
        raise InputError("nothing to change", where="--set", remedy="add it as in --set nodes=8, or --set nodes=2,4,8")
    choices: dict[str, tuple[str, ...]] = {}
    for text in overrides:
        name, equals, written = text.partition("=")
        key = name.strip()
        whole = not equals or written.lstrip()[:1] in ("[", "{", '"', "'")
        values = [value.strip() for value in ([written] if whole else written.split(","))]
        if equals and not all(values):
            what = "no value" if len(values) == 1 else "an empty value"
            raise SpecError(what, where=f"--set {quote(text)}", expected="expected one such as nodes=8 or nodes=2,4,8")
        # `job.seq_len` and `seq_len` are one key.
        if (path := key.removeprefix("job.")) in choices:
            raise InputError(f"{key} is set twice", where="--set", remedy=f"write its values as --set {key}=A,B")
        choices[path] = tuple(dict.fromkeys(f"{key}={value}" if equals else text for value in values))
    if (count := prod(map(len, choices.values()))) > most:
        raise InputError(f"{count:,} combinations", where="--set", expected=f"expected at most {most}")
    return list(product(*choices.values()))
