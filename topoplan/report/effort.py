"""The duration of a whole job, as JSON and in words."""

from __future__ import annotations

from typing import Any

from topoplan.planner.effort import Effort
from topoplan.planner.view import rounded
from topoplan.report.text import duration
from topoplan.specs.spec import Spec
from topoplan.units import format_byte_rate


def effort_to_dict(effort: Effort | None) -> dict[str, Any]:
    """Return the `job_time` entry of a plan's JSON, or nothing if the duration is unknown."""
    if effort is None:
        return {}
    return {
        "job_time": {
            "steps": effort.steps,
            "hours": rounded(effort.hours),
            "gpu_hours": rounded(effort.gpu_hours),
            "training_s": rounded(effort.training_s),
            **{key: rounded(seconds) for key, seconds in effort.pauses._asdict().items()},
        }
    }


def pauses_words(spec: Spec, effort: Effort) -> str:
    """Describe the hours that are not training, and the storage rate assumed for them."""
    pauses = effort.pauses
    words = [
        *([f"{duration(pauses.checkpoints_s)} of checkpoints"] if pauses.checkpoints_s else []),
        *([f"{duration(pauses.evaluation_s)} of evaluation"] if pauses.evaluation_s else []),
    ]
    rate = f"(storage_bandwidth {format_byte_rate(spec.cluster.storage_bytes_per_s)} per node)"
    return f"{duration(pauses.start_up_s)} of start-up {''.join(f'and {word} ' for word in words)}{rate}"
