"""The error of a search that ends without a plan."""

from __future__ import annotations

from topoplan.errors import NoLayoutFitsError
from topoplan.planner.plan import Ranking
from topoplan.report.text import counts_line, nearest_misses, reason_line, spec_line
from topoplan.report.ways_out import ways_out_lines

_MISSES = 3


def nothing_fits(ranking: Ranking) -> NoLayoutFitsError:
    """Return the error, with the nearest misses and what would make them fit."""
    lines = [f"no layout fits: {spec_line(ranking.spec)}. {counts_line(ranking)}"]
    misses = nearest_misses(ranking, memory=_MISSES, rules=0)
    if misses:
        lines.append("nearest misses:")
    lines += (f"  - {reason_line(miss)}" for miss in misses)
    lines += ranking.crossings
    lines += (
        ways_out_lines(ranking)
        if ranking.ways_out
        else ["`topoplan rank` on the spec shows which changes would make a layout fit"]
    )
    return NoLayoutFitsError("\n".join(lines))
