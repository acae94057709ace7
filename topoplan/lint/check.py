"""The whole of `topoplan check`: turn files into findings, predictions and corrected copies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.utils import canonicalize_name

from topoplan.bundle.plan_file import draft_again, read_plan_file
from topoplan.bundle.whole import refuse_incomplete, refuse_lacking, refuse_links
from topoplan.bundle.write import MANIFEST
from topoplan.errors import SpecError, TopoplanError
from topoplan.lint.by_version import judged
from topoplan.lint.compare import predict_configuration, unpredicted_findings
from topoplan.lint.finding_filter import FindingFilter
from topoplan.lint.fix import Copy, copies, corrected, split_node_commands
from topoplan.lint.logs import is_log, of_logs, read_logs
from topoplan.lint.prediction import Prediction
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.lint.rules.registry import rule_modules
from topoplan.lint.rules.shell import CUT_OFF
from topoplan.reading.finding import Finding, Severity
from topoplan.reading.parts import Part
from topoplan.reading.processes import launch_of
from topoplan.reading.read_parts import STANDARD_INPUT, bundle_files
from topoplan.reading.read_setup import read_setup, setup_of
from topoplan.reading.setup import Configuration, Setup
from topoplan.reading.versions import is_lock, stated_versions
from topoplan.specs.cluster import Cluster
from topoplan.trainers.recognizers import recognizers
from topoplan.trainers.trainer import MAIN_FILE, PLAN_FILE

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
_ALL = FindingFilter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of a check."""

    setup: Setup
    findings: tuple[Finding, ...]
    """Sorted by severity, errors first, then by place."""
    predictions: tuple[Prediction, ...]
    """Predictions, one for each configuration that names a model, if a cluster was given."""
    cluster: Cluster | None
    choice: FindingFilter
    """Which findings were asked for."""
    ignored: int
    """Number of findings that the choice left out."""
    not_understood: tuple[Part, ...]
    """YAML and JSON parts that no known trainer recognizes as its configuration."""

    def count(self, severity: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(one.severity == severity for one in self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """The result of `--fix`."""

    copies: tuple[Copy, ...]
    """Corrected copies that have yet to be written to disk."""
    after: Checked
    """The check of the corrected text; its parts keep the names of the originals."""


def check(paths: Sequence[str], against: PredictionTarget | None = None, choice: FindingFilter = _ALL) -> Checked:
    """Check files, bundle directories, or `-` for standard input, together as one setup.

    With a cluster, each configuration is predicted on it and compared with the best plan. `choice` selects the findings
    that are reported.

    Raises InputError for a path that cannot be read, and if nothing in the files is checked.
    """
    against = against or PredictionTarget()
    for path in paths:
        if path != STANDARD_INPUT:
            refuse_incomplete(Path(path))
            _refuse_broken(Path(path))
    others = [path for path in paths if not is_log(path)]
    files = [path for path in others if not is_lock(path)] or others
    setup = read_setup(files, recognizers()) if files else Setup(parts=())
    logs, unread = read_logs([path for path in paths if is_log(path)])
    said = stated_versions(paths, setup) | (dict(against.cluster.software) if against.cluster else {})
    bundles = tuple(path for path in map(Path, paths) if (path / MANIFEST).is_file())
    setup = replace(
        setup,
        versions=said,
        bundles=bundles,
        required={path: _required(path) for path in bundles},
        logs=logs,
        unread=(*setup.unread, *unread),
    )
    if setup.unread and not (setup.parts or setup.logs):
        raise setup.unread[0][1]
    against = against.sized_for(setup)
    if against.profile is not None and against.cluster is not None:
        against.profile.check_gpu(against.cluster.gpu)
    return check_setup(setup, against, choice)


def _refuse_broken(directory: Path) -> None:
    if os.path.lexists(directory / MANIFEST):
        refuse_lacking(directory, (MAIN_FILE,))
    if any(os.path.lexists(directory / name) for name in (MANIFEST, PLAN_FILE)):
        refuse_links(directory, (PLAN_FILE, MANIFEST, *(file.name for file in bundle_files(directory))))


def _required(bundle: Path) -> Mapping[str, str]:
    """Return the versions that the scripts of a bundle require; none for a broken plan, which a rule reports."""
    try:
        recorded = read_plan_file(bundle)
        draft = draft_again(recorded)
    except TopoplanError:
        return {}
    return {canonicalize_name(one.package.name): one.versions for one in draft.run.requirements}


def check_setup(setup: Setup, against: PredictionTarget, choice: FindingFilter = _ALL) -> Checked:
    """Check a setup that has already been read; see `check`."""
    found = list(_rule_findings(setup))
    predictions: list[Prediction] = []
    for configuration in setup.complete_configurations:
        told: tuple[Finding, ...] = ()
        if cut := _cut_off(configuration, setup, found):
            prediction = Prediction(configuration=configuration, reason=cut)
        else:
            prediction, told = predict_configuration(configuration, setup, against)
        if against.cluster is not None:
            predictions.append(prediction)
        found += [one for one in told if not _is_known(one, found)]
    if against.cluster is not None:
        found += unpredicted_findings(setup)
    found += of_logs(setup, predictions)
    used = {id(configuration.part) for configuration in setup.configurations}
    return Checked(
        setup=setup,
        findings=_in_order(found, setup, choice),
        predictions=tuple(predictions),
        cluster=against.cluster,
        choice=choice,
        ignored=sum(not choice.accepts(one, setup) for one in dict.fromkeys(found)),
        not_understood=tuple(
            part
            for part in setup.parts
            if part.kind not in ("shell", "hosts") and not part.is_excerpt and id(part) not in used
        ),
    )


def fix(checked: Checked, against: PredictionTarget) -> Fixed:
    """Return corrected copies of what was checked, applying every edit that its findings carry."""
    wanted, setup = _corrected(checked)
    against = against.sized_for(checked.setup)
    return Fixed(copies=wanted, after=check_setup(setup, against, checked.choice) if wanted else checked)


def corrections(checked: Checked) -> int:
    """Return how many findings `fix` corrects, including those that only appear after earlier corrections."""
    return len({id(finding) for copy in _corrected(checked)[0] for one in copy.corrections for finding in one.findings})


def _corrected(checked: Checked) -> tuple[tuple[Copy, ...], Setup]:
    """Return the corrected copies and the setup that they form together."""

    def recheck(parts: Sequence[Part]) -> Sequence[Finding]:
        setup = replace(setup_of(parts, recognizers()), versions=checked.setup.versions)
        return _in_order(_rule_findings(setup), setup, checked.choice)

    setup, findings = checked.setup, checked.findings
    if not any(finding.edits for finding in findings):
        return (), setup
    parts = tuple(split_node_commands(setup))
    try:
        done = corrected(parts, findings if parts == setup.parts else recheck(parts), recheck)
        new = {correction.before: correction.after for correction in done}
        kept = {name: getattr(setup, name) for name in ("bundles", "required", "versions", "logs", "unread")}
        setup = replace(setup_of([new.get(part, part) for part in parts], recognizers()), **kept)
    except SpecError:
        return (), setup  # the corrected text would no longer start or configure any training
    return copies(done, tuple(_files(setup)), references=setup.references), setup


def _files(setup: Setup) -> Iterator[tuple[Part, ...]]:
    """Yield the groups of parts that form a corrected file: a whole file alone, or the runnable pieces of a document.

    Runnable pieces are each configuration that names a model (every configuration if none does) and each command
    together with the blocks above it that only set variables, because the blocks of a document form one shell session.
    """
    whole = {configuration.part for configuration in setup.configurations if setup.is_complete(configuration)}
    starts = {launch.part for launch in setup.launches}
    for part in setup.parts:
        of_file = [other for other in setup.parts if other.name == part.name]
        if not part.label:
            yield (part,)
        elif part.kind == "shell":
            before = of_file[: of_file.index(part)]
            if part in starts:
                yield (*(other for other in before if other.kind == "shell" and other not in starts), part)
            elif not starts.intersection(of_file):
                yield (part,)
        elif part in whole or not whole.intersection(of_file):
            yield (part,)


def _rule_findings(setup: Setup) -> Iterable[Finding]:
    overridden = _overridden(setup)
    for module in rule_modules():
        for found in module.findings(setup):
            if found.line in overridden.get(id(found.part), ()):
                continue
            if finding := judged(found, setup.versions):
                # Edits that are right for a shell script would break a Makefile recipe.
                yield replace(finding, edits=()) if finding.part.is_makefile else finding


def _cut_off(configuration: Configuration, setup: Setup, found: Sequence[Finding]) -> str:
    """Say that the rest of a configuration's command is no part of it by mistake; empty if it is whole."""
    launch = launch_of(setup, configuration)
    for one in found:
        if launch and one.rule == CUT_OFF and one.part == launch.part and one.line is not None:
            earlier = [other.last_line for other in setup.launches if other.part == one.part]
            if launch.last_line == max((line for line in earlier if line < one.line), default=0):
                return f"its command is cut off before line {one.part.file_line(one.line)}"
    return ""


def _overridden(setup: Setup) -> dict[int, set[int]]:
    """Return, by part id, the lines without effect because every command that reads the file overrides their keys."""
    lines: dict[int, set[int]] = {}
    for configuration in setup.configurations:
        readers = [launch for launch in setup.launches if launch.file_configuration is configuration]
        said = [set(one.configuration.source.data) if one.configuration else set() for one in readers]
        gone = set.intersection(*said) if said else set()
        if gone:
            found = configuration.source.lines.items()
            kept = {line for path, line in found if path[0] not in gone}
            lines[id(configuration.part)] = {line for path, line in found if path[0] in gone} - kept
    return lines


def _in_order(findings: Iterable[Finding], setup: Setup, choice: FindingFilter) -> tuple[Finding, ...]:
    """Return the chosen findings without duplicates, errors first, then in the order of files and lines."""
    order: dict[str, int] = {}
    for part in setup.parts:
        order.setdefault(part.name, len(order))
    # A file that a script writes with a here-document is reported on, but has no copy: the script itself would have to
    # change.
    told = (replace(one, edits=()) if one.part.file else one for one in findings if choice.accepts(one, setup))
    return tuple(
        sorted(
            dict.fromkeys(told),
            key=lambda one: (
                SEVERITIES.index(one.severity),
                order.get(one.part.name, len(order)),
                0 if one.line is None else one.part.file_line(one.line),
            ),
        )
    )


def _is_known(finding: Finding, found: Iterable[Finding]) -> bool:
    """Whether a broken layout rule has already been reported at the same place by a rule on the keys."""
    return (finding.rule.startswith("layout-") and finding.line is not None) and any(
        (one.severity, one.part, one.line) == ("error", finding.part, finding.line) for one in found
    )
