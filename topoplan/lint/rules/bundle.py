"""Rules over a directory that `topoplan generate` wrote: what was changed in it since, and whether it still agrees."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import topoplan
from topoplan.bundle.bundle import PLAN_SCHEMA
from topoplan.bundle.bundle_files import edited_scripts, is_script
from topoplan.bundle.node_script import script_name
from topoplan.bundle.plan_file import RecordedPlan, read_plan_file, written_again
from topoplan.bundle.whole import mixture
from topoplan.bundle.write import bundle_changes, listed
from topoplan.errors import InputError, SpecError, TopoplanError
from topoplan.reading.finding import Finding, Severity
from topoplan.reading.parts import Part, PartKind
from topoplan.reading.setup import Setup
from topoplan.specs.cluster import MOST_GPUS
from topoplan.specs.source import parse_source, read_text
from topoplan.trainers.registry import written_by

_KINDS: Mapping[str, PartKind] = {".yaml": "yaml", ".sh": "shell"}
_PLAN, _TRAINER = "plan.json", "train.yaml"


def findings(setup: Setup) -> Iterator[Finding]:
    """What is wrong with each bundle."""
    for directory in setup.bundles:
        plan = _plan(directory)
        recorded, fresh = _recorded(directory)
        # Another version writes other scripts.
        ours = fresh if plan is not None and plan.get("version") == topoplan.__version__ else {}
        yield from _changed_files(directory, ours)
        yield from _edited_scripts(directory, ours)
        if plan is None:
            yield _finding(
                directory, _PLAN, "bundle-plan", "warning", "is missing or cannot be read", "generate the bundle again"
            )
            continue
        schema = str(plan.get("schema", ""))
        if schema != PLAN_SCHEMA:
            newer = _number(schema) > _number(PLAN_SCHEMA)
            yield _finding(
                directory,
                _PLAN,
                "bundle-schema",
                "warning",
                f"schema {schema or 'not given'}, and topoplan {topoplan.__version__} knows {PLAN_SCHEMA}",
                "use the topoplan that wrote it, or a newer one" if newer else "generate the bundle again",
            )
            continue
        yield from _other_version(directory, plan)
        yield from _mixture(directory, fresh)
        yield from _missing_scripts(directory, plan)
        yield from _disagreements(directory, recorded, fresh)


def _recorded(directory: Path) -> tuple[RecordedPlan | None, Mapping[str, str]]:
    """The plan, and what this version writes for it; nothing where that cannot be read, which is told elsewhere."""
    try:
        recorded = read_plan_file(directory)
        return recorded, written_again(recorded)
    except TopoplanError:
        return None, {}


def _contents(directory: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Those of the files that are there and can be read."""
    found = {}
    for name in names:
        with contextlib.suppress(OSError):
            found[name] = (directory / name).read_bytes()
    return found


def _edited_scripts(directory: Path, again: Mapping[str, str]) -> Iterator[Finding]:
    for script in edited_scripts(_contents(directory, again), again):
        yield Finding(
            rule="bundle-edited-script",
            severity="warning",
            part=_part(directory, script.name),
            line=script.line,
            what=f"is not what topoplan writes for this plan: {script.summary}",
            why="it runs on the hosts with your rights; `topoplan launch` starts it as it is",
            remedy="see whether the change is yours; `topoplan generate --from plan.json --force` takes it back",
        )


def _changed_files(directory: Path, again: Mapping[str, str]) -> Iterator[Finding]:
    edited, missing = bundle_changes(directory)
    for name in missing:
        yield _finding(
            directory,
            name,
            "bundle-missing-file",
            "error" if name == _TRAINER or name.endswith(".sh") else "warning",
            "is missing, and topoplan wrote it",
            "generate the bundle again, or copy the file back",
        )
    for name in edited:
        if is_script(again.get(name, "")):
            continue
        yield _finding(
            directory,
            name,
            "bundle-edited-file",
            "note",
            "was edited since topoplan wrote it",
            "copy it to every node; `topoplan generate` will not write over it",
        )


