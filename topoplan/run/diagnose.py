"""Find which node and rank failed first, and the likely cause, from the last log lines of all nodes.

When one rank ends, the others end soon after with errors of their own: connections closed by a peer, collectives that
time out. Which node's process ended first says little, because torchrun takes a while to stop the other ranks. The
lines of each node are therefore first weighed by how much they explain (`causes.Weight`), and the earliest end decides
only among equals.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from topoplan.bundle.node_script import GOES_ON
from topoplan.run.causes import CAUSES, HANG, HOST_MEMORY, SHM, Cause, Weight
from topoplan.run.progress import Progress
from topoplan.run.rank_lines import LONGEST, RankLine, WaitedFor, rank_line, waited_for
from topoplan.units import in_seconds, named

_LINES = 1000
_EVIDENCE_LINES = 5
_EVIDENCE_CHARS = 300
_STEPS_AFTER = 3
"""Ranks wait for each other in every step, so a message from this many steps before the end cannot have caused it."""

_BOX = "\u256d\u2502\u2570"
"""First characters of the lines of a traceback that rich draws in a box."""
_TRACEBACKS = ("Traceback (most recent call last):", "Original Traceback (most recent call last):", _BOX[0])
_BETWEEN = (
    "During handling of the above exception",
    "The above exception was the direct cause",
    "Original Traceback",  # torch/_utils.py, ExceptionWrapper: the traceback of a dataloader worker
)
"""After such a line, the preceding exception is not the one to report."""
_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]{0,200})(?::|$)")
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>[0-9]+)')
# torch/distributed/elastic/multiprocessing/errors/__init__.py, `_FAILURE_FORMAT_TEMPLATE`
_ROOT = "Root Cause (first observed failure):"
_REPORTED_RANK = re.compile(r"\s*rank\s*: (?P<rank>[0-9]{1,9}) \(local_rank: (?P<local>[0-9]{1,9})\)")
_REPORTED_CODE = re.compile(r"\s*exitcode\s*: (?P<code>-?[0-9]{1,9}) \(pid")
_AGENT = re.compile(r"[WEIF][0-9]{4} [0-9:.]+ [0-9]+ .*torch/distributed/(?:elastic|run)")
_SCRIPT = re.compile(rf"(?P<script>node-[0-9]+\.sh): (?!note: |{GOES_ON} )(?P<message>.+)")
_REFUSED = 2
_ENDINGS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_FOR_WANT_OF_A_RANK = ("nccl-timeout", "nccl-peer", "abort", "terminated")
"""Kinds of failures that the absence of another rank brings about."""
_NOT_THE_CAUSE = ("ChildFailedError", "SystemExit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The first failure of a run."""

    node: int
    rank: int | None
    """Global rank; None if no rank is to blame, or none was named."""
    kind: str
    """Kind of cause, for programs: `gpu-memory`, `port`, `exception`, `lost` ..."""
    cause: str
    """The likely cause, as a phrase without a full stop."""
    remedy: str
    evidence: tuple[str, ...]
    """The log lines that support the cause, in log order."""
    certain: bool
    """False if this may be the consequence of a failure that left no trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    weight: Weight
    kind: str
    cause: str
    remedy: str
    evidence: tuple[str, ...] = ()
    local: int | None = None
    rank: int | None = None
    place: int = 0
    is_exception: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """torchrun's report on the rank that failed first on its node."""

    rank: int
    local: int
    code: int | None
    words: str


