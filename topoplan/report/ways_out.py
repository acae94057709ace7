"""Ways out of a ranking in which nothing fits, or nothing fits with room to spare; and the error if nothing fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from topoplan.errors import NoLayoutFitsError
from topoplan.planner.plan import STOPPED, TOO_LONG, Plan, Ranking, WayOut
from topoplan.planner.rank import SAFE_SHARE
from topoplan.planner.view import plan_to_dict
from topoplan.planner.ways_out import KINDS
from topoplan.report.text import counts_line, gib, nearest_misses, reason_line, significant, spec_line


def ways_out_lines(ranking: Ranking) -> Iterator[str]:
    """Yield each way out with its result and its command on a line of its own, then the ways that lead nowhere. Only
    lines with commands or machine names may exceed the 80 columns of a terminal."""
    found = [(way, way.plan) for way in ranking.ways_out if way.plan]
    if found and ranking.plans:
        yield f"Plan 1 is tight, and no plan leaves {SAFE_SHARE:.0%} of the card free beyond its margin."
        yield "These changes would:"
    elif found:
        yield "changes with which a layout fits, those that give up least first:"
    for way, plan in found:
        yield f"  - {way.change.words} ({KINDS[way.change.kind].loss})"
        yield f"      {_figures(plan)}"
        yield f"      {way.command}"
    for unfinished in ("", TOO_LONG, STOPPED):
        lost = [way for way in ranking.ways_out if not way.plan and way.unfinished == unfinished]
        if lost and not ranking.plans:
            words = f"search not completed, because {unfinished}" if unfinished else "tried, without success"
            yield f"{words}: {'; '.join(KINDS[way.change.kind].name for way in lost)}"
    if following := next_way(ranking):
        yield f"Next  {following}"


def next_way(ranking: Ranking) -> str | None:
    """Return the command of the first way out if nothing fits, or None."""
    return None if ranking.plans else next((way.command for way in ranking.ways_out if way.plan), None)


def print_ways_out(console: Console, ranking: Ranking) -> None:
    """Print the ways out below a table; lines are not wrapped, so that a command can be copied whole."""
    for line in ways_out_lines(ranking):
        console.print(Text(line), soft_wrap=True)


def _figures(plan: Plan) -> str:
    memory = plan.memory
    return (
        f"{gib(memory.device_bytes)} of {gib(memory.capacity_bytes)} GiB, {significant(plan.time.step_s)} s per step,"
        f" {plan.tokens_per_s_per_gpu:,.0f} tokens/s per GPU"
    )


def way_out_to_dict(way: WayOut) -> dict[str, Any]:
    """Return a way out with its plan, or null with the reason."""
    return {
        "kind": way.change.kind,
        "change": way.change.words,
        "loss": KINDS[way.change.kind].loss,
        "command": way.command,
        "plan": None if way.plan is None else plan_to_dict(way.plan) | {"trainer": way.plan.trainer},
        "reason": way.reason,
    }


_MISSES = 3


def nothing_fits(ranking: Ranking) -> NoLayoutFitsError:
    """Return the error, with the nearest misses and what would make them fit, as far as that was searched for."""
    head = "no layout fits" if ranking.searched == 1.0 else "interrupted before a layout was found that fits"
    lines = [f"{head}: {spec_line(ranking.spec)}. {counts_line(ranking)}"]
    misses = nearest_misses(ranking, memory=_MISSES, rules=0)
    if misses:
        lines.append("nearest misses:")
    lines += (f"  - {reason_line(miss)}" for miss in misses)
    lines += ranking.crossings
    lines += ways_out_lines(ranking)
    if not ranking.ways_out and not ranking.is_interrupted:
        lines.append("`topoplan rank` on the spec shows which changes would make a layout fit")
    return NoLayoutFitsError("\n".join(lines), interrupted=ranking.is_interrupted)
