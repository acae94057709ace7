"""The log of a run: which steps it reports, how long the steps took that only trained, and the memory.

A log reports the time of a step in one of three ways: per step, as a mean since the start, or on a clock since the
start, mostly in whole seconds. All three are converted to intervals of steps with their seconds. Anything else that a
trainer does between steps makes an interval longer, never shorter, so the intervals left out are the long ones:

- the first, which compiles and allocates;
- those that contain an evaluation or a checkpoint, if the log says so;
- those above the median by more than 5 standard deviations (1.4826 times the median distance from the median, which
  long intervals hardly affect: Rousseeuw and Croux 1993) and by more than a quarter of the median.

On a clock of whole seconds, stretches of less than 10 s, as at the end of a log, make no interval.

The remaining intervals are averaged: with samples of different lengths every step takes a different time, and a
prediction is of the mean.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

from topoplan.errors import InputError, SpecError, listed
from topoplan.specs.source import read_text, shown_path
from topoplan.trainers.log import OTHER_LOGS, Log, clock_s, elapsed_s, pieces, quantity
from topoplan.trainers.registry import TRAINERS

Why = Literal["first", "evaluation or checkpoint", "slow", "short"]
"""Why steps are left out."""
MOST_LOG_BYTES = 64 << 20
"""Only the end of a longer log is read: enough steps, and how it ended."""
_GZIP = b"\x1f\x8b"
_LEAST_TICKS = 10
"""Minimum length in seconds of an interval on a clock of whole seconds: each end is off by half a second."""
FEWEST = 3
"""Minimum number of intervals to tell which ones are long."""
_DEVIATIONS, _LONGER = 5.0, 0.25


class TooFewStepsError(InputError):
    """A log that tells of steps, though of too few."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Consecutive steps."""

    last: int
    """Number of the last step."""
    steps: int
    seconds: float
    """Seconds of all steps together."""
    aside: bool
    """Whether the log reports something else between the steps."""

    @property
    def each_s(self) -> float:
        """Seconds per step."""
        return self.seconds / self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """What a log reports about a run."""

    name: str
    """Name of the file."""
    writer: str
    """The trainer that wrote the lines, or another program of `OTHER_LOGS`; empty for a progress bar that any of them
    draws."""
    first: int
    """Number of the first step reported."""
    last: int
    total: int | None
    """Number of steps that the run was to have."""
    step_s: float
    """Mean over the steps that only trained."""
    spread: float
    """Standard deviation of the intervals behind the mean, as a fraction of the mean."""
    error: float
    """Standard error of the mean, as a fraction of the mean."""
    steps: int
    """Number of steps behind the mean."""
    left_out: Mapping[Why, int]
    """Number of steps that are not in the mean, by reason."""
    allocated_bytes: float | None
    reserved_bytes: float | None
    batch: int | None
    """Sequences per step, if the log says so."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line about a step."""

    line: int
    step: int
    total: int | None
    step_s: float | None = None
    mean_s: float | None = None
    """Mean over all steps since the start."""
    clock_s: float | None = None
    """Time since the start, in whole seconds."""
    aside: bool = False
    """Whether the log reports something else since the previous line."""
    is_other: bool = False
    """Whether the line itself is about an evaluation, following the line of the step."""


def open_end(path: Path, most_bytes: int = MOST_LOG_BYTES) -> BinaryIO:
    """Open a log at its last `most_bytes`, or a pipe as it is. Raises OSError."""
    file = path.open("rb")
    if path.is_file():
        file.seek(max(0, path.stat().st_size - most_bytes))
    return file


def log_text(path: Path) -> str:
    """Return the text of a log without damage by copying or cutting. Raises SpecError for a file that is no log."""
    name, wanted = shown_path(path), "a log of a trainer"
    if path.is_dir():
        raise SpecError("is a directory, not a log", where=name, remedy=f"give {wanted} in it")
    try:
        with open_end(path) as file:
            content = file.read(MOST_LOG_BYTES)
    except OSError:
        return read_text(path, wanted=wanted)  # which says what is wrong with it
    if content.startswith(_GZIP):
        raise SpecError("is packed", where=name, remedy=f"unpack it first: gunzip --keep {shlex.quote(name)}")
    text = content.decode("utf-8-sig", "replace").replace("\0", "")
    if text.count("\ufffd") > len(text) // 20:
        raise SpecError("is not a text file in UTF-8", where=name, remedy=f"give {wanted}")
    return text


