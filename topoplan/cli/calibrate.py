"""`topoplan calibrate`: learn a cluster's profile from the logs of its runs."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from topoplan.cli.options import AsJson, SpecOptions, argument, option
from topoplan.cli.output import print_json, print_written, stdout_console, write_new
from topoplan.errors import InputError, TopoplanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from topoplan.planner.exhausted import Ended
    from topoplan.planner.learn import Lesson, Lessons
    from topoplan.planner.measures import Measures
    from topoplan.planner.plan import Plan
    from topoplan.specs.spec import Spec


_MOST_NOTES = 3
"""Number of runs of which an error says why they are left out."""


def calibrate(
    logs: Annotated[
        list[str] | None,
        argument(
            "LOG...",
            "What trainers leave: trainer_log.jsonl, logging.jsonl, or what they printed; or a file of `measure`.",
        ),
    ] = None,
    of: Annotated[
        list[str] | None,
        option(
            "--spec SPEC|BUNDLE",
            "What ran: the bundle, or a spec with --plan. One for all logs, or one for each, in their order.",
        ),
    ] = None,
    runs: Annotated[
        bool, option("--runs", "Learn from the runs of `topoplan runs --measured`, beside LOGs or alone.")
    ] = False,
    output: Annotated[str | None, option("--output -o FILE", "Write the profile, which --profile takes.")] = None,
    plan: Annotated[
        list[str] | None, option("--plan N|ID", "The plan of a spec that ran, by rank or id; one for all, or one each.")
    ] = None,
    *,
    options: Annotated[SpecOptions, ("model", "job", "overrides", "pin", "trainer")],
    as_json: AsJson = False,
) -> None:
    """Fits what step times show about this cluster: how far its kernels, links, network and fixed times are off
    together, and how much torch's allocator holds. Logs of different layouts help more than long logs.

    Steps that compile, evaluate or write a checkpoint are skipped. A log of another model, job or trainer is refused.
    Exit code 2: bad input.
    """
    from topoplan.planner.learn import learn_from
    from topoplan.report.calibration import calibrated_text, calibration_to_dict, print_calibration

    if bool(logs) != bool(of) or not (logs or runs):
        remedy = "as in `topoplan calibrate trainer_log.jsonl --spec bundle`"
        raise InputError("expected LOG... and --spec, or --runs", remedy=remedy)
    notes: list[str] = []
    lessons, ended, measures = _lessons(logs or [], of or [], plan or [], options, notes)
    if runs:
        more, more_ended = _of_runs([*lessons, *ended], notes)
        lessons, ended = [*lessons, *more], [*ended, *more_ended]
    learnt = learn_from(lessons, ended, measures)
    if output is not None:
        write_new(output, calibrated_text(learnt.profile))
    if as_json:
        print_json(calibration_to_dict(learnt))
        return
    print_calibration(stdout_console(), learnt, [*notes, *_order(learnt)])
    if output is not None:
        print_written(output)


def _order(learnt: Lessons) -> tuple[str, ...]:
    """Return sentences on how the profile changes the ranking of the first job."""
    from topoplan.planner.learn import reordered
    from topoplan.planner.search import rank

    ran = learnt.first
    spec = replace(learnt.spec, profile=learnt.profile, trainer=ran[1].trainer if ran else learnt.spec.trainer)
    try:
        return reordered(rank(spec))
    except InputError:
        return ()  # no plan fits, with the new profile or with the old one


def _lessons(
    logs: list[str], of: list[str], plans: list[str], options: SpecOptions, notes: list[str]
) -> tuple[list[Lesson], list[Ended], list[tuple[Spec, Measures]]]:
    """Read each log with its plan: step times, out-of-memory endings, and timings by `topoplan measure`.

    A log that is given again, perhaps as a copy, is not read as another run: that would narrow the bands.
    """
    from topoplan.planner.exhausted import Ended, read_exhausted
    from topoplan.planner.learn import Lesson
    from topoplan.planner.logged import log_text, read_log
    from topoplan.planner.measures import is_measures, read_measures
    from topoplan.specs.source import shown_path

    for where, given in (("--spec", of), ("--plan", plans)):
        if len(given) not in (0, 1, len(logs)):
            what, expected = f"{len(given)} for {len(logs)} logs", "expected one for all, or one for each"
            raise InputError(what, where=where, expected=expected)
    found: list[Lesson] = []
    ended: list[Ended] = []
    measures: list[tuple[Spec, Measures]] = []
    seen: dict[str, tuple[int, str]] = {}
    for number, log in enumerate(logs):
        if is_measures(Path(log)):
            timed = read_measures(Path(log))
            if same := next((one.name for _, one in measures if replace(one, name=timed.name) == timed), ""):
                notes.append(_same(timed.name, same))
            else:
                measures.append((_spec(of[number % len(of)], options), timed))
            continue
        spec, plan = _ran(of[number % len(of)], plans[number % len(plans)] if plans else None, options)
        text, name = log_text(Path(log)), shown_path(Path(log))
        first, of_plan = seen.setdefault(sha256(text.encode()).hexdigest(), (number, plan.id))
        if of_plan != plan.id:
            what = f"is the same as {shown_path(Path(logs[first]))}, which is given as a log of {of_plan}"
            raise InputError(what, where=name, expected="expected each log once, with the plan that ran")
        if number != first:
            notes.append(_same(name, shown_path(Path(logs[first]))))
            continue
        if exhausted := read_exhausted(text):
            ended.append(Ended(spec=spec, plan=plan, found=exhausted, name=name))
        try:
            found.append(Lesson(spec=spec, plan=plan, logged=read_log(text, name=name, trainer=plan.trainer)))
        except InputError:
            if exhausted is None:
                raise
    return found, ended, measures


def _same(name: str, first: str) -> str:
    if name == first:
        return f"{name} is given more than once, and counts once"
    return f"{name} is the same as {first}, and is not counted again"


def _of_runs(given: Sequence[Lesson | Ended], notes: list[str]) -> tuple[list[Lesson], list[Ended]]:
    """Return the lessons of this user's runs on the same GPU and trainer as the first log (or else the latest run)."""
    from topoplan.run.measurement import ended_of, lesson_of, planned, why_no_lesson, why_unmeasured
    from topoplan.run.record import RunRecord, runs

    found: list[Lesson] = []
    ended: list[Ended] = []
    for record in reversed(runs()):
        if not isinstance(record, RunRecord):
            continue
        if not record.is_over:
            notes.append(f"run {record.run_id} is left out: {why_unmeasured(record)}")
            continue
        try:
            plan = planned(record)
        except TopoplanError as error:
            notes.append(f"run {record.run_id} is left out: {error}")
            continue
        lesson, exhausted = lesson_of(record, plan.spec, plan.plan), ended_of(record, plan.spec, plan.plan)
        first = next(iter([*given, *found, *ended]), None)
        if lesson is None and exhausted is None:
            notes.append(f"run {record.run_id} is left out: {why_no_lesson(record, plan.plan)}")
        elif first and (plan.spec.cluster.gpu, plan.plan.trainer) != (first.spec.cluster.gpu, first.plan.trainer):
            notes.append(f"run {record.run_id} is left out: it is of another GPU or trainer")
        else:
            found += [lesson] if lesson else []
            ended += [exhausted] if exhausted else []
    if not found and not ended and not given:
        what = ": ".join(filter(None, ("no run tells of enough steps", "; ".join(notes[:_MOST_NOTES]))))
        raise InputError(what, where="--runs", remedy="see `topoplan runs --measured`, or give a LOG")
    return found, ended


def _spec(source: str, options: SpecOptions) -> Spec:
    from topoplan.bundle.plan_file import read_plan_file

    return read_plan_file(source).spec if Path(source).is_dir() else options.read(source)


def _ran(source: str, wanted: str | None, options: SpecOptions) -> tuple[Spec, Plan]:
    from topoplan.bundle.plan_file import read_plan_file
    from topoplan.cli.plan_choice import plans_of_spec
    from topoplan.trainers.trainer import PLAN_FILE

    if Path(source).is_dir() or Path(source).name == PLAN_FILE:
        if wanted is not None or options:
            raise InputError("a bundle says its plan and its job", where=source, remedy="leave the other options out")
        recorded = read_plan_file(source)
        return recorded.spec, recorded.plan
    if wanted is None:
        raise InputError("does not say which plan ran", where=source, remedy="give --plan N|ID, or the bundle")
    spec = options.read(source)
    (plan,) = plans_of_spec(spec, {"--plan": wanted}, fresh=False)
    return spec, plan
