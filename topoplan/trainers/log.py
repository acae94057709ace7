"""How a trainer tells how far it is: patterns of the lines that it prints, whose named groups are read."""

from __future__ import annotations

import re
from dataclasses import dataclass

CUT = re.compile(
    r"\r|(?:\[[a-z_]+[0-9]{1,6}\]: ?)+|^ *[0-9]{1,6}: |^\[[0-9]+,[0-9]+\]<std(?:out|err)>: ?|^\S+Z (?:std\w+ [FP] )?"
)
"""Where a line is more than one: torchrun's --tee puts `[default0]:` before each, and joins the two outputs of a rank
without regard to whether one of them is in the middle of a line. And what is put before a line: the number of its task
by `srun --label` and by mpirun, the time by Kubernetes."""
ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_LONGEST = 4096
"""Of a longer line the end is read: a bar is drawn again and again without a new line."""
FIGURE = r"[0-9]{1,15}(?:\.[0-9]{0,20})?(?:[eE][-+]?[0-9]{1,3})?"
_NUMBER = rf"""["']?(?P<loss>[-+]?(?:{FIGURE}|nan|inf|NaN|Infinity))["']?"""


WORDS = ("%|", "loss", "_runtime", "checkpoint")
"""One of them stands in every line that tells of a step, an evaluation, their ends or a checkpoint. Python finds words
ten times as fast as patterns, and a node may print 80 MB a second."""


def may_be_told(lines: str) -> bool:
    """Whether a `Log` can find anything in lines."""
    return any(word in lines for word in WORDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Of one trainer. Its patterns find something only in lines with one of `WORDS`.

    Of patterns that find a quantity, the group is called by its unit: `s`, `ms`, `per_s`, `gib` or `mib`.
    """

    loss: re.Pattern[str]
    """Finds `loss`, a number."""
    bar: re.Pattern[str] | None = None
    """Matches the bar of the training from its beginning: `step`, `total` and `clock` ([H:]MM:SS)."""
    steps: re.Pattern[str] | None = None
    """Finds `step`, and perhaps `total`, beside a loss. Without it losses are counted where there is no bar."""
    elapsed: re.Pattern[str] | None = None
    """Finds the time since the first step beside a loss: `days`, `hours`, `minutes` and `seconds`, each perhaps."""
    step_time: re.Pattern[str] | None = None
    """Finds the time of the step, or the mean of those since the last line."""
    mean_time: re.Pattern[str] | None = None
    """Finds the mean time of all steps since the start."""
    data_time: re.Pattern[str] | None = None
    """Finds the part of a step's time in which samples were waited for."""
    allocated: re.Pattern[str] | None = None
    """Finds torch's peak of live tensors so far."""
    reserved: re.Pattern[str] | None = None
    """Finds the most that torch's allocator has held so far."""
    peaks_of_first: bool = False
    """They are those of the first process of all; else of one that holds as much as any, or of the fullest."""
    file: str = ""
    """In the output directory, where it says more than is printed."""
    batch: re.Pattern[str] | None = None
    """Finds `batch`, the sequences of a step."""
    aside: re.Pattern[str] = re.compile(
        r"(?:eval_loss|eval_runtime|predict_loss)(?!\"?: null)|train_runtime|Evaluate:|[Ss]aving (?:model )?checkpoint"
    )
    """Found in lines between whose steps something else was done: an evaluation, a checkpoint."""


def loss_key(name: str) -> re.Pattern[str]:
    """A key of a printed dict or of a line of JSON; transformers 4 prints numbers, 5 quotes them."""
    return re.compile(rf"""["']{name}["']: ?{_NUMBER}""")


def pieces(line: str) -> list[str]:
    """What a line of a node's output is made of, without colours."""
    return CUT.split(ANSI.sub("", line[-_LONGEST:]))


def elapsed_s(found: re.Match[str]) -> int:
    """The seconds of a match of `Log.elapsed`."""
    named = found.groupdict()
    days, hours, minutes, seconds = (int(named.get(part) or 0) for part in ("days", "hours", "minutes", "seconds"))
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds


def clock_s(clock: str) -> int:
    """The seconds of tqdm's `MM:SS` or `H:MM:SS`."""
    total = 0
    for part in clock.split(":"):
        total = 60 * total + int(part)
    return total


_UNITS = {"s": 1.0, "ms": 1e-3, "gib": 2.0**30, "mib": 2.0**20}


def quantity(pattern: re.Pattern[str] | None, line: str) -> float | None:
    """What a pattern finds in a line, in seconds or bytes; None where there is nothing above zero."""
    found = pattern.search(line) if pattern else None
    if found is None:
        return None
    (unit, text), *_ = ((name, text) for name, text in found.groupdict().items() if text is not None)
    value = float(text)
    if not 0 < value < 1e15:
        return None
    return 1.0 / value if unit == "per_s" else value * _UNITS[unit]


def value_of(key: str, unit: str) -> re.Pattern[str]:
    """A quantity under a key of a printed dict, or of a line of JSON."""
    return re.compile(rf"""["']{key}["']: ?["']?(?P<{unit}>{FIGURE})""")


def tqdm_bar(title: str = "") -> re.Pattern[str]:
    """The bar with this description: those of the data, the weights and the checkpoints begin with another."""
    return re.compile(
        rf"{title}\s*[0-9]{{1,3}}%\|[^|]{{0,400}}\|\s*(?P<step>[0-9]{{1,12}})/(?P<total>[0-9]{{1,12}})"
        r" \[(?P<clock>(?:[0-9]{1,6}:)?[0-9]{1,2}:[0-9]{2})<"
    )
