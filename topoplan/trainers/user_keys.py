"""The trainer keys of the user (`job.trainer`), held against what the plan decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from topoplan.errors import LayoutError, SpecError
from topoplan.specs.spec import Spec


def place_of(spec: Spec, name: str) -> str:
    """Where a trainer key of the user stands, for messages."""
    return ": ".join(part for part in (spec.path, f"job.trainer.{name}") if part)


def held(
    spec: Spec,
    given: Mapping[str, Any],
    check: Callable[[str, Any, str], Any],
    decided: Mapping[str, tuple[Any, ...]],
    of_the_job: Mapping[str, str],
    *,
    left_out: str = "was made for None",
    remedy: str = "leave it out, or ask for it under job.pin",
) -> dict[str, Any]:
    """The keys, each as `check(name, value, where)` gives it, which raises SpecError for what the trainer refuses.

    `decided` has the values that agree with the plan, its own first; `of_the_job` the key of the job that a trainer's
    key follows from. Raises SpecError for a contradiction to the job, LayoutError, with `remedy`, to the plan;
    `left_out` is what the plan does with a key that is None.
    """
    checked = {}
    for name, value in ((str(name), value) for name, value in given.items()):
        where = place_of(spec, name)
        checked[name] = found = check(name, value, where)
        if found in decided.get(name, (found,)):
            continue
        planned = decided[name][0]
        wanted = left_out if planned is None else f"was made for {planned!r}"
        what = f"{name} is {found!r}, and the plan {wanted}"
        if name in of_the_job:
            raise SpecError(what, where=where, remedy=f"set job.{of_the_job[name]} and leave {name} out")
        raise LayoutError(what, where=where, remedy=remedy)
    return checked
