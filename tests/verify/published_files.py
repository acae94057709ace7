"""Run `topoplan check` on published files: `python -m tests.verify.published_files DIRECTORY...`.

Every YAML, JSON and script below the directories is checked as a user would check it, alone and without a cluster, and
then on the fewest machines that it asks for. The summary counts the findings of each rule and the files they concern,
recognized files, predicted configurations and the reasons for the others, the memory stated in comments against the
prediction, and the CPU time per file.
`--whole` checks all files of a directory in one call; `--rule ID` (or error, warning, note) and `--reason TEXT` list
the places instead of the summary.
"""

import argparse
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from topoplan.errors import InputError
from topoplan.lint.check import SEVERITIES, Checked, check
from topoplan.lint.prediction import Prediction
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.lint.rules.legality import broken_rules
from topoplan.lint.translate import translate
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Configuration, Setup
from topoplan.specs import known
from topoplan.specs.cluster import Cluster
from topoplan.units import GIB

SUFFIXES = (".yaml", ".yml", ".json", ".sh", ".slurm", ".sbatch")
CARD = "h100-sxm-80gb"
MACHINES = ((1, 8), (1, 16), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8))
"""Numbers of nodes, and of GPUs of each node."""
_MEMORY = re.compile(r"^#[^\n]*?\b(\d+) ?\* ?(\d+(?:\.\d+)?) ?GiB", re.MULTILINE)
_CLUSTER_IS_SMALL = re.compile("predicted on the cluster's")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The memory per GPU that a comment states, against the prediction."""

    file: str
    error: float
    """Predicted over stated memory, minus 1. Predicted is what the run needs, or up to that and the allocator's gaps
    where more is stated."""
    is_whole: bool
    """True if the file states all that memory depends on: full packed sequences, and no images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One call of `check`."""

    paths: tuple[Path, ...]
    cpu_s: float = 0.0
    """CPU time of the slower of both calls."""
    refused: str = ""
    """The message if nothing could be read."""
    findings: tuple[Finding, ...] = ()
    """The findings without a cluster, and those that the call with one adds."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Place of each configuration -> why it is not predicted; empty if it is."""
    memory: Compared | None = None
    """Memory against the prediction, if a comment of the file states it."""


def seen(paths: Sequence[Path]) -> Seen:
    """Return the result of `check` for files."""
    try:
        alone, alone_s = _timed(paths, PredictionTarget())
        on_cluster, cluster_s = _on_enough(paths, alone.setup)
    except InputError as error:
        return Seen(paths=tuple(paths), refused=error.what)
    predictions = on_cluster.predictions
    place = {id(one): one.configuration.part.place(one.configuration.line()) for one in predictions}
    return Seen(
        paths=tuple(paths),
        cpu_s=max(alone_s, cluster_s),
        findings=tuple(dict.fromkeys((*alone.findings, *on_cluster.findings))),
        reasons={place[id(one)]: "" if one.plan else one.reason for one in predictions},
        memory=_memory(paths[0], predictions) if len(paths) == 1 else None,
    )


def _memory(path: Path, predictions: Sequence[Prediction]) -> Compared | None:
    said = _MEMORY.findall(path.read_text(encoding="utf-8", errors="replace"))
    plans = [(one.plan, one.translation.spec) for one in predictions if one.plan and one.translation]
    if len(said) != 1 or len(plans) != 1:
        return None
    (gpus, gib), ((plan, spec),) = said[0], plans
    if plan.layout.world_size != int(gpus):
        return None
    stated, needed = float(gib), plan.memory.device_bytes / GIB
    error = min(max(stated, needed), needed + plan.memory.gaps_bytes / GIB) / stated - 1.0
    return Compared(file=path.name, error=error, is_whole=spec.job.packs and spec.model.vision is None)