def diagnose(
    tails: Mapping[int, Sequence[str]],
    codes: Mapping[int, int | None],
    ended_at_s: Mapping[int, float] | None = None,
    lost: Mapping[int, str] | None = None,
    *,
    ranks_per_node: int | None = None,
    addresses: Mapping[int, str] | None = None,
) -> Diagnosis | None:
    """Return the first failure among the nodes; None when no node has failed.

    `tails` are the last lines of each node. `codes` are the exit codes of the nodes that have ended, and of no others
    (None: the node left no code); a negative code, or one above 128, is a signal. `ended_at_s` uses one clock for all
    nodes. `lost` describes nodes that cannot be reached any more; such a node is not to blame if the others have
    trouble with peers that still run, recognized by their `addresses`. Leave out what came after the job was told to
    stop.
    """
    ended_at_s, lost = ended_at_s or {}, lost or {}
    named = _peers_in_trouble(tails, addresses or {}) if lost else set()
    elsewhere = named - set(codes) - set(lost)
    found: list[tuple[tuple[float, float, int], int, _Found]] = []
    read = {node: [rank_line(text) for text in list(tails.get(node, ()))[-_LINES:]] for node in {*tails, *codes, *lost}}
    for node, lines in sorted(read.items()):
        report = _report(lines)
        if node in lost:
            best = _best(_findings(lines), report)
            if best is None or best.weight is not Weight.CAUSE or not best.is_exception:
                best = _lost(lost[node], lines)
        elif node in codes:
            code = codes[node]
            if code == 0:
                continue
            best = _vanished(lines, report) if code is None else _of_an_ended_node(lines, report, code)
        else:
            # A rank has ended, and torchrun is still stopping the others.
            best = _best([each for each in _findings(lines) if each.is_exception and each.rank is not None], report)
        if best is not None:
            weight = float(best.weight)
            if best.kind == "lost":
                # A lost node explains more than an error on the way to it, but not more than one on the way to a node
                # that is there.
                weight += 0.5 + (Weight.ECHO if elsewhere and node not in named else 0)
            found.append(((weight, ended_at_s.get(node, float("inf")), node), node, _with_rank(best, report)))
    if not found:
        return None
    (weight, *_), node, first = min(found, key=lambda each: each[0])
    if ranks_per_node is not None and first.kind in _FOR_WANT_OF_A_RANK and (late := waited_for(read, ranks_per_node)):
        node, first = late.node, _hung(late)
    rank = first.rank
    if rank is None and first.local is not None and ranks_per_node is not None:
        rank = node * ranks_per_node + first.local
    return Diagnosis(
        node=node,
        rank=rank,
        kind=first.kind,
        cause=first.cause,
        remedy=first.remedy,
        evidence=first.evidence,
        certain=weight < Weight.LINK,
    )


def _peers_in_trouble(tails: Mapping[int, Sequence[str]], addresses: Mapping[int, str]) -> set[int]:
    """Return the nodes whose addresses occur in the other nodes' messages about connections."""
    said = [
        line
        for lines in tails.values()
        for line in list(lines)[-_LINES:]
        if any(cause.weight is not Weight.CAUSE and cause.pattern.search(line[-LONGEST:]) for cause in CAUSES)
    ]
    return {
        node
        for node, address in addresses.items()
        if any(re.search(rf"(?<![\w.]){re.escape(address)}(?![\w.])", line) for line in said)
    }


def _report(lines: Sequence[RankLine]) -> _Report | None:
    start = next((place for place in reversed(range(len(lines))) if lines[place].text.startswith(_ROOT)), None)
    if start is None:
        return None
    block = [line.text for line in lines[start : start + 12]]
    rank = next((match for text in block if (match := _REPORTED_RANK.match(text))), None)
    code = next((match for text in block if (match := _REPORTED_CODE.match(text))), None)
    if rank is None:
        return None
    return _Report(
        rank=int(rank["rank"]),
        local=int(rank["local"]),
        code=int(code["code"]) if code else None,
        words=" ".join(code.string.replace(":", "", 1).split()) if code else "",
    )


def _of_an_ended_node(lines: Sequence[RankLine], report: _Report | None, code: int) -> _Found:
    if code == _REFUSED and report is None and (refusal := _refusal(lines)):
        return refusal
    findings = _findings(lines)
    best = _best(findings, report)
    if best is not None and best.weight is Weight.CAUSE:
        return best
    if report is not None:
        # If the rank that ended first reports no connection trouble, what other ranks report of theirs does not matter.
        best = _best([each for each in findings if each.local in (report.local, None)], report)
    by_code = _by_code(lines, report, code)
    # NCCL and gloo abort, so a signal says more than a line; an exit code above 0 says less than any line.
    return by_code if best is None or by_code.kind in ("killed", "shm", "crash") else best


def _refusal(lines: Sequence[RankLine]) -> _Found | None:
    """Return what a node script that ended with 2 says in its last line: the reason, a semicolon, what to do."""
    place = next((place for place in reversed(range(len(lines))) if lines[place].text.strip()), None)
    match = None if place is None else _SCRIPT.match(lines[place].text)
    if place is None or match is None:
        return None
    what, _, remedy = match["message"].partition("; ")
    evidence = (_shown(lines[place].text),)
    return _Found(weight=Weight.CAUSE, kind="script", cause=what, remedy=remedy, evidence=evidence, place=place)


