"""The user's trainer keys (`job.trainer`), compared with what the plan decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from topoplan.errors import LayoutError, SpecError
from topoplan.specs.spec import Spec


def place_of(spec: Spec, name: str) -> str:
    """Return where a trainer key of the user stands, for messages."""
    return ": ".join(part for part in (spec.path, f"job.trainer.{name}") if part)


def check_user_keys(
    spec: Spec,
    given: Mapping[str, Any],
    check: Callable[[str, Any, str], Any],
    decided: Mapping[str, tuple[Any, ...]],
    of_the_job: Mapping[str, str],
    *,
    left_out: str = "was made for None",
    remedy: str = "leave it out, or ask for it under job.pin",
) -> dict[str, Any]:
    """Return the keys with the values that `check(name, value, where)` gives; it raises SpecError for refused ones.

    `decided` maps a key to the values that agree with the plan, the plan's own first; `of_the_job` maps a trainer's key
    to the job's key that determines it. Raises SpecError for a value that contradicts the job, and LayoutError with
    `remedy` for one that contradicts the plan; `left_out` describes a key that the plan leaves out.
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
