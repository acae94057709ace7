"""Rejected layouts, grouped by rule."""

from __future__ import annotations

from rich.console import Console

from topoplan.planner.plan import Ranking, Rejection
from topoplan.report.tables import bullets
from topoplan.report.text import counted, reason_line

_EXAMPLES = 5


def print_rejected(console: Console, ranking: Ranking) -> None:
    """Print each rule with its number of rejected layouts and the first few of them; `--json` has all."""
    by_rule: dict[str, list[Rejection]] = {}
    for rejection in ranking.rejected:
        by_rule.setdefault(rejection.rule, []).append(rejection)
    if not by_rule:
        console.print("\nNo layout was rejected.")
    for rule, rejections in sorted(by_rule.items(), key=lambda item: (item[0] != "memory", -len(item[1]), item[0])):
        shown = rejections[:_EXAMPLES]
        more = f", the first {len(shown)}" if len(shown) < len(rejections) else ""
        console.print(f"\nRejected by {rule}: {counted(len(rejections), 'layout')}{more}", soft_wrap=True)
        bullets(console, (reason_line(rejection) for rejection in shown))