def read_log(text: str, *, name: str, trainer: str | None = None) -> Logged:
    """Return what a log reports. `trainer` is the one whose lines are looked for first; None is any.

    Raises InputError for a log without steps, of several runs or processes, or with too few steps.
    """
    # A progress bar that is redrawn is a single line, however long.
    drawn = ((number, part) for number, line in enumerate(text.split("\n"), 1) for part in line.split("\r"))
    lines = [(number, piece) for number, part in drawn if part for piece in pieces(part)]
    logs = _known(trainer)
    found = {writer: _entries(log, lines) for writer, log in logs.items()}
    writer = max(found, key=lambda one: len(found[one]))
    entries, log = found[writer], logs[writer]
    if not entries:
        entries, writer = _bars([log.bar for log in logs.values() if log.bar], lines), ""
    if not entries:
        writers = listed([*(one.title for one in TRAINERS), *OTHER_LOGS], "or")
        raise InputError("tells of no step with its time", where=name, expected=f"expected a log of {writers}")
    _refuse_mixtures(entries, name)
    used, left_out = steady(_intervals(entries))
    if len(used) < FEWEST:
        steps, stretches = sum(one.steps for one in used), f"stretch{'' if len(used) == 1 else 'es'}"
        what = f"has {steps} steady step{'' if steps == 1 else 's'} after the first"
        if not _is_fine(entries):
            what += f", which a clock of whole seconds times in {len(used)} {stretches} of {_LEAST_TICKS} s or more"
        remedy = "let it run on, and log every step"
        raise TooFewStepsError(what, where=name, expected=f"expected {FEWEST} or more", remedy=remedy)
    steps, seconds = sum(one.steps for one in used), sum(one.seconds for one in used)
    short = entries[-1].step - entries[0].step + 1 - steps - sum(left_out.values())
    if short > 0 and not _is_fine(entries):
        left_out["short"] = short
    mean = seconds / steps
    variance = sum(one.steps * (one.each_s - mean) ** 2 for one in used) / steps
    if not _is_fine(entries):
        # Each end is uniformly distributed within its second: a variance of 1/12 square seconds per end.
        variance -= (len(used) / steps) ** 2 / 6.0
    spread = math.sqrt(max(0.0, variance)) / mean
    allocated, reserved = (_peak(pattern, lines) for pattern in (log.allocated, log.reserved))
    batches = [int(match["batch"]) for _, piece in lines if log.batch and (match := log.batch.search(piece))]
    return Logged(
        name=name,
        writer=writer,
        first=entries[0].step,
        last=entries[-1].step,
        total=max((entry.total for entry in entries if entry.total), default=None),
        step_s=mean,
        spread=spread,
        error=math.hypot(spread / math.sqrt(len(used)), 0.0 if _is_fine(entries) else 0.4 / seconds),
        steps=steps,
        left_out=left_out,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        batch=batches[-1] if batches else None,
    )


def last_step(text: str) -> int | None:
    """Return the last step that a log reports, whether with its time or not."""
    forms = [form for log in _known().values() for form in (log.steps, log.bar) if form]
    for line in reversed(text.split("\n")):
        for piece in reversed(pieces(line)):
            if found := next(filter(None, (form.search(piece) for form in forms)), None):
                return int(found["step"])
    return None


def _known(trainer: str | None = None) -> dict[str, Log]:
    """Return the known kinds of logs, the given trainer's first."""
    return {one.name: one.log for one in sorted(TRAINERS, key=lambda one: one.name != trainer)} | OTHER_LOGS


def _entries(log: Log, lines: Sequence[tuple[int, str]]) -> list[_Entry]:
    """Return the lines of a trainer that report a step with a time."""
    found, aside = list[_Entry](), False
    for number, piece in lines:
        other = log.aside.search(piece) is not None
        match = log.steps.search(piece) if log.steps else None
        clock = log.elapsed.search(piece) if log.elapsed and match else None
        entry = match and _Entry(
            number,
            int(match["step"]),
            int(match.groupdict().get("total") or 0) or None,
            quantity(log.step_time, piece),
            quantity(log.mean_time, piece),
            float(elapsed_s(clock)) if clock else None,
            aside,
            other,
        )
        if entry and (entry.step_s or entry.clock_s is not None):
            if not (found and _is_again(entry, found[-1])):
                found.append(entry)
            aside = False
        else:
            aside = aside or other
    return found


def _is_again(entry: _Entry, before: _Entry) -> bool:
    """Return whether an entry repeats the previous line, as when two processes tee into one file."""
    return replace(entry, line=before.line, aside=before.aside) == before


def _bars(bars: Sequence[re.Pattern[str]], lines: Sequence[tuple[int, str]]) -> list[_Entry]:
    """Return the progress bar of the training: of the bars with a number of steps, the one with the most."""
    found: dict[int, list[_Entry]] = {}
    for number, piece in lines:
        match = next((match for bar in bars if "%|" in piece and (match := bar.match(piece))), None)
        if match:
            step, drawn = int(match["step"]), found.setdefault(int(match["total"]), [])
            if step and (not drawn or step != drawn[-1].step):
                drawn.append(_Entry(number, step, int(match["total"]), clock_s=float(clock_s(match["clock"]))))
    return found[max(found)] if found else []