def _other_version(directory: Path, plan: Mapping[str, Any]) -> Iterator[Finding]:
    version = plan.get("version")
    if version != topoplan.__version__:
        yield _finding(
            directory,
            _PLAN,
            "bundle-version",
            "note",
            f"written by topoplan {version}; this is {topoplan.__version__}",
            "generate the bundle again for the scripts and predictions of this version; whether scripts were edited"
            " is known from the list beside them alone",
        )


def _mixture(directory: Path, fresh: Mapping[str, str]) -> Iterator[Finding]:
    """Files of two bundles: of `generate` that was ended in an earlier version, or of a copy that broke off."""
    if not fresh:
        return
    texts = {name: text.encode() for name, text in fresh.items()}
    if found := mixture(directory, _contents(directory, texts), texts, listed(directory)):
        yield _finding(directory, _PLAN, "bundle-mixture", "error", *found)


def _missing_scripts(directory: Path, plan: Mapping[str, Any]) -> Iterator[Finding]:
    """Nodes without a script that the manifest does not know of either."""
    _, missing = bundle_changes(directory)
    try:
        nodes = int(plan["inputs"]["cluster"]["nodes"])
    except (LookupError, TypeError, ValueError):
        return
    for node in range(min(nodes, MOST_GPUS)):
        name = script_name(node)
        if name not in missing and not (directory / name).is_file():
            yield _finding(
                directory,
                name,
                "bundle-missing-file",
                "error",
                f"is missing: the plan has {nodes} nodes",
                "generate the bundle again",
            )


def _disagreements(directory: Path, recorded: RecordedPlan | None, fresh: Mapping[str, str]) -> Iterator[Finding]:
    """Keys of train.yaml that differ from the plan, for which memory and time were predicted."""
    if recorded is None or _TRAINER not in fresh:
        return
    backend = recorded.plan.layout.backend
    codec = written_by(backend, recorded.trainer)[1].codec
    if codec is None:
        return
    try:
        source = parse_source(read_text(directory / _TRAINER), name=_TRAINER)
    except InputError:
        return  # which is told elsewhere
    planned, defaults = parse_source(fresh[_TRAINER], name=_TRAINER).data, codec.defaults()
    for key in (*codec.rows, codec.length):
        now, wanted = (_meant(data.get(key), key, defaults) for data in (source.data, planned))
        if now != wanted:
            yield Finding(
                rule="bundle-other-plan",
                severity="warning",
                part=_part(directory, _TRAINER),
                line=source.lines.get((key,)),
                what=f"{key} is {_yaml(now)}, and plan.json was predicted for {_yaml(wanted)}",
                why="its memory, time and README no longer hold",
                remedy=f"set {key}: {_yaml(wanted)}, or pin it in the spec and generate again",
            )


def _meant(value: Any, key: str, defaults: Mapping[str, Any]) -> Any:
    """The value that the trainer works with; a degree that is left out is 1."""
    value = defaults.get(key) if value is None else value
    return 1 if value is None and key.endswith("_size") else value


def _number(schema: str) -> int:
    match = re.fullmatch(r"topoplan\.plan/(\d{1,6})", schema)
    return int(match[1]) if match else 0


def _plan(directory: Path) -> Mapping[str, Any] | None:
    try:
        document = json.loads(read_text(directory / _PLAN))
    except (SpecError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _part(directory: Path, name: str) -> Part:
    path = directory / name
    try:
        text = read_text(path)
    except SpecError:
        text = ""
    return Part(kind=_KINDS.get(path.suffix, "json"), name=str(path), text=text)


def _finding(directory: Path, name: str, rule: str, severity: Severity, what: str, remedy: str) -> Finding:
    return Finding(rule=rule, severity=severity, part=_part(directory, name), what=what, remedy=remedy)


def _yaml(value: Any) -> str:
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)
