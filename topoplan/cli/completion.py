"""Completions that a shell offers for options and verbs. typer removes those that do not match the prefix."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from topoplan.errors import TopoplanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from topoplan.planner.plan import Plan

PATIENCE_S = 0.8
"""CPU time limit of the search whose plans are offered; if it takes longer, none are."""


def gpus() -> list[str]:
    """Return the GPU names of the catalog."""
    from topoplan.catalog import gpu_names

    return list(gpu_names())


def models() -> list[str]:
    """Return the model names of the catalog."""
    from topoplan.catalog import model_names

    return list(model_names())


def model_lists(incomplete: str) -> list[str]:
    """Complete the last model of a comma-separated list."""
    return _one_more(incomplete, models())


def backends(incomplete: str) -> list[str]:
    """Complete the last backend of a comma-separated list."""
    from topoplan.trainers.registry import TRAINERS

    return _one_more(incomplete, ["all", *dict.fromkeys(name for trainer in TRAINERS for name in trainer.backends)])


def trainers() -> list[str]:
    """Return the trainers that files can be written for."""
    from topoplan.trainers.registry import TRAINERS

    return [trainer.name for trainer in TRAINERS]


def finetunings() -> list[str]:
    """Return the kinds of fine-tuning."""
    from topoplan.specs.job import FINETUNINGS

    return list(FINETUNINGS)


def checks() -> list[str]:
    """Return the checks that `preflight` can skip."""
    from topoplan.hosts.preflight.checks import NAMES

    return list(NAMES)


def runs() -> list[str]:
    """Return the ids of the runs started from this machine, the latest first."""
    from topoplan.run import record

    return [run.run_id for run in reversed(record.runs())]


def bundles(incomplete: str) -> list[str]:
    """Return the directories of bundles, up to two levels below the path typed so far."""
    from topoplan.trainers.trainer import PLAN_FILE

    head, slash, _ = incomplete.rpartition("/")
    base = Path(head + slash)
    found = sorted(
        path.parent.relative_to(base) for depth in ("*", "*/*") for path in base.glob(f"{depth}/{PLAN_FILE}")
    )
    return [f"{head}{slash}{path}" for path in found]


def plans(ctx: typer.Context) -> list[tuple[str, str]]:
    """Return the ids of the best plans of the spec typed before, with step time and memory."""
    return [(plan.id, _figures(plan)) for plan in _plans(ctx)[:_MOST]]


_MOST = 30


def _figures(plan: Plan) -> str:
    from topoplan.report.text import gib, significant

    return f"{significant(plan.time.step_s)} s, {gib(plan.memory.device_bytes)} GiB"


def _plans(ctx: typer.Context) -> Sequence[Plan]:
    """Return the plans of the spec; none if the search takes too long or the spec cannot be read."""
    from topoplan.cli.options import SpecOptions
    from topoplan.cli.search import SearchCache, searches_directory
    from topoplan.planner.search import rank

    said = {field.name: ctx.params.get(field.name) for field in fields(SpecOptions)}
    # While an option lacks its value, as here, the words before it are still unparsed.
    spec = ctx.params.get("spec") or next(iter(ctx.args), None)
    try:
        read = SpecOptions(**said).read(spec)
        if known := SearchCache(searches_directory()).find(read):
            return known.plans
        until = time.process_time() + PATIENCE_S
        found = rank(read, progress=lambda *_: time.process_time() > until)
    except TopoplanError:
        return []
    return found.plans if found.searched == 1.0 else []


def mend_zsh() -> None:
    """Make zsh answer its first TAB: typer's completion script only loads itself then, and beeps."""
    file = Path.home() / ".zfunc" / "_topoplan"
    if file.is_file() and "loadautofunc" not in (text := file.read_text(encoding="utf-8")):
        now = 'if [[ $zsh_eval_context[-1] == loadautofunc ]]; then\n  _topoplan_completion "$@"\nfi\n'
        file.write_text(f"{text}\n{now}", encoding="utf-8")


def _one_more(incomplete: str, names: list[str]) -> list[str]:
    head, comma, _ = incomplete.rpartition(",")
    return [f"{head}{comma}{name}" for name in names]
