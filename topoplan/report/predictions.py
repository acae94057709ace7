"""Predictions for given layouts, as JSON (`topoplan.predict/1`) and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from topoplan.planner.plan import Plan
from topoplan.planner.view import plan_to_dict
from topoplan.report.tables import bullets, table_of
from topoplan.report.text import band, gib, layout_label, significant

SCHEMA = "topoplan.predict/1"
_MAX_ID = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The result for one run document: a plan, or why there is none."""

    id: Any
    plan: Plan | None = None
    error: str = ""


def prediction_to_dict(prediction: Prediction) -> dict[str, Any]:
    """Return the result as a JSON object."""
    if prediction.plan is None:
        return {"schema": SCHEMA, "id": prediction.id, "error": prediction.error}
    view = plan_to_dict(prediction.plan)
    return {"schema": SCHEMA, **view, "id": prediction.id, "plan_id": view["id"]}


def print_predictions(console: Console, predictions: Sequence[Prediction]) -> None:
    """Print a row for each plan, then the documents without one."""
    done = [(prediction, prediction.plan) for prediction in predictions if prediction.plan is not None]
    if done:
        table = table_of("id", "layout", right=("GiB/GPU", "of", "fits", "step s", "band", "tok/s/GPU", "MFU"))
        table.columns[0].max_width = _MAX_ID
        for prediction, plan in done:
            memory = plan.memory
            table.add_row(
                "-" if prediction.id is None else str(prediction.id),
                layout_label(plan.layout),
                gib(memory.device_bytes),
                gib(memory.capacity_bytes),
                Text("yes") if plan.fits else Text("no", style="red"),
                significant(plan.time.step_s),
                band(plan.time, ascii_only=console.options.ascii_only),
                f"{plan.tokens_per_s_per_gpu:,.0f}",
                f"{100 * plan.mfu:.0f}%",
            )
        console.print(table)
    failed = [prediction for prediction in predictions if prediction.error]
    if failed:
        console.print(f"\n{len(failed)} of {len(predictions)} could not be predicted:")
        bullets(console, (one.error if one.id is None else f"{one.id}: {one.error}" for one in failed))
