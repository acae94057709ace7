"""The findings of `topoplan check`: as text, as JSON (`topoplan.check/1`), and next to the code (GitHub, SARIF 2.1.0).

Sources: docs.github.com, Workflow commands for GitHub Actions; OASIS, Static Analysis Results Interchange Format
(SARIF) Version 2.1.0, sections 3.19, 3.27 and 3.49.
"""

from __future__ import annotations

import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import PurePath
from typing import Any

from rich.console import Console
from rich.text import Text

import topoplan
from topoplan.lint.check import SEVERITIES, Checked, Fixed
from topoplan.lint.prediction import Change, Prediction
from topoplan.lint.prediction_findings import towards_best
from topoplan.lint.rules.registry import all_rules, further_rules
from topoplan.planner.oddities import machine_note
from topoplan.planner.plan import Plan
from topoplan.planner.rank import tags_of
from topoplan.planner.view import cluster_to_dict, plan_to_dict, rounded, spec_to_dict
from topoplan.reading.finding import Finding, Severity
from topoplan.reading.parts import Part
from topoplan.reading.rules import Rule
from topoplan.report.tables import bullets, hanging, paragraph, table_of
from topoplan.report.text import band, counted, gib, layout_label, significant, spec_line
from topoplan.specs.spec import Spec
from topoplan.units import GIB, named, quote

SCHEMA = "topoplan.check/1"

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_INDENT = " " * 4


def checked_to_dict(checked: Checked, fixed: Fixed | None = None) -> dict[str, Any]:
    """Return all findings and predictions; `fixed` adds the corrected copies and the findings that remain."""
    view: dict[str, Any] = {
        "schema": SCHEMA,
        "files": list(dict.fromkeys(part.name for part in checked.setup.parts)),
        "cluster": cluster_to_dict(checked.cluster) if checked.cluster else None,
        "counts": {severity: checked.count(severity) for severity in SEVERITIES},
        "findings": [_finding_to_dict(finding) for finding in checked.findings],
        "ignored": checked.ignored,
        "predictions": [_prediction_to_dict(one) for one in checked.predictions],
        "unread_programs": list(checked.setup.unread_programs),
        "not_understood": [{"file": part.name, "line": part.file_line(1)} for part in checked.not_understood],
    }
    if fixed is not None:
        view["fixed"] = [
            {
                "file": str(copy.path),
                "from": [{"file": one.before.name, "line": one.before.file_line(1)} for one in copy.corrections],
                "names": list(copy.names),
                "rules": [finding.rule for one in copy.corrections for finding in one.findings],
            }
            for copy in fixed.copies
        ]
        view["left"] = [_finding_to_dict(finding) for finding in fixed.after.findings]
    return view


def _finding_to_dict(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "docs": f"docs/checks.md#{finding.rule}",
        "severity": finding.severity,
        "file": finding.part.name,
        "line": None if finding.line is None else finding.part.file_line(finding.line),
        "piece": finding.part.label or None,
        "what": finding.what,
        "why": finding.why or None,
        "remedy": finding.remedy or None,
        "fixable": bool(finding.edits),
    }


def _prediction_to_dict(prediction: Prediction) -> dict[str, Any]:
    part, translation = prediction.configuration.part, prediction.translation
    view: dict[str, Any] = {
        "file": part.name,
        "line": part.file_line(1),
        "trainer": prediction.configuration.trainer,
        **(spec_to_dict(translation.spec) if translation else {}),
        "plan": plan_to_dict(prediction.plan) if prediction.plan else None,
        "best": plan_to_dict(prediction.best) if prediction.best else None,
        "best_of_backend": plan_to_dict(prediction.best_of_backend) if prediction.best_of_backend else None,
        "speed_of_best": rounded(prediction.speedup) if prediction.speedup else None,
        "tags_of_best": list(tags_of(prediction.best)) if prediction.best else [],
        "caveats_of_best": list(prediction.best.caveats) if prediction.best else [],
        "changes": [{"key": one.key, "now": one.now, "best": one.best} for one in prediction.changes],
        "assumptions": list(translation.assumptions) if translation else [],
        "reason": prediction.reason or None,
        "no_best": prediction.no_best or None,
        "would_fit": [{"change": way.change, "plan": plan_to_dict(way.plan)} for way in prediction.fixes],
    }
    return view


