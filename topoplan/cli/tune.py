"""`topoplan tune`: short trials of the most informative plans, on the user's own hosts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topoplan.cli.completion import bundles
from topoplan.cli.interrupts import Interrupts
from topoplan.cli.options import AsJson, NoCache, SpecOptions, argument, option
from topoplan.cli.output import print_json, show, stdout_console
from topoplan.cli.ssh_options import AcceptNew, Grace, NoPreflight
from topoplan.errors import INTERRUPTED, InputError, OutputError, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from topoplan.planner.plan import Plan
    from topoplan.planner.tuning import Tuning
    from topoplan.run.tune import Why
    from topoplan.specs.spec import Spec


Output = Annotated[
    str | None,
    option(
        "--output -o FILE", "Where to write the profile; by default NAME-profile.yaml, with the name of the cluster."
    ),
]
_OF_CHECKPOINTS = ("output", "disk")
"""Preflight checks on output that trials do not write."""


def tune(
    subject: Annotated[str, argument("SPEC|BUNDLE", "The cluster spec, or a bundle, whose job is tuned.", bundles)],
    plans: Annotated[int, option("--plans N", "Trials at most.", min=1, max=50)] = 4,
    steps: Annotated[int, option("--steps N", "Optimizer steps of a trial.", min=5, max=1000)] = 20,
    output: Output = None,
    dry_run: Annotated[
        bool, option("--dry-run", "Show the trials and what they would cost, and touch nothing.")
    ] = False,
    synthetic: Annotated[
        bool, option("--synthetic", "Train on made-up samples though the job names a data set.")
    ] = False,
    go_on: Annotated[bool, option("--go-on", "Continue from earlier trials and replace their profile.")] = False,
    no_preflight: NoPreflight = False,
    accept_new: AcceptNew = False,
    grace: Grace = 10.0,
    *,
    options: Annotated[SpecOptions, ("model", "job", "overrides", "pin", "backend", "trainer", "margin", "profile")],
    as_json: AsJson = False,
    no_cache: NoCache = False,
) -> None:
    """Launches one trial after another over SSH on the hosts of the spec: a few steps of the job that save and evaluate
    nothing, on made-up samples of the job's length if it names no data set. After each trial, the constants of the
    cluster are fitted as in `topoplan calibrate`, the plans are ranked again, and the next trial is the plan that may
    change the answer most. It ends when no other plan's band reaches below the best one.

    Each trial has a time limit. Running out of memory, hanging or losing a host is a result too. A plan whose memory
    may exceed the card is not tried while there are others. Ctrl-C ends the trial on its hosts, and keeps the
    measurements.

    For a spec with a `slurm` block, it writes the trials as one job for sbatch, in a directory of its own; with --go-on
    it learns from earlier jobs, and writes the next one if the best plan is not clear.

    It writes the profile, and the bundle of the best plan. Exit code: 0: a best plan is known, or a job is written; 1:
    no trial could be measured, or no layout fits; 2: bad input; 130: Ctrl-C; 143: SIGTERM.
    """
    spec = _read(subject, options)
    profile = _profile_path(output, spec, go_on=go_on)
    words = ["--plans", str(plans), "--steps", str(steps), "-o", str(profile), *(["--synthetic"] if synthetic else [])]
    wanted = _Wanted(
        spec=spec,
        plans=plans,
        steps=steps,
        made_up=synthetic or spec.job.dataset is None,
        preflight=not no_preflight,
        accept_new=accept_new,
        grace_s=grace,
        profile=profile,
        again=["topoplan", "tune", *options.words(subject), *words],
        as_json=as_json,
    )
    tuning, awaited = _tuning(spec, go_on=go_on, fresh=no_cache)
    if dry_run:
        _show_ahead(tuning, wanted)
        return
    raise typer.Exit(_queue(tuning, wanted, awaited) if spec.cluster.slurm else _tune(tuning, wanted))


def _show_ahead(tuning: Tuning, wanted: _Wanted) -> None:
    from topoplan.report.tune import ahead_to_dict, print_ahead

    plans = tuning.ahead(wanted.plans, at_once=bool(wanted.spec.cluster.slurm))
    show(wanted.as_json, ahead_to_dict, print_ahead, wanted.spec, plans, wanted.steps, made_up=wanted.made_up)


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    spec: Spec
    plans: int
    steps: int
    made_up: bool
    preflight: bool
    accept_new: bool
    grace_s: float
    profile: Path
    again: list[str]
    """The words of this command, for running it again."""
    as_json: bool


def _read(subject: str, options: SpecOptions) -> Spec:
    """Read a spec, or a bundle's spec restricted to the trainer of its plan."""
    from topoplan.bundle.plan_file import read_plan_file
    from topoplan.trainers.trainer import PLAN_FILE

    if not Path(subject).is_dir() and Path(subject).name != PLAN_FILE:
        return options.read(subject)
    if options:
        raise InputError("a bundle says its job and its cluster", where=subject, remedy="leave the other options out")
    recorded = read_plan_file(subject)
    return replace(recorded.spec, trainer=recorded.plan.trainer)


