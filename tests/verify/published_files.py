"""What `topoplan check` makes of files that others publish: `python -m tests.verify.published_files DIRECTORY...`.

Every YAML, JSON and script below the directories is checked as a user would check it, alone: findings without a
cluster, predictions on one that is large enough for most. The summary counts findings of each rule and the files that
they hit, files that are recognised, configurations that are predicted and why others are not, and CPU time a file.
`--rule ID` and `--reason TEXT` list the places instead, `--whole` checks each directory with all its files in one call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from topoplan.errors import InputError
from topoplan.lint.against import Against
from topoplan.lint.check import SEVERITIES, Checked, check
from topoplan.specs import known

SUFFIXES = (".yaml", ".yml", ".json", ".sh", ".slurm", ".sbatch")
NODES, GPUS, CARD = 4, 8, "h100-sxm-80gb"


@dataclass
class Seen:
    """One call of `check`."""

    paths: Sequence[Path]
    cpu_s: float
    refused: str = ""
    """What it said where it read nothing."""
    checked: Checked | None = None
    predicted: list[str] = field(default_factory=list)
    """Of each configuration the reason why it is not predicted; empty for one that is."""


def seen(paths: Sequence[Path]) -> Seen:
    """What a call says of files without a cluster, and on one."""
    names, start = [str(path) for path in paths], time.process_time()
    cluster = known.machines(known.gpu(CARD), NODES, GPUS, f"{NODES} x {GPUS} {CARD}")
    try:
        checked = check(names)
        alone_s = time.process_time() - start
        on_cluster = check(names, Against(cluster=cluster))
    except InputError as error:
        return Seen(paths, time.process_time() - start, refused=error.what)
    predicted = ["" if one.plan else one.reason for one in on_cluster.predictions]
    known_ones = {one.configuration.part.name for one in on_cluster.predictions}
    predicted += [
        finding.what
        for finding in on_cluster.findings
        if finding.rule == "not-predicted" and finding.part.name not in known_ones
    ]
    return Seen(paths, max(alone_s, time.process_time() - start - alone_s), checked=checked, predicted=predicted)


def groups(directories: Iterable[Path], *, whole: bool) -> list[list[Path]]:
    """The files of each call."""
    found = sorted({path for top in directories for path in top.rglob("*") if path.suffix in SUFFIXES})
    if not whole:
        return [[path] for path in found]
    by_directory: dict[Path, list[Path]] = defaultdict(list)
    for path in found:
        by_directory[path.parent].append(path)
    return list(by_directory.values())


def summary(calls: Sequence[Seen]) -> Iterable[str]:
    """The whole of it as lines."""
    read = [one for one in calls if one.checked]
    yield f"{len(calls)} calls, {len(read)} read; CPU s: median {statistics.median(c.cpu_s for c in calls):.2f}"
    slow = sorted(calls, key=lambda one: -one.cpu_s)[:5]
    yield f"slowest: {', '.join(f'{one.cpu_s:.1f} {one.paths[0].name}' for one in slow)}"
    for severity in SEVERITIES:
        rules: dict[str, list[Path]] = defaultdict(list)
        for one in read:
            for finding in one.checked.findings if one.checked else ():
                if finding.severity == severity:
                    rules[finding.rule].append(one.paths[0])
        yield f"\n{severity}s: {sum(map(len, rules.values()))}"
        yield from (
            f"  {len(hit):5} in {len(set(hit)):4} files  {rule}"
            for rule, hit in sorted(rules.items(), key=lambda item: -len(set(item[1])))
        )
    reasons = Counter(reason for one in read for reason in one.predicted)
    yield f"\nconfigurations: {reasons.total()}, predicted {reasons.pop('', 0)}; not:"
    yield from (f"  {count:5}  {reason.splitlines()[0][:150]}" for reason, count in reasons.most_common())
    refusals = Counter(one.refused for one in calls if one.refused)
    yield f"\nnot read: {refusals.total()}"
    yield from (f"  {count:5}  {refusal[:150]}" for refusal, count in refusals.most_common())


def places(calls: Sequence[Seen], rule: str, reason: str) -> Iterable[str]:
    """Where a rule found something, or a configuration was not predicted or read for a reason."""
    for one in calls:
        for finding in one.checked.findings if one.checked and rule else ():
            if rule in (finding.rule, finding.severity):
                yield f"{finding.part.place(finding.line)}: {finding.severity}: {finding.what} ({finding.rule})"
        if reason:
            yield from (f"{one.paths[0]}: {why}" for why in [*one.predicted, one.refused] if reason in why)


def main() -> None:
    """Check all files below the directories, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--rule", default="")
    parser.add_argument("--reason", default="")
    given = parser.parse_args()
    calls = [seen(paths) for paths in groups(given.directories, whole=given.whole)]
    print("\n".join(places(calls, given.rule, given.reason) if given.rule or given.reason else summary(calls)))


if __name__ == "__main__":
    main()
