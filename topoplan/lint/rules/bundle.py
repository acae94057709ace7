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
from topoplan.bundle.plan_file import read_plan_file, written_again
from topoplan.bundle.whole import mixture
from topoplan.bundle.write import bundle_changes, listed
from topoplan.errors import InputError, SpecError, TopoplanError
from topoplan.layout.forms import recompute_from_value
from topoplan.layout.layout import SHARDED_BACKENDS
from topoplan.reading.finding import Finding, Severity
from topoplan.reading.parts import Part, PartKind
from topoplan.reading.setup import Setup
from topoplan.specs.cluster import MOST_GPUS
from topoplan.specs.source import Source, parse_source, read_text
from topoplan.trainers.llamafactory.key_list import known_keys
from topoplan.trainers.torchrun import script_name
from topoplan.trainers.writers import default_trainer

_KINDS: Mapping[str, PartKind] = {".yaml": "yaml", ".sh": "shell"}
_PLAN, _TRAINER = "plan.json", "train.yaml"


def findings(setup: Setup) -> Iterator[Finding]:
    """What is wrong with each bundle."""
    for directory in setup.bundles:
        plan = _plan(directory)
        fresh = _written_again(directory)
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
        yield from _disagreements(directory, plan)


def _written_again(directory: Path) -> Mapping[str, str]:
    """What this version writes for the plan; nothing where that cannot be read, which is told elsewhere."""
    try:
        return written_again(read_plan_file(directory))
    except TopoplanError:
        return {}


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


def _disagreements(directory: Path, plan: Mapping[str, Any]) -> Iterator[Finding]:
    """Keys of train.yaml that differ from the plan, for which memory and time were predicted."""
    try:
        source = parse_source(read_text(directory / _TRAINER), name=_TRAINER)
        planned = _planned_keys(plan)
    except (InputError, LookupError, TypeError, ValueError):
        return  # a train.yaml that is missing or cannot be read is told elsewhere
    for key, wanted in planned.items():
        now = source.data.get(key)
        now = known_keys()[key].default if now is None else now
        if now is None and key.endswith("_size"):
            now = 1  # a degree that is left out
        if now != wanted:
            yield Finding(
                rule="bundle-other-plan",
                severity="warning",
                part=_part(directory, _TRAINER),
                line=_line(source, key),
                what=f"{key} is {_yaml(now)}, and plan.json was predicted for {_yaml(wanted)}",
                why="its memory, time and README no longer hold",
                remedy=f"set {key}: {_yaml(wanted)}, or pin it in the spec and generate again",
            )


def _planned_keys(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Trainer keys that the plan decides, with the values that `generate` wrote for them."""
    layout, job = plan["layout"], plan["inputs"]["job"]
    recompute = recompute_from_value(layout["recompute"])
    if plan.get("trainer", default_trainer(layout["backend"])) != "llamafactory":
        return {}  # keys of another trainer
    if layout["backend"] in SHARDED_BACKENDS:
        return {
            "per_device_train_batch_size": layout["micro_batch_size"],
            "gradient_accumulation_steps": layout["gradient_accumulation_steps"],
            "disable_gradient_checkpointing": recompute.granularity == "none",
            "enable_liger_kernel": layout["fused_linear_cross_entropy"],
            "cutoff_len": job["seq_len"],
        }
    return {
        "tensor_model_parallel_size": layout["tp"],
        "pipeline_model_parallel_size": layout["pp"],
        "context_parallel_size": layout["cp"],
        "per_device_train_batch_size": layout["micro_batch_size"],
        "gradient_accumulation_steps": layout["gradient_accumulation_steps"],
        "sequence_parallel": layout["sequence_parallel"],
        "use_distributed_optimizer": layout["distributed_optimizer"],
        "overlap_grad_reduce": layout["overlap_grad_reduce"],
        "overlap_param_gather": layout["overlap_param_gather"],
        "pipeline_model_parallel_layout": layout["pipeline_layout"],
        "virtual_pipeline_model_parallel_size": layout["vpp"],
        "expert_model_parallel_size": layout["ep"],
        "optimizer_offload_fraction": float(layout["optimizer_offload_fraction"]),
        "recompute_granularity": None if recompute.granularity == "none" else recompute.granularity,
        "recompute_modules": ",".join(recompute.modules) or None,
        "cutoff_len": job["seq_len"],
    }


def _line(source: Source, key: str) -> int | None:
    return source.lines.get((key,))


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