# Text ----------------------------------------------------------------------------------------------------------------


def print_checked(console: Console, checked: Checked, *, correctable: int = 0) -> None:
    """Print findings by file, their counts and how many `--fix` would correct, then the predictions."""
    by_file = sorted(checked.findings, key=lambda one: _file_order(checked, one))
    for number, (_, group) in enumerate(groupby(by_file, key=lambda one: one.part.name)):
        if number:
            console.print()
        # Commands on the same line of a copied web page repeat their findings.
        for finding, times in Counter(map(_without_edits, group)).items():
            _print_finding(console, finding, times)
    if checked.findings:
        console.print()
    if checked.not_understood:
        places = ", ".join(part.place(None) for part in checked.not_understood)
        paragraph(console, f"No keys of a known trainer: {places}.", style="dim")
    if checked.setup.unread_programs:
        programs = named(map(quote, checked.setup.unread_programs))
        paragraph(
            console, f"Only the launch of {programs} was looked at: the arguments are no known trainer's.", style="dim"
        )
    offer = f" --fix corrects {correctable}." if correctable else ""
    paragraph(console, _closing_line(checked) + offer, style="bold")
    for _, same in groupby(checked.predictions, key=_what_is_predicted):
        _print_prediction(console, list(same), checked.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """A better plan that files can be written for."""

    file: str
    """The file of its job."""
    spec: Spec
    """What the file's configuration runs, on the GPUs that it uses."""
    plan: Plan


def better_plan(checked: Checked) -> Better | None:
    """Return a better plan of a file's job that files can be written for; None if there is not just one such file.
    That is the best plan, or the best of the own backend if the file's trainer has the job run by no other."""
    if len(checked.predictions) != 1 or checked.setup.bundles:
        return None
    (found,) = checked.predictions
    part, best, translation = found.configuration.part, found.best, found.translation
    if best is None or translation is None:
        return None
    pinned = translation.spec.job.pin.get("backend", best.layout.backend)
    best = best if pinned == best.layout.backend else found.best_of_backend
    if best is None or part.label or part.file or (found.plan is not None and found.plan.id == best.id):
        return None
    return Better(file=part.name, spec=translation.spec, plan=best)


def _file_order(checked: Checked, finding: Finding) -> int:
    names = [part.name for part in checked.setup.parts]
    return names.index(finding.part.name) if finding.part.name in names else len(names)


def _without_edits(finding: Finding) -> Finding:
    """Return the finding as it is printed: with the line of the file instead of the part, and no edits."""
    part, line = finding.part, finding.line
    at = part.lines[0] if line is None and part.lines else line if line is None else part.file_line(line)
    return replace(finding, part=Part(kind=part.kind, name=part.name, text=""), line=at, edits=())


def _print_finding(console: Console, finding: Finding, times: int) -> None:
    head = Text()
    head.append(f"{finding.place}  ", style="bold")
    head.append(finding.severity, style=_STYLES[finding.severity])
    head.append(f"  {finding.what}")
    head.append(f"  [{finding.rule}]{f' {times} times' if times > 1 else ''}", style="dim")
    hanging(console, head, "", _INDENT)
    if finding.why:
        hanging(console, Text(finding.why), _INDENT, _INDENT)
    if finding.remedy:
        remedy = Text("remedy: ", style="green")
        remedy.append(finding.remedy)
        hanging(console, remedy, _INDENT, _INDENT + " " * len("remedy: "))


def _closing_line(checked: Checked) -> str:
    parts = (*checked.setup.parts, *checked.setup.logs)
    if not parts:
        return "No configuration and no command was found."
    ignored = f" {counted(checked.ignored, 'finding')} ignored." if checked.ignored else ""
    if not checked.findings:
        files = len(dict.fromkeys(part.name for part in parts))
        return f"No findings in {counted(files, 'file')}.{ignored}"
    counts = ", ".join(counted(checked.count(one), one) for one in SEVERITIES if checked.count(one))
    return f"{counts}.{ignored}"


def _what_is_predicted(prediction: Prediction) -> Any:
    """Return a key that is equal for identical predictions, as of an article that shows a configuration twice."""
    translation = prediction.translation
    return id(prediction) if translation is None else (translation.layout, translation.spec.model, translation.spec.job)


def _print_prediction(console: Console, same: Sequence[Prediction], told: Sequence[Finding]) -> None:
    """Print one prediction for the places that it is `same` for; what the findings have `told` is not said again."""
    prediction = same[0]
    translation, plan, best = prediction.translation, prediction.plan, prediction.best
    place = ", ".join(one.configuration.part.place(None) for one in same)
    if prediction.is_reported:
        return
    console.print()
    if translation is None:
        paragraph(console, f"{place}: not predicted: {prediction.reason}.", style="dim")
        return
    paragraph(console, f"{place} on {spec_line(translation.spec)}", style="bold")
    if plan is None:
        paragraph(console, f"Not predicted: {prediction.reason}.")
    own = prediction.best_of_backend if prediction.best_of_backend not in (None, best, plan) else None
    # Findings tell the known problems of the file itself.
    itself = None if plan is None else replace(plan, caveats=())
    named = (("this file", itself), (f"best with {own.layout.backend}" if own else "", own), ("best plan", best))
    columns = [(name, one) for name, one in named if one is not None]
    if columns:
        console.print(_figures(console, columns))
    if plan is None and best is not None and translation.bundle is not None:
        paragraph(console, f"To the best plan: {towards_best(prediction)}.")
    elif plan is None and prediction.changes:
        with_own = f" with {own.layout.backend}" if own is not None else ""
        paragraph(console, f"The best plan{with_own} has {_changes(prediction.changes)}.")
    notes = [machine_note(translation.spec.cluster), *translation.assumptions, *(plan.warnings if plan else ())]
    caveats = dict.fromkeys(caveat for one in (own, best) if one is not None for caveat in prediction.new_caveats(one))
    notes += [one for one in caveats if not any(one in f"{each.why} {each.remedy}" for each in told)]
    if said := list(filter(None, notes)):
        bullets(console, said)


def _figures(console: Console, columns: Sequence[tuple[str, Plan]]) -> Any:
    ascii_only = console.options.ascii_only
    table = table_of("", *(name for name, _ in columns))
    rows: tuple[tuple[str, Callable[[Plan], str]], ...] = (
        ("layout", lambda plan: layout_label(plan.layout)),
        (
            "memory, GiB",
            lambda plan: (
                f"{gib(plan.memory.device_bytes)} of {gib(plan.memory.capacity_bytes)}"
                f"{'' if plan.memory.excess_bytes <= 0.0 else ': over'}"
            ),
        ),
        ("host memory, GiB", _host),
        ("step, s", lambda plan: f"{significant(plan.time.step_s)} {band(plan.time, ascii_only=ascii_only)}"),
        ("tokens/s per GPU", lambda plan: f"{plan.tokens_per_s_per_gpu:,.0f}"),
        ("MFU, %", lambda plan: f"{100 * plan.mfu:.1f}"),
        ("risk", lambda plan: ", ".join(tags_of(plan))),
    )
    for name, text in rows:
        cells = [text(plan) for _, plan in columns]
        if any(cell not in ("", "-") for cell in cells):
            table.add_row(name, *cells)
    return table


def _host(plan: Plan) -> str:
    needed, capacity = plan.memory.host_bytes, plan.memory.host_capacity_bytes
    if not needed:
        return "-"
    if capacity is None:
        return f"{needed / GIB:,.0f}"
    return f"{needed / GIB:,.0f} of {capacity / GIB:,.0f}{': over' if needed > capacity else ''}"


def _changes(changes: Sequence[Change]) -> str:
    return ", ".join(f"{one.key} {one.best}" if one.best is not None else f"no {one.key}" for one in changes)


def print_fixed(console: Console, checked: Checked, fixed: Fixed) -> None:
    """Print the copies written, further corrections in them, and the findings left to do."""
    console.print()
    if not fixed.copies:
        paragraph(console, "Nothing can be corrected automatically: no copy was written.")
        return
    told = {(one.rule, one.what) for one in checked.findings}
    for copy in fixed.copies:
        corrected = counted(sum(len(one.findings) for one in copy.corrections), "correction")
        places = ", ".join(one.before.place(None) for one in copy.corrections)
        held = (f"{corrected} to {places}" if places else "", f"names {', '.join(copy.names)}" if copy.names else "")
        paragraph(console, f"Wrote {copy.path}: {', and '.join(filter(None, held))}.")
        new = [one for each in copy.corrections for one in each.findings if (one.rule, one.what) not in told]
        bullets(console, (f"then found and corrected: {one.what}  [{one.rule}]" for one in new))
    bullets(console, _still_named(fixed))
    left = [one for one in fixed.after.findings if one.severity != "note"]
    if left:
        paragraph(console, "Left to correct by hand:")
    bullets(console, (f"{_place_in_copy(one, fixed)}: {one.severity}: {one.what}" for one in left))


def _still_named(fixed: Fixed) -> Iterator[str]:
    """Yield a sentence for each file that names a corrected one in words that could not be replaced."""
    for part, file in fixed.after.setup.references:
        copy = next((copy for copy in fixed.copies if file in copy.parts), None)
        if copy and not any(part in one.parts and copy.path.name in one.names for one in fixed.copies):
            yield f"{part.place(None)} still takes {file.name}: name {copy.path.name} there"


def _place_in_copy(finding: Finding, fixed: Fixed) -> str:
    copy = next((copy for copy in fixed.copies if finding.part in copy.parts), None)
    if copy is None:
        return finding.place
    return str(copy.path) if finding.line is None else f"{copy.path}:{copy.line(finding.part, finding.line)}"


SARIF = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"
_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}
_DATA = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY = {**_DATA, ":": "%3A", ",": "%2C"}


