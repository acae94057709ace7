"""The output of `topoplan generate`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from topoplan.planner.plan import Plan
from topoplan.planner.view import plan_to_dict
from topoplan.report.tables import paragraph
from topoplan.report.text import gib, interval, significant, spec_line
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import trainer_named


def bundle_to_dict(
    plan: Plan,
    trainer: str,
    directory: Path,
    files: Sequence[Path],
    warnings: Sequence[str],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the plan, the trainer and the files written; `notes` are about a plan that was read back."""
    return {
        "schema": "topoplan.generate/1",
        "trainer": trainer,
        "directory": str(directory),
        "files": [str(file) for file in files],
        "warnings": list(warnings),
        "plan": plan_to_dict(plan),
        "notes": list(notes),
    }


def print_bundle(
    console: Console,
    spec: Spec,
    plan: Plan,
    trainer: str,
    directory: Path,
    files: Sequence[Path],
    warnings: Sequence[str],
    notes: Sequence[str] = (),
) -> None:
    """Print the plan, warnings about it and the trainer, the files, and the next command."""
    memory, time = plan.memory, plan.time
    paragraph(console, spec_line(spec), style="bold")
    paragraph(
        console,
        f"Plan {plan.id} for {trainer_named(trainer).title}:"
        f" {gib(memory.device_bytes)} of {gib(memory.capacity_bytes)} GiB,"
        f" {significant(time.step_s)} s per step ({interval(*time.band_s)}),"
        f" {plan.tokens_per_s_per_gpu:,.0f} tokens/s per GPU.",
    )
    for warning in (*notes, *warnings):
        paragraph(console, f"Warning: {warning}")
    console.print(f"\nWrote {len(files)} files:")
    for file in files:
        console.print(f"  {file}", soft_wrap=True)
    console.print("\nNext:")
    for command in (f"less {shlex.quote(str(directory / 'README.md'))}", *starts(spec, files)):
        console.print(f"  {command}", soft_wrap=True)


def starts(spec: Spec, files: Sequence[Path]) -> list[str]:
    """Return the shell command that starts a bundle: its job script, `launch` where it names hosts, or by hand."""
    if job_scripts := [file for file in files if file.match("*.sbatch")]:
        return [f"sbatch {shlex.quote(str(job_scripts[0]))}"]
    if spec.cluster.hosts and (listed := [file for file in files if file.name == "hosts.json"]):
        return [f"topoplan launch {shlex.quote(str(listed[0].parent))}"]
    # Without hosts in the spec, the scripts need the address of the first node.
    unknown = spec.cluster.nodes > 1 and not spec.cluster.hosts
    address = "MASTER_ADDR=10.0.0.1 " if unknown else ""
    note = "on node 0, with its address" if unknown else "on node 0"
    scripts = sorted(file for file in files if file.match("node-*.sh"))[:1]
    return [f"{address}bash {shlex.quote(str(script))}   # {note}" for script in scripts]