def _by_code(lines: Sequence[RankLine], report: _Report | None, code: int) -> _Found:
    """Return the reason that the exit code alone gives, for the reported rank, or for the node if no rank is named."""
    rank_code = report.code if report is not None and report.code is not None else code
    who = f"rank {report.rank}" if report is not None else "the node's script"
    number = -rank_code if rank_code < 0 else rank_code - 128 if report is None and 128 < rank_code < 193 else 0
    weight, kind, remedy = Weight.CAUSE, "exit", "its last lines may say why; the whole log is on that node"
    cause = f"{who} ended with exit code {rank_code}"
    if number:
        name = _signal_name(number)
        cause, kind = f"{who} was ended by {name}", "abort" if number == signal.SIGABRT else "crash"
        if number == signal.SIGKILL:
            # What the kernel says of it is only in its own log, so memory is one possibility, not the likeliest.
            unknown = "it is not known whether by the kernel, because host memory ran out"
            cause = f"{who} was killed ({name}), and {unknown}"
            kind, remedy = "killed", HOST_MEMORY
        elif number == signal.SIGBUS:
            cause, kind, remedy = f"{who} was ended by {name}: most likely /dev/shm is full", "shm", SHM
        elif number in _ENDINGS:
            weight, kind = Weight.ECHO, "terminated"
            remedy = "somebody or something on that machine ended it: a scheduler, an administrator, or a shutdown"
        else:
            remedy = (
                "a library crashed: look for versions that do not fit together, and run with PYTHONFAULTHANDLER=1"
                " to see where"
            )
    evidence = _last_lines(lines, report)
    return _Found(weight=weight, kind=kind, cause=cause, remedy=remedy, evidence=evidence)


def _vanished(lines: Sequence[RankLine], report: _Report | None) -> _Found:
    """Return the reason for a node that ended without an exit code: nothing was left to write one."""
    best = _best(_findings(lines), report)
    if best is not None and best.weight is Weight.CAUSE:
        return best
    return _Found(
        weight=Weight.CAUSE,
        kind="killed",
        cause="the job's processes were killed, including the first one",
        remedy=HOST_MEMORY,
        evidence=_last_lines(lines, report),
    )


def _lost(what: str, lines: Sequence[RankLine]) -> _Found:
    return _Found(
        weight=Weight.CAUSE,
        kind="lost",
        cause=f"the node is no longer reachable: {what}",
        remedy="check the machine and the network; its job may still be running, and `topoplan runs stop` stops it",
        evidence=_last_lines(lines, None),
    )


def _hung(late: WaitedFor) -> _Found:
    one = len(late.ranks) == 1
    who = f"rank {late.ranks[0]}" if one else f"ranks {named(map(str, late.ranks), 8)}"
    others = f"{late.waited} other{'s' if late.waited > 1 else ''} waited {in_seconds(late.waited_ms / 1000)}"
    return _Found(
        weight=Weight.LINK,
        kind="hang",
        cause=f"{who} did not take part in a collective: {others} until they timed out",
        remedy=HANG,
        evidence=tuple(map(_shown, late.evidence)),
        rank=late.ranks[0] if one else None,
    )


def _best(findings: Iterable[_Found], report: _Report | None) -> _Found | None:
    """Return the finding that explains most; among equals, one of the rank that torchrun blames, then the earliest."""

    def order(found: _Found) -> tuple[int, bool, bool, bool, int]:
        local = report.local if report is not None else None
        fatal = found.is_exception and found.rank is not None
        return found.weight, not fatal, not found.is_exception, found.local != local, found.place

    return min(findings, key=order, default=None)


def _findings(lines: Sequence[RankLine]) -> list[_Found]:
    found = []
    for place, line in enumerate(lines):
        # An indented line is part of a program's text, or belongs to a line that is read itself.
        if line.text and not line.text[0].isspace() and "NCCL INFO" not in line.text:
            for cause in CAUSES:
                if match := cause.pattern.search(line.text):
                    found.append(_found(cause, match, lines, place))
                    break
    by_place = {each.place: each for each in found}
    for start, end, is_last in _tracebacks(lines):
        if known := by_place.get(end):
            by_place[end] = replace(known, is_exception=True, evidence=_evidence_of(lines, start, end))
        elif is_last and (unknown := _unknown(lines, start, end)):
            by_place[end] = unknown
    steps = _steps(lines)
    fatal = [each for each in by_place.values() if each.is_exception and each.rank is not None]
    return [each for each in by_place.values() if each in fatal or steps[-1] - steps[each.place] < _STEPS_AFTER]


def _steps(lines: Sequence[RankLine]) -> list[int]:
    """For each line, the last training step seen so far; lines before the first step get that first step."""
    progress, found = Progress(), [0]
    for line in lines:
        progress.feed(0, line.text, 0.0)
        found.append(progress.step)
    first = next(filter(None, found), 0)
    return [step or first for step in found[1:]] or [0]


def _found(cause: Cause, match: re.Match[str], lines: Sequence[RankLine], place: int) -> _Found:
    line = lines[place]
    evidence = [line.text, *_following(lines, place)]
    groups = match.groupdict()
    return _Found(
        weight=cause.weight,
        kind=cause.kind,
        cause=_filled(cause.cause, groups),
        remedy=_filled(cause.remedy, groups),
        evidence=tuple(_shown(text) for text in evidence),
        local=line.local,
        rank=line.rank,
        place=place,
    )


