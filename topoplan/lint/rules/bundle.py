"""Rules on directories written by `topoplan generate`: what was changed since, and whether the files still agree."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import topoplan
from topoplan.bundle.bundle import PLAN_SCHEMA
from topoplan.bundle.node_script import script_name
from topoplan.bundle.plan_file import RecordedPlan, plan_document, read_plan_file, written_again
from topoplan.bundle.whole import edited_scripts, is_script, mixture
from topoplan.bundle.write import bundle_changes, listed
from topoplan.errors import InputError, SpecError, TopoplanError
from topoplan.reading.finding import Finding, Severity
from topoplan.reading.parts import Part, PartKind
from topoplan.reading.rules import read_rules
from topoplan.reading.setup import Setup
from topoplan.specs.cluster import MOST_GPUS
from topoplan.specs.source import parse_source, read_text
from topoplan.trainers.registry import written_by
from topoplan.trainers.trainer import DATASET_TO_FILL_IN, MAIN_FILE, PLAN_FILE

RULES = read_rules(__package__, "bundle.toml")

_LINE = re.compile(r":(\d+)\Z")
_KINDS: Mapping[str, PartKind] = {".yaml": "yaml", ".sh": "shell"}


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults of each bundle."""
    for directory in setup.bundles:
        plan, unread = _plan(directory)
        recorded, fresh = _recorded(directory)
        # Another version of topoplan writes other scripts.
        is_ours = plan is not None and plan.get("version") == topoplan.__version__
        yield from _changed_files(directory, fresh if is_ours else {}, () if unread is None else (PLAN_FILE,))
        if unread is not None:
            line = _LINE.search(unread.where)
            yield _finding(directory, PLAN_FILE, "plan", int(line[1]) if line else None, what=unread.what)
        if plan is None:
            continue
        schema = str(plan.get("schema", ""))
        if schema != PLAN_SCHEMA:
            rule = "schema.newer" if _number(schema) > _number(PLAN_SCHEMA) else "schema"
            said = {"schema": schema or "not given", "known": PLAN_SCHEMA, "ours": topoplan.__version__}
            yield _finding(directory, PLAN_FILE, rule, None, **said)
            continue
        if not is_ours:
            yield _finding(directory, PLAN_FILE, "version", version=plan.get("version"), ours=topoplan.__version__)
        yield from _mixture(directory, fresh)
        yield from _to_fill_in(directory)
        yield from _missing_scripts(directory, plan)
        yield from _disagreements(directory, recorded, fresh)


def _recorded(directory: Path) -> tuple[RecordedPlan | None, Mapping[str, str]]:
    """Return the plan and the files that this version writes for it; nothing if unreadable (reported elsewhere)."""
    try:
        recorded = read_plan_file(directory)
        return recorded, written_again(recorded)
    except TopoplanError:
        return None, {}


def _contents(directory: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of the files that exist and can be read."""
    found = {}
    for name in names:
        with contextlib.suppress(OSError):
            found[name] = (directory / name).read_bytes()
    return found


def _changed_files(directory: Path, again: Mapping[str, str], told: Iterable[str]) -> Iterator[Finding]:
    """Report files that are missing or were edited, except those of which another finding tells more."""
    edited, missing = ([name for name in names if name not in told] for names in bundle_changes(directory))
    for name in missing:
        level: Severity = "error" if name == MAIN_FILE or name.endswith(".sh") else "warning"
        yield _finding(directory, name, "missing-file", level=level)
    for name in edited:
        if not is_script(again.get(name, "")):
            yield _finding(directory, name, "edited-file")
    for script in edited_scripts(_contents(directory, again), again):
        yield _finding(directory, script.name, "edited-script", script.line, summary=script.summary)


def _mixture(directory: Path, fresh: Mapping[str, str]) -> Iterator[Finding]:
    """Report files of two bundles in one directory, left by an interrupted copy or by an older `generate`."""
    if not fresh:
        return
    texts = {name: text.encode() for name, text in fresh.items()}
    if found := mixture(directory, _contents(directory, texts), texts, listed(directory)):
        what, remedy = found
        yield _finding(directory, PLAN_FILE, "mixture", what=what, remedy=remedy)


def _to_fill_in(directory: Path) -> Iterator[Finding]:
    """Report the dataset key that `generate` leaves to be filled in."""
    key = re.compile(rf"[ -]*([a-z_]+): *{DATASET_TO_FILL_IN}\b")
    text = _contents(directory, [MAIN_FILE]).get(MAIN_FILE, b"").decode(errors="replace")
    for number, line in enumerate(text.split("\n"), 1):
        if match := key.match(line):
            yield _finding(directory, MAIN_FILE, "to-fill-in", number, key=match[1])


def _missing_scripts(directory: Path, plan: Mapping[str, Any]) -> Iterator[Finding]:
    """Report nodes whose script is missing and is not listed in the manifest either."""
    _, missing = bundle_changes(directory)
    try:
        nodes = int(plan["inputs"]["cluster"]["nodes"])
    except (LookupError, TypeError, ValueError):
        return
    for node in range(min(nodes, MOST_GPUS)):
        name = script_name(node)
        if name not in missing and not (directory / name).is_file():
            yield _finding(directory, name, "missing-file.node", nodes=nodes)


def _disagreements(directory: Path, recorded: RecordedPlan | None, fresh: Mapping[str, str]) -> Iterator[Finding]:
    """Report keys of train.yaml that differ from the plan, whose memory and time were predicted."""
    if recorded is None or MAIN_FILE not in fresh:
        return
    backend = recorded.plan.layout.backend
    codec = written_by(backend, recorded.trainer)[1].codec
    if codec is None:
        return
    try:
        source = parse_source(read_text(directory / MAIN_FILE), name=MAIN_FILE)
    except InputError:
        return  # reported by another rule
    planned, defaults = parse_source(fresh[MAIN_FILE], name=MAIN_FILE).data, codec.defaults()
    for key in (*codec.rows, codec.length):
        now, wanted = (_meant(data.get(key), key, defaults) for data in (source.data, planned))
        if now != wanted:
            said = {"key": key, "now": _yaml(now), "wanted": _yaml(wanted)}
            yield _finding(directory, MAIN_FILE, "other-plan", source.lines.get((key,)), **said)


def _meant(value: Any, key: str, defaults: Mapping[str, Any]) -> Any:
    """Return the value that the trainer uses; a parallel size that is left out is 1."""
    value = defaults.get(key) if value is None else value
    return 1 if value is None and key.endswith("_size") else value


def _number(schema: str) -> int:
    match = re.fullmatch(r"topoplan\.plan/(\d{1,6})", schema)
    return int(match[1]) if match else 0


def _plan(directory: Path) -> tuple[Mapping[str, Any] | None, SpecError | None]:
    """Return the document of the plan, or why it cannot be read."""
    try:
        return plan_document(directory).data, None
    except SpecError as error:
        return None, error


def _finding(directory: Path, name: str, rule: str, line: int | None = None, **said: Any) -> Finding:
    path = directory / name
    try:
        text = read_text(path)
    except SpecError:
        text = ""
    part = Part(kind=_KINDS.get(path.suffix, "json"), name=str(path), text=text)
    return RULES[f"bundle-{rule}"].found(part, line, **said)


def _yaml(value: Any) -> str:
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)
