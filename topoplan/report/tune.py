"""Trial runs of plans, upcoming and finished, as JSON (`topoplan.tune/1`) and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from topoplan.errors import listed
from topoplan.planner.choosing import WITHIN, Standing, may_be_over
from topoplan.planner.plan import Plan
from topoplan.planner.tuning import Tried, Tuning, expected
from topoplan.planner.view import rounded
from topoplan.report.tables import bullets, paragraph, table_of
from topoplan.report.text import band, counted, duration, hours, layout_label, significant
from topoplan.specs.spec import Spec

SCHEMA = "topoplan.tune/1"


def _gpu_hours(plan: Plan, seconds: float) -> float:
    return seconds * plan.layout.world_size / 3600.0


# Upcoming trials ------------------------------------------------------------------------------------------------------


def ahead_to_dict(spec: Spec, plans: Sequence[Plan], steps: int, *, made_up: bool) -> dict[str, Any]:
    """Return the upcoming trials, assuming that each takes the predicted time."""
    return {
        "schema": SCHEMA,
        "event": "ahead",
        "made_up_samples": made_up,
        "trials": [
            {
                "plan": plan.id,
                "step_s": rounded(plan.time.step_s),
                "band_s": [rounded(bound) for bound in plan.time.band_s],
                "may_be_over_memory": may_be_over(plan),
                "steps": takes.steps,
                "seconds": rounded(takes.seconds),
                "at_most_s": rounded(takes.at_most_s),
                "gpu_hours": rounded(_gpu_hours(plan, takes.seconds)),
                "at_most_gpu_hours": rounded(_gpu_hours(plan, takes.at_most_s)),
            }
            for plan, takes in ((plan, expected(spec, plan, steps)) for plan in plans)
        ],
    }


def print_ahead(
    console: Console, spec: Spec, plans: Sequence[Plan], steps: int, *, made_up: bool, note: str = ""
) -> None:
    """Print the upcoming trials, assuming that each takes the predicted time."""
    table = table_of("trial", "plan", right=("step", "band", "steps", "takes", "at most", "GPU hours"))
    low = high = 0.0
    for number, plan in enumerate(plans, 1):
        takes = expected(spec, plan, steps)
        low += _gpu_hours(plan, takes.seconds)
        high += _gpu_hours(plan, takes.at_most_s)
        table.add_row(
            str(number),
            layout_label(plan.layout),
            f"{significant(plan.time.step_s)} s",
            band(plan.time),
            str(takes.steps),
            duration(takes.seconds),
            duration(takes.at_most_s),
            hours(_gpu_hours(plan, takes.seconds)),
        )
    console.print(table)
    console.print()
    samples = "made-up samples as long as the job's" if made_up else "the job's own data set"
    again = (
        "they are one job of Slurm, one after another, chosen to teach most together; what it leaves is learnt from"
        " with --go-on, and where no plan is clearly the best then, there is another job"
        if spec.cluster.slurm
        else "after each one the plans are ranked again, which may change the next; when one plan is clearly the best,"
        " there are no more"
    )
    bullets(
        console,
        [
            f"{hours(low)} GPU hours together, {hours(high)} at most: start-up and steps, on {samples}",
            again,
            "nothing is saved or evaluated; short steps need more of them, as trainers have a clock of whole seconds",
            *([note] if note else []),
        ],
    )


# Finished trials ------------------------------------------------------------------------------------------------------


def tuned_to_dict(
    tuning: Tuning, why: str, *, profile: str | None, bundle: str | None, commands: Sequence[str]
) -> dict[str, Any]:
    """Return the results of all trials; `profile` and `bundle` are files written, `commands` what to run next."""
    standing = tuning.standing
    return {
        "schema": SCHEMA,
        "event": "end",
        "why": why,
        "trials": [
            {
                "plan": one.plan.id,
                "predicted_step_s": rounded(one.plan.time.step_s),
                "step_s": rounded(one.step_s) if one.step_s is not None else None,
                "out_of_memory": one.ended is not None,
                "why": one.why if one.step_s is None else None,
                "run": one.run or None,
                "gpu_hours": rounded(one.gpu_hours),
            }
            for one in tuning.tried
        ],
        "gpu_hours": rounded(tuning.gpu_hours),
        "best": _best_to_dict(standing) if standing and tuning.measured else None,
        "profile": profile,
        "bundle": bundle,
        "next": list(commands),
    }


def _best_to_dict(standing: Standing) -> dict[str, Any]:
    leader = standing.leader
    return {
        "plan": leader.plan.id,
        "step_s": rounded(leader.step_s),
        "measured": leader.is_measured,
        "clear": standing.is_clear,
        "rival": standing.rival.id if standing.rival else None,
        "rival_chance": rounded(standing.chance),
    }


def print_tuned(
    console: Console,
    tuning: Tuning,
    why: str,
    *,
    profile: str | None,
    bundle: str | None,
    commands: Sequence[str],
    awaited: Sequence[str] = (),
) -> None:
    """Print the results of all trials, the best plan first; `awaited` are bundles that a job may still run."""
    standing = tuning.standing
    if standing is not None and tuning.measured:
        paragraph(console, _best(standing), style="bold")
        console.print()
    if tuning.tried:
        console.print(_tried_table(tuning.tried))
        console.print()
    bullets(
        console,
        [
            *_sentences(tuning, standing, why),
            *([f"the profile is in {profile}; its plan's bundle in {bundle}"] if profile else []),
            *([f"not finished: {listed(awaited)}; delete those that no job will run any more"] if awaited else []),
        ],
    )
    print_commands(console, commands)


def print_commands(console: Console, commands: Sequence[str]) -> None:
    """Print the commands to run next."""
    if commands:
        console.print()
    for command in commands:
        console.print(Text(f"  {command}"), soft_wrap=True)


def _best(standing: Standing) -> str:
    leader = standing.leader
    how = "measured" if leader.is_measured else "predicted, and not tried"
    return f"The best plan is {layout_label(leader.plan.layout)}: {significant(leader.step_s)} s per step, {how}."


def _tried_table(tried: Sequence[Tried]) -> Any:
    table = table_of("plan", right=("predicted", "measured", "error", "GPU hours"))
    for one in tried:
        predicted, step_s = one.plan.time.step_s, one.step_s
        table.add_row(
            layout_label(one.plan.layout),
            f"{significant(predicted)} s",
            "-" if step_s is None else f"{significant(step_s)} s",
            "-" if step_s is None else f"{100 * (predicted / step_s - 1.0):+.1f}%",
            hours(one.gpu_hours) if one.took_s else "-",
        )
    return table


def _sentences(tuning: Tuning, standing: Standing | None, why: str) -> Iterator[str]:
    for one in tuning.tried:
        if one.step_s is None:
            out = "ran out of memory, which the profile records: " if one.ended else ""
            yield f"{one.plan.id}: {out}{one.why}"
    if standing is not None and tuning.measured:
        yield _how_sure(standing)
    cost = f"{counted(len(tuning.tried), 'trial')} took {hours(tuning.gpu_hours)} GPU hours" if tuning.tried else ""
    yield "; ".join(filter(None, (_WHY[why], "" if tuning.measured else "nothing was measured", cost)))


def _how_sure(standing: Standing) -> str:
    if standing.rival is None:
        return "no other plan is left to compare with"
    chance = 100 * standing.chance
    words = f"{chance:.0f}%" if chance >= 1 else "less than 1%"
    return (
        f"its closest rival is {standing.rival.id}, which is more than {100 * WITHIN:.0f}% faster with a probability"
        f" of {words}"
    )


_WHY = {
    "clear": "no other plan is likely to be faster",
    "enough": "the requested number of plans was tried (--plans)",
    "none left": "no other plan is left to try",
    "interrupted": "interrupted before all plans were tried",
    "refused": "the hosts could not be used",
    "queued": "the next trials are written as a job",
    "awaited": "trials of a job have not run or not ended: submit the job, or wait for it",
    "held": "processes of the last trial may still be running on its hosts",
}
