"""The short answer to a ranking: the best plan, a safe plan, warnings about both, and the next command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from topoplan.bundle.warnings import forewarned
from topoplan.planner.explain import speed_difference
from topoplan.planner.plan import Plan, Ranking
from topoplan.planner.risk import SAFE_SHARE, tags_of
from topoplan.planner.view import rounded
from topoplan.report.text import band, gib, significant
from topoplan.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
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
    best: Chosen
    safe: Chosen | None
    refused: str
    """Why the best plan's files cannot be written; empty if they can."""

    @property
    def next(self) -> str:
        """The command to run now."""
        return (self.safe if self.refused and self.safe else self.best).command


def answer_of(ranking: Ranking, *, top: int, words: Sequence[str]) -> Answer | None:
    """Return the answer to a ranking of which the best `top` plans are shown; None if it has no plans.

    `words` are SPEC and the options of the search.
    """
    shown = ranking.plans[:top]
    if not shown:
        return None

    def chosen(place: int) -> Chosen:
        plan = ranking.plans[place]
        return Chosen(plan=plan, rank=place + 1, command=generate_command(words, plan))

    said = [forewarned(ranking.spec, plan) for plan in shown]
    return Answer(
        shown=shown,
        warnings=[warnings for warnings, _ in said],
        best=chosen(0),
        safe=None if ranking.safe is None else chosen(ranking.safe),
        refused=said[0][1],
    )


def generate_command(words: Sequence[str], plan: Plan) -> str:
    """Return the command that writes a plan's files; `words` are SPEC and the options of the search."""
    return shlex.join(["topoplan", "generate", *words, "--plan", plan.id])


def answer_to_dict(answer: Answer | None) -> dict[str, Any]:
    """Return `best`, `safe`, `refused` (why the best plan's files cannot be written) and `next`; null if absent."""
    if answer is None:
        return {"best": None, "safe": None, "refused": None, "next": None}
    safe = None if answer.safe is None else _chosen_to_dict(answer.safe)
    best = _chosen_to_dict(answer.best)
    return {"best": best, "safe": safe, "refused": answer.refused or None, "next": answer.next}


def _chosen_to_dict(chosen: Chosen) -> dict[str, Any]:
    plan = chosen.plan
    return {
        "rank": chosen.rank,
        "id": plan.id,
        "step_s": rounded(plan.time.step_s),
        "device_gib": rounded(plan.memory.device_bytes / GIB),
        "tags": list(tags_of(plan)),
        "command": chosen.command,
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
        lines.append(Line("Safe", "none", f"every plan has a caveat or leaves less than {share} beyond its margin"))
    elif safe.rank == 1:
        lines.append(Line("Safe", "the same", f"no caveat, and {SAFE_SHARE:.0%} or more of the card to spare"))
    else:
        versus = f"plan {safe.rank}, {speed_difference(best.plan, safe.plan)}"
        lines.append(Line("Safe", safe.plan.id, f"{versus}; {figures(safe.plan, ascii_only=ascii_only)}"))
    if answer.refused:
        lines.append(Line("Mind", "no files can be written for the best plan", answer.refused))
    # If the best plan is refused, that must be resolved before its command works.
    return [*lines, Line("Then" if answer.refused and answer.next == best.command else "Next", answer.next)]


def print_answer(console: Console, answer: Answer) -> None:
    """Print the answer as the last few lines, where it stays visible. Ids and commands are not wrapped, so that they
    can be copied whole."""
    console.print()
    for line in answer_lines(answer, ascii_only=console.options.ascii_only):
        _print_line(console, line.title, line.first, line.further)


def _print_line(console: Console, title: str, first: str, further: str = "") -> None:
    line = Text.assemble((f"{title}  ", "dim"), (first, "bold"))
    whole = f"{title}  {first}: {further}" if further else ""
    if further and len(whole) <= console.width:
        line.append(f": {further}")
        further = ""
    console.print(line, soft_wrap=True)
    for part in Text(further).wrap(console, console.width - 6) if further else ():
        part.rstrip()
        console.print(Text("      ") + part)


def figures(plan: Plan, *, ascii_only: bool = False) -> str:
    """Return `0.818 s a step ±34%, 59.3 of 79.6 GiB; caveat`."""
    width = band(plan.time, ascii_only=ascii_only)
    memory = f"{gib(plan.memory.device_bytes)} of {gib(plan.memory.capacity_bytes)} GiB"
    risks = "".join(f"; {tag}" for tag in tags_of(plan))
    return f"{significant(plan.time.step_s)} s a step {width}, {memory}{risks}"
