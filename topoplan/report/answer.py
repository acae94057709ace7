"""The short answer to a ranking: the best plan, a safe plan, warnings about both, and the next command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from topoplan.bundle.warnings import warnings_and_refusal
from topoplan.planner.explain import speed_difference
from topoplan.planner.plan import Plan, Ranking
from topoplan.planner.rank import SAFE_SHARE, tags_of
from topoplan.planner.view import rounded
from topoplan.report.tables import hanging
from topoplan.report.text import band, gib, significant
from topoplan.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A recommended plan of a ranking."""

    plan: Plan
    rank: int
    command: str
    """The command that writes the plan's files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The recommendation from a ranking that has plans."""

    shown: Sequence[Plan]
    warnings: Sequence[Sequence[str]]
    """For each plan shown, every warning that `generate` would give."""
    best: Recommendation
    safe: Recommendation | None
    refused: str
    """Why the best plan's files cannot be written; empty if they can."""

    @property
    def next(self) -> str:
        """The command to run now."""
        return (self.safe if self.refused and self.safe else self.best).command


def answer_of(ranking: Ranking, *, top: int, words: Sequence[str]) -> Answer | None:
    """Return the answer to a ranking of which the best `top` plans are shown; None if it has no plans. `words` are SPEC
    and the options of the search."""
    shown = ranking.plans[:top]
    if not shown:
        return None

    def recommended(place: int) -> Recommendation:
        plan = ranking.plans[place]
        return Recommendation(plan=plan, rank=place + 1, command=generate_command(words, plan))

    previews = [warnings_and_refusal(ranking.spec, plan) for plan in shown]
    return Answer(
        shown=shown,
        warnings=[warnings for warnings, _ in previews],
        best=recommended(0),
        safe=None if ranking.safe is None else recommended(ranking.safe),
        refused=previews[0][1],
    )


def generate_command(words: Sequence[str], plan: Plan) -> str:
    """Return the command that writes a plan's files; `words` are SPEC and the options of the search."""
    return shlex.join(["topoplan", "generate", *words, "--plan", plan.id])


def answer_to_dict(answer: Answer | None) -> dict[str, Any]:
    """Return `best`, `safe`, `refused` (why the best plan's files cannot be written) and `next`; null if absent."""
    if answer is None:
        return {"best": None, "safe": None, "refused": None, "next": None}
    safe = None if answer.safe is None else _recommendation_to_dict(answer.safe)
    best = _recommendation_to_dict(answer.best)
    return {"best": best, "safe": safe, "refused": answer.refused or None, "next": answer.next}


def _recommendation_to_dict(recommended: Recommendation) -> dict[str, Any]:
    plan = recommended.plan
    return {
        "rank": recommended.rank,
        "id": plan.id,
        "step_s": rounded(plan.time.step_s),
        "device_gib": rounded(plan.memory.device_bytes / GIB),
        "tags": list(tags_of(plan)),
        "command": recommended.command,
    }


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an answer: a title such as `Best`, a plan, and remarks."""

    title: str
    first: str
    further: str = ""


def answer_lines(answer: Answer, *, ascii_only: bool = False) -> list[Line]:
    """Return lines on the best plan, the safe plan, obstacles, and the next command."""
    best, safe = answer.best, answer.safe
    lines = [Line("Best", best.plan.id, figures(best.plan, ascii_only=ascii_only))]
    if safe is None:
        share = f"{SAFE_SHARE:.0%}"
        lines.append(Line("Safe", "none", f"every plan has a caveat, or leaves less than {share} of the card free"))
    elif safe.rank == 1:
        lines.append(Line("Safe", "same plan", f"no caveats, and at least {SAFE_SHARE:.0%} of the card free"))
    else:
        versus = f"plan {safe.rank}, {speed_difference(best.plan, safe.plan)}"
        lines.append(Line("Safe", safe.plan.id, f"{versus}; {figures(safe.plan, ascii_only=ascii_only)}"))
    if answer.refused:
        lines.append(Line("Note", "no files can be written for the best plan", answer.refused))
    # If the best plan is refused, that must be resolved before its command works.
    return [*lines, Line("Then" if answer.refused and answer.next == best.command else "Next", answer.next)]


def print_answer(console: Console, answer: Answer) -> None:
    """Print the answer as the last few lines, where it stays visible. Ids and commands are not wrapped, so that they
    can be copied whole."""
    console.print()
    for line in answer_lines(answer, ascii_only=console.options.ascii_only):
        text, rest = Text.assemble((f"{line.title}  ", "dim"), (line.first, "bold")), f": {line.further}"
        fits = bool(line.further) and len(text) + len(rest) <= console.width
        console.print(text.append(rest) if fits else text, soft_wrap=True)
        if line.further and not fits:
            hanging(console, Text(line.further), " " * 6, " " * 6)


def figures(plan: Plan, *, ascii_only: bool = False) -> str:
    """Return `0.818 s per step ±34%, 59.3 of 79.6 GiB; caveat`."""
    width = band(plan.time, ascii_only=ascii_only)
    memory = f"{gib(plan.memory.device_bytes)} of {gib(plan.memory.capacity_bytes)} GiB"
    risks = "".join(f"; {tag}" for tag in tags_of(plan))
    return f"{significant(plan.time.step_s)} s per step {width}, {memory}{risks}"