def _is_fine(entries: Sequence[_Entry]) -> bool:
    """Return whether times are known to better than a second."""
    return all(entry.step_s or entry.mean_s for entry in entries)


def _refuse_mixtures(entries: Sequence[_Entry], name: str) -> None:
    """Raise InputError for the steps of several processes, or of several runs."""
    times = Counter(entry.step for entry in entries if not entry.is_other)
    often = [step for step, count in times.items() if count > 1]
    if len(often) > max(1, len(times) // 2):
        what = f"tells {times[often[0]]} times of step {often[0]}, and so of others: lines of several processes or runs"
        raise InputError(what, where=name, remedy="give the log of one process of one run")
    for before, entry in itertools.pairwise(entries):
        if entry.step < before.step:
            what = f"goes back from step {before.step} to step {entry.step}: two runs, or one that was started again"
            raise InputError(what, where=f"{name}:{entry.line}", remedy="give the lines of one of them")


def _intervals(entries: Sequence[_Entry]) -> list[Interval]:
    """Return the intervals between lines; if times are of single steps, the first is the first entry's own step."""
    found = list[Interval]()
    if all(entry.step_s for entry in entries):
        steps = [entries[0].step - 1, *(entry.step for entry in entries)]
        usual = Counter(after - before for before, after in itertools.pairwise(steps)).most_common(1)[0][0]
        for before, entry in zip(steps, entries, strict=False):
            if entry.step > before and entry.step_s:
                # A line is about the steps since the previous line, which may be missing here.
                count = min(entry.step - before, max(1, usual))
                found.append(Interval(entry.step, count, count * entry.step_s, entry.aside))
        return found
    least_s = 0.0 if _is_fine(entries) else _LEAST_TICKS
    for part in _by_clock(entries):
        mark, aside = part[0], False
        found.append(Interval(mark.step, 1, _since_s(mark, part), bool(found)))
        for entry in part[1:]:
            since_s = _since_s(entry, part) - _since_s(mark, part)
            if entry.step == mark.step or since_s < 0.0:
                # An evaluation has ended.
                mark, aside = entry, False
                continue
            aside = aside or entry.aside or entry.is_other
            if since_s > 0.0 and since_s >= least_s:
                found.append(Interval(entry.step, entry.step - mark.step, since_s, aside))
                mark, aside = entry, False
    return found


def _by_clock(entries: Sequence[_Entry]) -> list[list[_Entry]]:
    """Split entries where the clock restarts: it begins at zero again in a run resumed from a checkpoint."""
    parts = [[entries[0]]]
    for before, entry in itertools.pairwise(entries):
        if (entry.clock_s or 0.0) < (before.clock_s or 0.0):
            parts.append([])
        parts[-1].append(entry)
    return parts


def _since_s(entry: _Entry, entries: Sequence[_Entry]) -> float:
    """Return the seconds since the start, from the mean and the number of its steps if there is one."""
    clock, last = entry.clock_s or 0.0, entries[-1]
    if entry.mean_s is None or last.mean_s is None:
        return clock
    before = last.step - round((last.clock_s or 0.0) / last.mean_s)
    # If off by little, the clock is just coarse; otherwise the run was resumed from a checkpoint.
    return entry.mean_s * (entry.step - (before if before > 1.0 / last.mean_s + 1 else 0))


def steady(intervals: Sequence[Interval]) -> tuple[list[Interval], dict[Why, int]]:
    """Return the intervals that only trained, and the numbers of steps left out by reason."""
    left_out: Counter[Why] = Counter()
    kept = list(intervals[1:])
    left_out["first"] += sum(one.steps for one in intervals[:1])
    left_out["evaluation or checkpoint"] += sum(one.steps for one in kept if one.aside)
    kept = [one for one in kept if not one.aside]
    if kept:
        middle = _middle([(one.each_s, one.steps) for one in kept])
        away = 1.4826 * _middle([(abs(one.each_s - middle), one.steps) for one in kept])
        limit = middle + max(_DEVIATIONS * away, _LONGER * middle)
        left_out["slow"] += sum(one.steps for one in kept if one.each_s > limit)
        kept = [one for one in kept if one.each_s <= limit]
    return kept, {why: count for why, count in left_out.items() if count}


def _middle(weighed: Sequence[tuple[float, int]]) -> float:
    """Return the weighted median of (value, weight) pairs."""
    ordered = sorted(weighed)
    counted = itertools.accumulate(count for _, count in ordered)
    half = sum(count for _, count in ordered) / 2.0
    return next(value for (value, _), reached in zip(ordered, counted, strict=True) if reached >= half)


def _peak(pattern: re.Pattern[str] | None, lines: Sequence[tuple[int, str]]) -> float | None:
    found = ((pattern, piece[match.start() :]) for _, piece in lines if pattern for match in pattern.finditer(piece))
    return max(filter(None, (quantity(*one) for one in found)), default=None)
