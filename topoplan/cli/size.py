"""`topoplan size`: find the fewest nodes that do a job in time."""

from __future__ import annotations

from math import ceil, isfinite
from typing import TYPE_CHECKING, Annotated

import typer

from topoplan.cli.options import AsJson, NoCache, OptionalSpecPath, SpecOptions, option
from topoplan.cli.output import show
from topoplan.errors import InputError, SpecError, UnitError

if TYPE_CHECKING:
    from topoplan.specs.spec import Spec


def size(
    spec: OptionalSpecPath = None,
    *,
    max_hours: Annotated[float, option("--max-hours H", "Hours that the job may take.")],
    max_nodes: Annotated[int, option("--max-nodes N", "Most nodes to try.", min=1)] = 64,
    tokens: Annotated[
        str | None,
        option("--tokens N", "Tokens of the whole job, such as 2B, in place of the spec's samples and epochs."),
    ] = None,
    sure: Annotated[bool, option("--sure", "Compare the upper end of the band with the limit.")] = False,
    price: Annotated[float | None, option("--gpu-hour-price X", "Price of a GPU-hour.", min=0.0)] = None,
    options: SpecOptions,
    as_json: AsJson = False,
    no_cache: NoCache = False,
) -> None:
    """Searches 1, 2, 3, ... nodes, without gaps, up to the first number that is in time.

    Exit code 1: none is; 2: bad input.
    """
    from topoplan.cli.search import searches
    from topoplan.planner.what_if import size as size_job
    from topoplan.report.size import print_sizing, sizing_to_dict

    _check(max_hours, max_nodes, price, options)
    read = options.read(spec)
    steps = _steps(read, tokens)

    def of_nodes(nodes: int) -> Spec:
        # hosts=null: a list of hosts would fix the number of nodes, and the addresses do not matter here.
        return options.read(spec, f"nodes={nodes}", "hosts=null")

    with searches(max_nodes, fresh=no_cache) as search:
        sizing = size_job(of_nodes, search, steps=steps, limit_s=max_hours * 3600, max_nodes=max_nodes, is_sure=sure)
    show(as_json, sizing_to_dict, print_sizing, read, sizing, price=price)
    if sizing.answer is None:
        raise typer.Exit(1)


def _check(max_hours: float, max_nodes: int, price: float | None, options: SpecOptions) -> None:
    from topoplan.specs.cluster import MOST_GPUS

    if max_nodes > MOST_GPUS:
        raise InputError(f"{max_nodes} nodes", where="--max-nodes", expected=f"expected at most {MOST_GPUS}")
    if not (isfinite(max_hours) and max_hours > 0):
        raise InputError(f"{max_hours:g} hours", where="--max-hours", expected="expected a number above zero")
    if price is not None and not isfinite(price):
        raise InputError(f"{price:g} is not a price", where="--gpu-hour-price", expected="expected a number")
    if options.nodes is not None:
        raise InputError("it is what is looked for", where="--nodes", remedy="leave it out, or give --max-nodes")
    if options.gives("nodes"):
        raise InputError("nodes is what is looked for", where="--set", remedy="leave it out, or give --max-nodes")


def _steps(spec: Spec, tokens: str | None) -> int:
    """Return the optimizer steps of the job: for the given tokens, or else as in the spec."""
    from topoplan.operators.padding import tokens_per_step
    from topoplan.planner.case import usual_backends
    from topoplan.trainers.registry import steps_of
    from topoplan.units import parse_count

    if tokens is not None:
        try:
            return ceil(parse_count(tokens) / tokens_per_step(spec.job))
        except UnitError as error:
            raise UnitError(str(error), where="--tokens") from None
    steps = steps_of(spec.job, (spec.backends or usual_backends(spec))[0], spec.trainer)
    if steps is None:
        raise SpecError(
            "job.samples is missing, so the length of the job is not known",
            where=spec.path or "",
            remedy="add `samples: 100000` (and `epochs: 3`) to the job, or give --tokens 2B",
        )
    return steps
