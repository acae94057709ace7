"""A plan explained, as JSON (`topoplan.explain/2`) and as text: its time, its memory, or both."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from topoplan.engines.account import MemoryAccount, TimeAccount
from topoplan.engines.registry import engine_of
from topoplan.planner.lengths import data_notes
from topoplan.planner.plan import Plan
from topoplan.planner.view import plan_to_dict, spec_to_dict
from topoplan.report.memory import memory_to_dict, print_memory
from topoplan.report.tables import bullets, paragraph
from topoplan.report.text import band, gib, layout_label, significant, spec_line
from topoplan.report.time import print_time, time_to_dict
from topoplan.specs.gpu_profile import notes_on_bands
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

SCHEMA = "topoplan.explain/2"


def explanation_to_dict(
    spec: Spec, plan: Plan, *, time: TimeAccount | None, memory: MemoryAccount | None
) -> dict[str, Any]:
    """Return the plan with the terms of its time and its memory; None leaves one out."""
    view: dict[str, Any] = {"schema": SCHEMA, **spec_to_dict(spec), "plan": plan_to_dict(plan)}
    if notes := data_notes(spec, plan):
        view["data_notes"] = list(notes)
    view["notes"] = list(_notes(spec, plan))
    if time is not None:
        view["time"] = time_to_dict(plan, time)
    if memory is not None:
        view["memory"] = memory_to_dict(plan, memory)
    return view


def _notes(spec: Spec, plan: Plan) -> tuple[str, ...]:
    """Return notes on the constants behind the plan: a user's own file, and borrowed bands."""
    case = case_of(spec, plan.layout.backend)
    return notes_on_bands(case.profile, case.cluster.gpu.name, engine_of(plan.layout.backend).bands(case))


def print_explanation(
    console: Console, spec: Spec, plan: Plan, *, time: TimeAccount | None, memory: MemoryAccount | None
) -> None:
    """Print the plan, then its time by part, then its memory by part; None leaves one out."""
    paragraph(console, f"{spec_line(spec)}.", style="bold")
    verdict = "fits" if plan.fits else "does not fit"
    used = plan.memory
    width = band(plan.time, ascii_only=console.options.ascii_only)
    paragraph(
        console,
        f"Plan {layout_label(plan.layout)} {verdict}: {gib(used.device_bytes)} GiB of {gib(used.capacity_bytes)},"
        f" margin {gib(used.margin_bytes)}. A step takes {significant(plan.time.step_s)} s {width},"
        f" {plan.tokens_per_s_per_gpu:,.0f} tokens/s per GPU.",
    )
    for note in dict.fromkeys((*_notes(spec, plan), *plan.warnings, *plan.caveats)):
        paragraph(console, f"Note: {note}.")
    bullets(console, data_notes(spec, plan))
    if time is not None:
        print_time(console, plan, time)
    if memory is not None:
        print_memory(console, plan, memory)
