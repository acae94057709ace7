"""Format numbers and names for reading, and sentences that several reports share."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from topoplan.layout.layout import Layout
from topoplan.planner.effort import Effort
from topoplan.planner.plan import Plan, Ranking, Rejection, Time
from topoplan.planner.view import rounded
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import trainer_named
from topoplan.units import GIB, format_byte_rate

# Short names of the parts of a step, for columns. A part that is not listed keeps its own name.
_SHORT_PARTS = {
    "attention": "attn",
    "elementwise": "elem",
    "tp_comm": "tp",
    "cp_comm": "cp",
    "ep_comm": "ep",
    "pp_comm": "pp",
    "dp_comm": "dp",
    "pp_bubble": "bubble",
    "optimizer": "optim",
    "recompute": "recomp",
}


def gib(size_bytes: float) -> str:
    """Format bytes in GiB with one decimal."""
    return f"{size_bytes / GIB:.1f}"


def significant(value: float, digits: int = 3) -> str:
    """Format a positive number to `digits` significant digits without an exponent: 0.0123, 1.23, 12.3, 12,345."""
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".split("e")[1])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def hours(value: float) -> str:
    """Format hours or GPU-hours: 0.08, 4.18, 16.0, 1,234."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def duration(time_s: float) -> str:
    """Format a duration: `40 s`, `12 min`, `3 h 51 min` or `2 d 3 h`."""
    if time_s < 60:
        return f"{math.ceil(time_s)} s"
    minutes = round(time_s / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def interval(low: float, high: float) -> str:
    """Format an interval, with the decimals of the lower bound."""
    decimals = len(significant(low).partition(".")[2])
    return f"{low:,.{decimals}f}-{high:,.{decimals}f}"


def band(time: Time, *, ascii_only: bool = False) -> str:
    """Format the error band of a step time in percent: `±12%`, or `-8+15%` if it is asymmetric."""
    # Rounded twice, so that floating-point noise cannot make a symmetric band of 47.5% look asymmetric.
    below, above = (round(round(100 * abs(bound / time.step_s - 1), 6)) for bound in time.band_s)
    sign = "+-" if ascii_only else "±"
    return f"{sign}{above}%" if below == above else f"-{below}+{above}%"


def billions(count: int) -> str:
    """Format a number of parameters: 8.19B, 671B, 0.6B."""
    return f"{significant(count / 1e9)}B"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 layout`, `2 layouts`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"


def layout_label(layout: Layout) -> str:
    """Return a layout's id with spaces, at which tables can wrap: `tp4 pp2 dp4 mbs1 sel:core_attn`."""
    return re.sub(r"-(sel|full)-(?!uneven|ends|offload|nosync|liger|expandable)", r"-\1:", layout.id).replace("-", " ")


def trainer_title(plan: Plan) -> str:
    """Return the title of the trainer that a plan is written for: `LLaMA-Factory`, or `-` if there is none."""
    return trainer_named(plan.trainer).title if plan.trainer else "-"


def time_shares(parts_s: Mapping[str, float], step_s: float) -> list[str]:
    """Return the shares of a step in percent, largest first: `compute 71`. Shares below half a percent are left out."""
    shares = sorted(((100 * seconds / step_s, name) for name, seconds in parts_s.items()), key=lambda s: (-s[0], s[1]))
    return [f"{_SHORT_PARTS.get(name, name)} {percent:.0f}" for percent, name in shares if percent >= 0.5]


def spec_line(spec: Spec) -> str:
    """Return cluster, model and job: `h100-4x8, 4 x 8 h100-sxm-80gb: Qwen/Qwen3-8B, full sft bf16, 64 x 4,096 ...`."""
    cluster, job = spec.cluster, spec.job
    machine = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"
    place = machine if cluster.name in machine else f"{cluster.name}, {machine}"
    work = f"{job.finetuning} {job.stage} {job.precision}, {job.global_batch_size:,} x {job.seq_len:,} tokens"
    return f"{place}: {spec.model.name}, {work}"


def counts_line(ranking: Ranking) -> str:
    """Return the number of layouts by outcome, and how much of the search was completed."""
    counts = ranking.counts
    slower = f", {counts.dominated:,} slower variants of these" if counts.dominated else ""
    line = (
        f"{counted(counts.candidates, 'layout')}: {counts.ranked:,} fit{slower},"
        f" {counts.out_of_memory:,} out of memory, {counts.illegal:,} illegal"
    )
    return line if ranking.searched == 1.0 else f"{line}; stopped after {ranking.searched:.0%} of the search"


def reason_line(rejection: Rejection) -> str:
    """Format one rejected layout: `tp1 pp1 dp32 mbs1: <reason>; <fix>`."""
    line = f"{layout_label(rejection.layout)}: {rejection.reason}"
    return f"{line}; {rejection.fix}" if rejection.fix else line


def nearest_misses(ranking: Ranking, *, memory: int, rules: int) -> list[Rejection]:
    """Return the layouts that exceed memory by the least, then one example per broken rule, up to the given limits."""
    over = [out for out in ranking.rejected if out.rule == "memory"]
    illegal = {out.rule: out for out in reversed(ranking.rejected) if out.rule != "memory"}
    return over[:memory] + [*reversed(illegal.values())][:rules]


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


def saving_words(effort: Effort) -> str:
    """Return a sentence on checkpoints that take much of a job, or an empty string."""
    if (saving := effort.saving) is None:
        return ""
    return (
        f"All but one of the {saving.saves} checkpoints take {duration(saving.saved_s)}, beside"
        f" {duration(effort.training_s)} of training: --set {saving.setting} saves only one."
    )


def pauses_words(spec: Spec, effort: Effort) -> str:
    """Describe the hours that are not training, and the storage rate assumed for them."""
    pauses = effort.pauses
    words = [
        *([f"{duration(pauses.checkpoints_s)} of checkpoints"] if pauses.checkpoints_s else []),
        *([f"{duration(pauses.evaluation_s)} of evaluation"] if pauses.evaluation_s else []),
    ]
    rate = f"(storage_bandwidth {format_byte_rate(spec.cluster.storage_bytes_per_s)} per node)"
    return f"{duration(pauses.start_up_s)} of start-up {''.join(f'and {word} ' for word in words)}{rate}"
