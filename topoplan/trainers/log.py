"""How a trainer logs its progress: patterns of the lines that it prints, whose named groups are read.

The last ones are those of programs that topoplan writes no files for, but that its trainers build on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SEPARATORS = re.compile(
    r"\r|(?:\[[a-z_]+[0-9]{1,6}\]: ?)+|^ *[0-9]{1,6}: |^\[[0-9]+,[0-9]+\]<std(?:out|err)>: ?|^\S+Z (?:std\w+ [FP] )?"
)
"""Separators inside a line and prefixes of a line.

torchrun's --tee prefixes each line with `[default0]:` and interleaves both output streams of a rank, even in the middle
of a line. `srun --label` and mpirun prefix the task number, Kubernetes the time.
"""
ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_LONGEST = 4096
"""Characters kept from the end of a longer line: a progress bar redraws itself without a newline."""
FIGURE = r"[0-9]{1,15}(?:\.[0-9]{0,20})?(?:[eE][-+]?[0-9]{1,3})?"
_NUMBER = rf"""["']?(?P<loss>[-+]?(?:{FIGURE}|nan|inf|NaN|Infinity))["']?"""


KEYWORDS = ("%|", "loss", "_runtime", "checkpoint")
"""Every line about a step, an evaluation, the end of either, or a checkpoint contains one of these. Python searches for
substrings ten times as fast as for patterns, and a node may print 80 MB per second."""


def may_match(lines: str) -> bool:
    """Whether lines may contain anything that a `Log` matches."""
    return any(word[0] in lines and word in lines for word in KEYWORDS)  # one character is found 20 times as fast


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The log patterns of one trainer. They only match lines that contain one of `KEYWORDS`.

    In a pattern for a quantity, the group is named after its unit: `s`, `ms`, `per_s`, `gib` or `mib`.
    """

    loss: re.Pattern[str]
    """Finds the number `loss`."""
    bar: re.Pattern[str] | None = None
    """Matches the training's progress bar from its start: `step`, `total` and `clock` ([H:]MM:SS)."""
    steps: re.Pattern[str] | None = None
    """Finds `step`, and optionally `total`, next to a loss. Without it and a bar, losses are counted as steps."""
    elapsed: re.Pattern[str] | None = None
    """Finds the time since the first step next to a loss: `days`, `hours`, `minutes` and `seconds`, each optional."""
    step_time: re.Pattern[str] | None = None
    """Finds the time of a step, or the mean of the steps since the previous line."""
    mean_time: re.Pattern[str] | None = None
    """Finds the mean time of all steps since the start."""
    data_time: re.Pattern[str] | None = None
    """Finds the share of the step time spent waiting for samples."""
    allocated: re.Pattern[str] | None = None
    """Finds torch's peak allocated memory so far."""
    reserved: re.Pattern[str] | None = None
    """Finds torch's peak reserved memory so far."""
    peaks_of_rank_0: bool = False
    """True if memory peaks are those of global rank 0; otherwise they are those of the fullest rank or an equal one."""
    file: str = ""
    """File in the output directory that says more than the printed log."""
    batch: re.Pattern[str] | None = None
    """Finds `batch`, the sequences of a step."""
    aside: re.Pattern[str] = re.compile(
        r"(?:eval_loss|eval_runtime|predict_loss)(?!\"?: null)|train_runtime|Evaluate:|[Ss]aving (?:model )?checkpoint"
    )
    """Finds lines about an evaluation or a checkpoint between steps, whose time is not that of a step."""


def loss_key(name: str) -> re.Pattern[str]:
    """Return a pattern for a loss in a printed dict or a line of JSON; transformers 4 prints numbers, 5 quotes them."""
    return re.compile(rf"""["']{name}["']: ?{_NUMBER}""")


def pieces(line: str) -> list[str]:
    """Split a line of a node's output into its pieces, without ANSI colors."""
    return SEPARATORS.split(ANSI.sub("", line[-_LONGEST:]))


def elapsed_s(found: re.Match[str]) -> int:
    """Return the seconds in a match of `Log.elapsed`."""
    named = found.groupdict()
    days, hours, minutes, seconds = (int(named.get(part) or 0) for part in ("days", "hours", "minutes", "seconds"))
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds


def clock_s(clock: str) -> int:
    """Return the seconds in tqdm's `MM:SS` or `H:MM:SS`."""
    total = 0
    for part in clock.split(":"):
        total = 60 * total + int(part)
    return total


_UNITS = {"s": 1.0, "ms": 1e-3, "gib": 2.0**30, "mib": 2.0**20}


def quantity(pattern: re.Pattern[str] | None, line: str) -> float | None:
    """Return the quantity that a pattern finds in a line, in seconds or bytes; None if absent or not above zero."""
    found = pattern.search(line) if pattern else None
    if found is None:
        return None
    (unit, text), *_ = ((name, text) for name, text in found.groupdict().items() if text is not None)
    value = float(text)
    if not 0 < value < 1e15:
        return None
    return 1.0 / value if unit == "per_s" else value * _UNITS[unit]


def value_of(key: str, unit: str) -> re.Pattern[str]:
    """Return a pattern for a quantity under a key of a printed dict or a line of JSON."""
    return re.compile(rf"""["']{key}["']: ?["']?(?P<{unit}>{FIGURE})""")


def tqdm_bar(title: str = "") -> re.Pattern[str]:
    """Return a pattern for the progress bar with this title; bars of data, weights and checkpoints have others."""
    return re.compile(
        rf"{title}\s*[0-9]{{1,3}}%\|[^|]{{0,400}}\|\s*(?P<step>[0-9]{{1,12}})/(?P<total>[0-9]{{1,12}})"
        r" \[(?P<clock>(?:[0-9]{1,6}:)?[0-9]{1,2}:[0-9]{2})<"
    )


MEGATRON_LM = Log(
    loss=re.compile(rf"lm loss: (?P<loss>{FIGURE})"),
    steps=re.compile(r"\biteration\s+(?P<step>[0-9]{1,12})/\s*(?P<total>[0-9]{1,12}) \|"),
    step_time=re.compile(rf"elapsed time per iteration \(ms\): (?P<ms>{FIGURE})"),
    allocated=re.compile(rf"max allocated: (?P<mib>{FIGURE})"),
    reserved=re.compile(rf"max reserved: (?P<mib>{FIGURE})"),
    batch=re.compile(r"global batch size:\s+(?P<batch>[0-9]{1,12})"),
    aside=re.compile(r"validation loss at |saving checkpoint at "),
)
"""One line per `--log-interval` iterations, with their mean time (megatron/training/training.py, training_log). The
memory peaks of the ranks with data-parallel rank 0 are printed once, after the first such line (report_memory)."""

VERL = Log(
    loss=re.compile(rf"train/loss:(?P<loss>{FIGURE})"),
    steps=re.compile(r"\bstep:(?P<step>[0-9]{1,12}) - "),
    step_time=re.compile(
        rf"(?:perf/time_per_step|train/time\(s\)|timing_s/step):(?:np\.float64\()?(?P<s>{FIGURE})",
    ),
    allocated=re.compile(rf"perf/max_memory_allocated_gb:(?:np\.float64\()?(?P<gib>{FIGURE})"),
    reserved=re.compile(rf"perf/max_memory_reserved_gb:(?:np\.float64\()?(?P<gib>{FIGURE})"),
)
"""`step:N - key:value - ...` (verl/utils/logger/aggregate_logger.py); its `gb` are GiB (verl/utils/memory_utils.py). In
reinforcement learning, a step includes more than training."""

OTHER_LOGS = {"Megatron-LM": MEGATRON_LM, "verl": VERL}

WRITTEN_BY = {"Megatron-LM": ("swift",), "verl": ("trinity",)}
"""Program -> trainers whose logs may contain its lines."""