def _tuning(spec: Spec, *, go_on: bool, fresh: bool) -> tuple[Tuning, list[Path]]:
    """Return the tuning, with earlier trials if `go_on`, and the bundles that a job may still run. Raises
    NoLayoutFitsError if there is no plan."""
    from topoplan.cli.search import search
    from topoplan.planner.tuning import Tuning
    from topoplan.report.ways_out import nothing_fits
    from topoplan.run.tune import trials_directory, tried_before, tried_in_jobs

    ranking = search(spec, fresh=fresh)
    if not ranking.plans:
        raise nothing_fits(ranking)
    tuning, awaited = Tuning(spec, ranking), list[Path]()
    if go_on:
        directory = trials_directory(spec)
        of_jobs, awaited = tried_in_jobs(directory, spec)
        for one in (*tried_before(directory, spec), *of_jobs):
            tuning.add(one)
    return tuning, awaited


def _profile_path(output: str | None, spec: Spec, *, go_on: bool) -> Path:
    """Return the path of the profile. Raises OutputError before any trial is run if it cannot be written."""
    from topoplan.bundle.write import refuse_no_file
    from topoplan.units import file_name

    name = f"{file_name(spec.cluster.name, 'cluster')}-profile.yaml" if output is None else output
    refuse_no_file(name)
    if Path(name).exists() and not go_on:
        remedy = "name another with -o, or remove it first; with --go-on the trials of before count, and it is replaced"
        raise OutputError("exists", where=name, remedy=remedy)
    return Path(name)


def _tune(tuning: Tuning, wanted: _Wanted) -> int:
    from topoplan.bundle.node_script import script_name
    from topoplan.cli.launch import preflight_of
    from topoplan.cli.live_output import EventOutput
    from topoplan.cli.preflight import targets_of
    from topoplan.report.session import OUTPUT
    from topoplan.report.tune import SCHEMA, tuned_to_dict
    from topoplan.run.secrets import take
    from topoplan.run.settings import Settings
    from topoplan.run.tune import Trials, trials_directory

    spec = wanted.spec
    by_address = targets_of(spec.cluster)
    names = (script_name(node).removesuffix(".sh") for node in range(spec.cluster.nodes))
    secrets = take(spec.cluster.secrets)
    output = EventOutput(SCHEMA if wanted.as_json else None)
    with Interrupts(endings=True) as interrupts:
        why = Trials(
            spec=spec,
            directory=trials_directory(spec),
            steps=wanted.steps,
            made_up=wanted.made_up,
            targets=dict(zip(names, by_address.values(), strict=True)),
            access=output.access(accept_new=wanted.accept_new),
            settings=Settings(grace_s=wanted.grace_s),
            preflight=(lambda bundle: preflight_of(bundle, _OF_CHECKPOINTS)) if wanted.preflight else None,
            secrets=secrets,
            # A trial's output is in the log of its run.
            tell=lambda event: None if event.kind in OUTPUT else output.tell(event),
            interrupts=lambda: interrupts.count,
            ending=lambda: interrupts.ending,
        ).run(tuning, wanted.plans)
        code = _code(tuning, why, interrupts.ending)
        written = _write(tuning, wanted, why)
        document = tuned_to_dict(tuning, why, **written)
        output.end(document, (), code, interrupts)
    if not wanted.as_json:
        from topoplan.report.tune import print_tuned

        print_tuned(stdout_console(), tuning, why, **written)
    return code


