"""The lessons from runs: as JSON (`topoplan.calibrate/1`), as text, and as a profile for `--profile`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console

from topoplan.errors import listed
from topoplan.planner.calibrate import Calibration
from topoplan.planner.exhausted import exhausted_words, lesson_sentence
from topoplan.planner.fragmentation import SHARES
from topoplan.planner.learn import Lessons
from topoplan.report.dump import picked, plain
from topoplan.report.tables import apart, bullets, paragraph, table_of
from topoplan.report.text import counted, significant
from topoplan.specs.constants import BANDS
from topoplan.specs.gpu_profile import Profile, profile_of
from topoplan.specs.profile import Calibrated, OwnProfile

MARK = "# Constants of this cluster, from its own runs"
"""The first words of a calibrated profile."""
_TOLD = 0.1
"""Below this, a knob counts as not identified by the runs."""
_MOVED = 0.02
"""A factor closer to 1 than this counts as unchanged."""


def calibration_to_dict(learnt: Lessons) -> dict[str, Any]:
    """Return the lessons and the logs behind them. Errors are fractions: predicted over measured, less one."""
    time = learnt.time
    return {
        "schema": "topoplan.calibrate/1",
        "gpu": learnt.profile.gpu,
        "calibrated": plain(learnt.profile.calibrated),
        "constants": dict(learnt.profile.constants),
        "factors": [
            picked(one, "factor spread told=explained_share") | {"of": one.knob.name}
            for one in (time.shifts if time else ())
        ],
        "not_told_apart": [list(pair) for pair in time.unseparated] if time else [],
        "out_of_memory": [
            {"plan": one.plan.id, "name": one.name, "learnt": one.found.is_informative, **plain(one.found)}
            for one in learnt.ended
        ],
        "logs": [
            {
                "plan": lesson.plan.id,
                **picked(
                    lesson.logged,
                    "name writer first last total steps step_s spread left_out allocated_bytes reserved_bytes",
                ),
                "time_error_before": before,
                "time_error_after": after,
                "memory_error_before": off,
            }
            for lesson, before, after, off in zip(
                learnt.of, time.before, time.after, learnt.memory.off[: len(learnt.of)], strict=True
            )
        ]
        if time
        else [],
    }


def print_calibration(console: Console, learnt: Lessons, further: Sequence[str]) -> None:
    """Print the logs, what they show and what they cannot; `further` are sentences on plans and on what was skipped."""
    for ended in learnt.ended:
        paragraph(console, f"{ended.name}, {ended.plan.id}:")
        bullets(console, [*exhausted_words(ended.spec, ended.plan, ended.found), lesson_sentence(ended.found)])
        console.print()
    if learnt.time is not None:
        _print_steps(console, learnt, learnt.time)
        bullets(console, [*_told(learnt.time), *_not_told(learnt, learnt.time)])
    bullets(console, [*_memory(learnt), *_bands(learnt), *_aside(learnt), *further])


def _print_steps(console: Console, learnt: Lessons, time: Calibration) -> None:
    times = sum(row.is_used for one in learnt.measures for row in one.rows)
    if times:
        told = (
            f"{counted(times, 'timing')} of kernels and collectives from `topoplan measure`, on {learnt.profile.gpu}."
        )
        paragraph(console, told)
        console.print()
    if not learnt.of:
        return
    steps = sum(lesson.logged.steps for lesson in learnt.of)
    runs = counted(len(learnt.of), "log")
    paragraph(console, f"{runs} with {counted(steps, 'step')} of training alone, on {learnt.profile.gpu}.")
    console.print()
    table = table_of("log", "plan", right=("steps", "step", "spread", "error before", "error now"))
    for lesson, before, after in zip(learnt.of, time.before, time.after, strict=True):
        logged = lesson.logged
        table.add_row(
            logged.name,
            lesson.plan.id,
            str(logged.steps),
            f"{significant(logged.step_s)} s",
            f"{100 * logged.spread:.1f}%",
            f"{100 * before:+.1f}%",
            f"{100 * after:+.1f}%",
        )
    console.print(table)
    apart(console, "error: predicted / measured - 1, before and after calibration.", style="dim")
    console.print()


def _told(time: Calibration) -> Iterator[str]:
    found = [
        f"{one.knob.name} {one.factor:.2f} (±{100 * one.spread:.0f}%)"
        for one in time.shifts
        if one.explained_share >= _TOLD
    ]
    if found:
        yield f"measured times, as multiples of those by the GPU's constants: {listed(found)}"


def _not_told(learnt: Lessons, time: Calibration) -> Iterator[str]:
    dark = [one for one in time.shifts if one.explained_share < _TOLD and one.knob.name in time.used]
    left = [one.knob.name for one in dark if one.knob.of_host or abs(one.factor - 1.0) < _MOVED]
    moved = [f"{one.knob.name} ({one.factor:.2f})" for one in dark if one.knob.name not in left]
    if left and learnt.of:
        yield f"these steps do not depend on {listed(left, 'or')}: left (almost) as before"
    if moved:
        yield f"these steps hardly depend on {listed(moved)}: scaled like the rest of the machine"
    for alike in _together(time.unseparated):
        names = listed([name for name in time.factors if name in alike])
        yield (
            f"these layouts cannot separate {names}: each is scaled in proportion to its uncertainty; logs of other"
            " layouts would separate them"
        )
    if not learnt.of:
        yield "the error of a whole step follows from training logs alone: add them once you have some"
    elif len({lesson.plan.id for lesson in learnt.of}) == 1:
        yield "part of the error is specific to this layout; a log of a very different layout would narrow the band"


def _together(pairs: Iterable[tuple[str, str]]) -> list[set[str]]:
    """Merge pairs into sets of names that are connected, directly or through other pairs."""
    found: list[set[str]] = []
    for pair in pairs:
        touched = [one for one in found if one & set(pair)]
        found = [one for one in found if one not in touched] + [set(pair).union(*touched)]
    return found


def _memory(learnt: Lessons) -> Iterator[str]:
    base = _base(learnt)
    for key, value in learnt.memory.constants.items():
        if key not in SHARES:
            more = f"{100 * value:.0f}% higher"
            yield f"tensors that come and go in a step are counted {more}, as a run out of memory shows"
            continue
        now, before = (f"{100 * share:.1f}%" for share in (value, getattr(base, key)))
        but = "as predicted" if now == before else f"instead of the predicted {before}"
        yield f"the allocator reserves {now} beyond live tensors, {but}"
    if not learnt.memory.constants:
        yield "the logs show nothing new about memory: memory is predicted as before"


def _base(learnt: Lessons) -> Profile:
    return profile_of(learnt.spec.cluster.gpu, learnt.spec.profile)


def _bands(learnt: Lessons) -> Iterator[str]:
    base = _base(learnt)
    for key in BANDS:
        if key in learnt.profile.constants:
            what, now = "step time" if "time" in key else "memory", learnt.profile.constants[key]
            yield f"error band of {what}: ±{100 * now:.0f}%, was ±{100 * getattr(base, key):.0f}%"


def _aside(learnt: Lessons) -> Iterator[str]:
    for lesson in learnt.of:
        logged = lesson.logged
        left = [f"{count} {_WHY[why]}" for why, count in logged.left_out.items()]
        cut = [] if logged.total in (None, logged.last) else [f"the log ends at step {logged.last} of {logged.total}"]
        if left or cut:
            yield f"{logged.name}: {'; '.join([*([f'steps not counted: {listed(left)}'] if left else []), *cut])}"


_WHY = {
    "first": "at the start",
    "evaluation or checkpoint": "next to an evaluation or a checkpoint",
    "slow": "much longer than the others",
    "short": "in stretches too short for a clock of whole seconds",
}


def calibrated_text(profile: OwnProfile) -> str:
    """Return the calibrated profile as a YAML file."""
    found = profile.calibrated or Calibrated(date="")
    lines = [
        f"{MARK}, written by `topoplan calibrate`. Use it with --profile,",
        "# or as `profile: FILE` in a cluster spec. Other constants stay those of the GPU (`topoplan show profile`).",
        f"gpu: {profile.gpu}",
        f"source: {json.dumps(profile.source)}",
        "calibrated:",
        f"  date: {json.dumps(found.date)}",
        *([f"  trainer: {found.trainer}"] if found.trainer else []),
        *(["  versions:"] if found.versions else []),
        *(f"    {json.dumps(package)}: {json.dumps(version)}" for package, version in found.versions.items()),
        *(["  measured:"] if found.measured else []),
        *(f"    - {json.dumps(plain(one))}" for one in found.measured),
        *(f"{key}: {value:g}" for key, value in profile.constants.items()),
    ]
    return "\n".join(lines) + "\n"