def github_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a GitHub workflow command for each finding."""
    for one in findings:
        line = "" if one.line is None else f",line={one.part.file_line(one.line)}"
        place = f"file={_escaped(one.part.name, _PROPERTY)}{line},title={_escaped(one.rule, _PROPERTY)}"
        yield f"::{_COMMANDS[one.severity]} {place}::{_escaped(message(one), _DATA)}"


def _escaped(text: str, marks: dict[str, str]) -> str:
    return "".join(marks.get(character, character) for character in text)


def message(finding: Finding) -> str:
    """Return what is wrong, why it matters and what to do, as one text."""
    remedy = f"remedy: {finding.remedy}" if finding.remedy else ""
    return "\n".join(filter(None, (finding.what, finding.why, remedy)))


def sarif(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return a SARIF log with one run and the rules of its findings."""
    told = sorted({one.rule for one in findings})
    every = sorted((*all_rules(), *further_rules()), key=lambda rule: rule.id)
    texts = {rule_id: list(rules) for rule_id, rules in groupby(every, key=lambda rule: rule.id)}
    driver = {
        "name": "topoplan",
        "version": topoplan.__version__,
        "rules": [_descriptor(rule_id, texts.get(rule_id, [])) for rule_id in told],
    }
    results = [_result(one, told.index(one.rule)) for one in findings]
    return {
        "$schema": SARIF,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }


def _descriptor(rule_id: str, rules: Sequence[Rule]) -> dict[str, Any]:
    help_text = "\n".join(dict.fromkeys(f"{rule.level}: {rule.what}. {rule.remedy}".strip() for rule in rules))
    described = {"fullDescription": {"text": rules[0].what}, "help": {"text": help_text}} if rules else {}
    return {"id": rule_id, **described}


def _result(finding: Finding, index: int) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": urllib.parse.quote(PurePath(finding.part.name).as_posix())}}
    if finding.line is not None:
        place["region"] = {"startLine": finding.part.file_line(finding.line)}
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": finding.severity,
        "message": {"text": message(finding)},
        "locations": [{"physicalLocation": place}],
    }
