"""How many nodes a job needs: every number of nodes, from one up, until the job finishes in time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from topoplan.errors import LayoutError
from topoplan.planner.effort import Effort, effort_of
from topoplan.planner.what_if import Found, Search, found_by
from topoplan.specs.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """The result for one number of nodes."""

    nodes: int
    found: Found
    effort: Effort | None
    """Effort of the best plan; None if nothing fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The results for every number of nodes that was searched, from one up without a gap."""

    steps: int
    """Optimizer steps of the job."""
    limit_s: float
    is_sure: bool
    """Whether the limit applies to the upper end of the band, instead of to the prediction itself."""
    rows: tuple[SizeRow, ...]

    @property
    def answer(self) -> SizeRow | None:
        """The fewest nodes with which the job finishes in time."""
        return next((row for row in self.rows if self.hours(row) <= self.limit_s / 3600), None)

    @property
    def smallest(self) -> SizeRow | None:
        """The fewest nodes on which the job fits at all."""
        return next((row for row in self.rows if row.found.best), None)

    def hours(self, row: SizeRow) -> float:
        """Return the hours of the job that are compared with the limit; infinite if nothing fits."""
        if row.effort is None:
            return math.inf
        return row.effort.band_hours[1] if self.is_sure else row.effort.hours


def size(
    spec_of: Callable[[int], Spec], search: Search, *, steps: int, limit_s: float, max_nodes: int, is_sure: bool
) -> Sizing:
    """Search 1, 2, 3, ... nodes and stop at the first number that finishes in time, or at `max_nodes`.

    No number is skipped: more nodes are not always faster, because the batch and the layers must be divisible.
    `spec_of` returns the spec for a number of nodes. Raises what `spec_of` raises, except for a pin that a number
    cannot satisfy.
    """
    rows: list[SizeRow] = []
    for nodes in range(1, max_nodes + 1):
        try:
            found, _ = found_by(spec_of(nodes), search)
        except LayoutError as error:
            found = Found(spec=None, reason=str(error), is_legal=False)
        effort = effort_of(found.spec, found.best, steps) if found.spec and found.best else None
        rows.append(SizeRow(nodes=nodes, found=found, effort=effort))
        sizing = Sizing(steps=steps, limit_s=limit_s, is_sure=is_sure, rows=tuple(rows))
        if sizing.answer:
            break
    return sizing