def _unknown(lines: Sequence[RankLine], start: int, end: int) -> _Found | None:
    line = lines[end]
    match = _EXCEPTION.match(line.text)
    if match is None or match["type"].endswith(_NOT_THE_CAUSE):
        return None
    interrupted = match["type"] == "KeyboardInterrupt"
    frames = [
        frame for each in lines[start:end] if each.writer == line.writer and (frame := _FRAME.match(each.text))
    ]  # fmt: skip
    where = f" ({frames[-1]['file'].rpartition('/')[2]}, line {frames[-1]['line']})" if frames else ""
    return _Found(
        weight=Weight.ECHO if interrupted else Weight.CAUSE,
        kind="terminated" if interrupted else "exception",
        cause=f"{_shown(line.text).rstrip('.')}{where}",
        remedy="the traceback in the log of that node shows where it was raised",
        evidence=_evidence_of(lines, start, end),
        local=line.local,
        rank=line.rank,
        place=end,
        is_exception=True,
    )


def _tracebacks(lines: Sequence[RankLine]) -> list[tuple[int, int, bool]]:
    """Return the first and last line of each traceback, and whether it is not merely the reason of a later one.

    Those of several ranks may be interleaved; a long one may lack its beginning, and one of a SyntaxError has none.
    """
    starts: dict[tuple[int | None, int | None], int] = {}
    ends: dict[tuple[int | None, int | None], int] = {}
    found: dict[int, tuple[int, bool]] = {}
    for place, line in enumerate(lines):
        text, writer = line.text, line.writer
        if text.startswith(_BETWEEN) and writer in ends:
            found[ends[writer]] = found[ends[writer]][0], False
        if text.startswith(_TRACEBACKS) or (writer not in starts and _FRAME.match(text)):
            starts[writer] = place
        elif writer in starts and text and not (text[0].isspace() or text[0] in _BOX):
            found[place] = starts.pop(writer), True
            ends[writer] = place
    return [(start, end, is_last) for end, (start, is_last) in found.items()]


def _with_rank(found: _Found, report: _Report | None) -> _Found:
    """Return the finding with its global rank, derived from the report if the line names only the local rank."""
    if report is None or found.rank is not None or found.kind in ("lost", "script"):
        return found
    if found.local is None:
        # The agent's own lines name no rank; findings from an exit code are about the reported rank.
        return replace(found, rank=report.rank) if found.place == 0 else found
    return replace(found, rank=report.rank - report.local + found.local)


def _evidence_of(lines: Sequence[RankLine], start: int, end: int) -> tuple[str, ...]:
    """Return the deepest frame of a traceback, and the exception."""
    own = [each.text for each in lines[start:end] if each.writer == lines[end].writer]
    frame = max((place for place, text in enumerate(own) if _FRAME.match(text)), default=len(own))
    return tuple(_shown(text) for text in (*own[frame : frame + 2], lines[end].text, *_following(lines, end)))


def _following(lines: Sequence[RankLine], place: int) -> Iterator[str]:
    """Yield the next two lines of the same writer, as far as they belong to this line."""
    more = [each.text for each in lines[place + 1 : place + 30] if each.writer == lines[place].writer][:2]
    return itertools.takewhile(lambda text: text.strip() and not _is_other(text), more)


def _last_lines(lines: Sequence[RankLine], report: _Report | None) -> tuple[str, ...]:
    """Return the last lines of the rank that torchrun blames, or of all ranks, without torchrun's own report."""
    kept = []
    for line in lines:
        if line.local is None and (_AGENT.match(line.text) or line.text.startswith(_TRACEBACKS)):
            break
        if line.text.strip():
            kept.append(line)
    own = [line for line in kept if report is not None and line.local == report.local]
    said = [line.text for line in (own if report is not None else kept)[-_EVIDENCE_LINES:]]
    if report is not None and report.words:
        said.append(f"torchrun: rank {report.rank}, {report.words}")
    return tuple(_shown(text) for text in said)


def _is_other(text: str) -> bool:
    return bool(_AGENT.match(text)) or text.startswith((*_TRACEBACKS, *_BETWEEN))


def _filled(template: str, groups: Mapping[str, str | None]) -> str:
    """Fill a template: `{name}` is the group; `{name:text with %s}` is that text, or nothing if the group is absent."""

    def value(match: re.Match[str]) -> str:
        found = groups.get(match[1]) or ""
        return (match[2].replace("%s", found) if found else "") if match[2] else found

    return re.sub(r"\{(\w+)(?::([^}]*))?\}", value, template)


def _shown(text: str) -> str:
    text = text.rstrip()
    return text if len(text) <= _EVIDENCE_CHARS else text[: _EVIDENCE_CHARS - 3] + "..."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