def _queue(tuning: Tuning, wanted: _Wanted, awaited: list[Path]) -> int:
    """Report what earlier Slurm jobs have taught, write the next job if it is worthwhile, and return the exit code."""
    from topoplan.report.tune import ahead_to_dict, print_ahead, print_commands, print_tuned, tuned_to_dict

    standing = tuning.standing
    clear = standing is not None and standing.is_clear
    plans = [] if awaited or clear else tuning.ahead(wanted.plans, at_once=True)
    why: Why = "awaited" if awaited else "clear" if clear else "queued" if plans else "none left"
    job, shared = _write_job(tuning, plans, wanted) if plans else (None, "")
    written = _write(tuning, wanted, why, job)
    bundles = [str(one) for one in awaited]
    if wanted.as_json:
        ahead = ahead_to_dict(wanted.spec, plans, wanted.steps, made_up=wanted.made_up)
        print_json({**tuned_to_dict(tuning, why, **written), "ahead": ahead["trials"], "awaited": bundles})
        return _code(tuning, why, 0)
    console = stdout_console()
    if tuning.tried or not plans:
        print_tuned(console, tuning, why, **{**written, "commands": ()}, awaited=bundles)
    if plans:
        console.print("\nThe next trials:" if tuning.tried else "The trials:")
        print_ahead(console, wanted.spec, plans, wanted.steps, made_up=wanted.made_up, note=shared)
    print_commands(console, written["commands"])
    return _code(tuning, why, 0)


def _write_job(tuning: Tuning, plans: Sequence[Plan], wanted: _Wanted) -> tuple[Path, str]:
    """Write a Slurm job that tries these plans; return its path and a sentence on where relative paths start."""
    from topoplan.bundle.trials_job import TRIALS_SCRIPT, shared_paths, trials_files
    from topoplan.bundle.write import write_bundle, write_file
    from topoplan.run.tune import next_job_directory, queued_trials, trials_directory

    trials = queued_trials(tuning, plans, wanted.steps, made_up=wanted.made_up)
    bundles, own = trials_files(trials, join([*wanted.again, "--go-on"]))
    job = next_job_directory(trials_directory(wanted.spec))
    for plan, files in bundles.items():
        write_bundle(files, job / plan)
    for name, text in own.items():
        write_file(job / name, text, mark="", writer="topoplan tune")
    shared = shared_paths(trials[0].draft)
    words = f"relative paths ({listed(shared)}) start in {job.parent}" if shared else ""
    return job / TRIALS_SCRIPT, words


def _code(tuning: Tuning, why: Why, ending: int) -> int:
    from topoplan.run.failure import FAILED

    if why == "interrupted":
        return 128 + ending if ending else INTERRUPTED
    return 0 if why == "queued" or (tuning.measured and why in ("clear", "enough", "none left", "awaited")) else FAILED


def _write(tuning: Tuning, wanted: _Wanted, why: Why, job: Path | None = None) -> dict[str, Any]:
    """Write the profile and the bundle of the best plan, if there are any; return them with the next commands."""
    from topoplan.bundle.bundle import generate
    from topoplan.bundle.write import write_bundle, write_file
    from topoplan.report.bundle import starts
    from topoplan.report.calibration import MARK, calibrated_text
    from topoplan.run.tune import trials_directory

    standing, learnt, commands = tuning.standing, tuning.learnt, list[str]()
    if learnt is not None:
        write_file(wanted.profile, calibrated_text(learnt.profile), mark=MARK, writer="topoplan calibrate")
    best = None
    if standing is not None and tuning.measured:
        best = trials_directory(wanted.spec) / "best"
        plan = standing.leader.plan
        spec = replace(wanted.spec, profile=learnt.profile if learnt else wanted.spec.profile)
        written = write_bundle(generate(spec, plan, trainer=plan.trainer), best)
        start = starts(spec, written) if spec.cluster.slurm else [join(["topoplan", "launch", str(best)])]
        commands += start
    if job is not None:
        commands.append(join(["sbatch", str(job)]))
    if why not in ("clear", "none left"):
        of_before = tuning.tried or why in ("queued", "awaited")
        commands.append(join([*wanted.again, *(["--go-on"] if of_before else [])]))
    return {
        "profile": str(wanted.profile) if learnt else None,
        "bundle": str(best) if best else None,
        "commands": commands,
    }