def _on_enough(paths: Sequence[Path], setup: Setup) -> tuple[Checked, float]:
    """Return the fewest machines that all configurations ask for, and that their layouts divide."""
    clusters = [known.machines(known.gpu(CARD), *size, f"{size[0]} x {size[1]} {CARD}") for size in MACHINES]
    fits = (
        cluster for cluster in clusters if all(_has_room(one, setup, cluster) for one in setup.complete_configurations)
    )
    return _timed(paths, PredictionTarget(cluster=next(fits, clusters[0])))


def _has_room(configuration: Configuration, setup: Setup, cluster: Cluster) -> bool:
    try:
        found = translate(configuration, setup, cluster)
    except InputError:
        return True
    is_small = any(_CLUSTER_IS_SMALL.search(text) for text in found.assumptions)
    return not is_small and not broken_rules(found.spec, found.layout)


def _timed(paths: Sequence[Path], against: PredictionTarget) -> tuple[Checked, float]:
    start = time.process_time()
    return check([str(path) for path in paths], against), time.process_time() - start


def groups(directories: Iterable[Path], *, whole: bool) -> list[list[Path]]:
    """Yield the files of each call."""
    found = sorted({path for top in directories for path in top.rglob("*") if path.suffix in SUFFIXES})
    if not whole:
        return [[path] for path in found]
    by_directory: dict[Path, list[Path]] = defaultdict(list)
    for path in found:
        by_directory[path.parent].append(path)
    return list(by_directory.values())


def summary(calls: Sequence[Seen]) -> Iterable[str]:
    """Yield the summary line by line."""
    times = [one.cpu_s for one in calls]
    yield f"{len(calls)} calls; CPU s: median {statistics.median(times):.2f}, above 2 s: {sum(s > 2 for s in times)}"
    slow = sorted(calls, key=lambda one: -one.cpu_s)[:5]
    yield f"slowest: {', '.join(f'{one.cpu_s:.1f} {one.paths[0].name}' for one in slow)}"
    for severity in SEVERITIES:
        rules: dict[str, list[Path]] = defaultdict(list)
        for one in calls:
            for finding in one.findings:
                if finding.severity == severity:
                    rules[finding.rule].append(one.paths[0])
        yield f"\n{severity}s: {sum(map(len, rules.values()))}"
        yield from (
            f"  {len(hit):5} in {len(set(hit)):4} files  {rule}"
            for rule, hit in sorted(rules.items(), key=lambda item: -len(set(item[1])))
        )
    by_place = {place: reason for one in calls for place, reason in one.reasons.items()}
    reasons = Counter(by_place.values())
    yield f"\nconfigurations: {reasons.total()}, predicted {reasons.pop('', 0)}; not:"
    yield from (f"  {count:5}  {reason.splitlines()[0][:150]}" for reason, count in reasons.most_common())
    yield from _memory_lines([one.memory for one in calls if one.memory])
    refusals = Counter(one.refused for one in calls if one.refused)
    yield f"\nnot read: {refusals.total()}"
    yield from (f"  {count:5}  {refusal[:150]}" for refusal, count in refusals.most_common())


def _memory_lines(found: Sequence[Compared]) -> Iterable[str]:
    for title, is_whole in (("fully specified", True), ("lengths or images unknown", False)):
        those = sorted((one for one in found if one.is_whole is is_whole), key=lambda one: abs(one.error))
        if those:
            median = statistics.median(abs(one.error) for one in those)
            yield f"\nmemory of {len(those)} comments, {title}: median error {median:.1%}"
            yield f"  {', '.join(f'{one.error:+.1%} {one.file}' for one in those)}"


def places(calls: Sequence[Seen], rule: str, reason: str) -> Iterable[str]:
    """Yield the places of a rule's findings, or of configurations that a reason keeps from being predicted or read."""
    for one in calls:
        for finding in one.findings if rule else ():
            if rule in (finding.rule, finding.severity):
                yield f"{finding.part.place(finding.line)}: {finding.severity}: {finding.what} ({finding.rule})"
        if reason:
            yield from (f"{one.paths[0]}: {why}" for why in (*one.reasons.values(), one.refused) if reason in why)


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
