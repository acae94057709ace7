"""Sentences about plans: what a rejected one would need, what the usual alternatives to the best would cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from topoplan.backends.trainers import TRAINER_RULE
from topoplan.engines.data_parallel.rules import SHARDED_RULES
from topoplan.engines.megatron.rules import RULES
from topoplan.engines.rule import broken_rule
from topoplan.layout.forms import recompute_from_value
from topoplan.layout.layout import Layout, Recompute
from topoplan.planner.case import case_of
from topoplan.planner.plan import Ranked, Rejection
from topoplan.planner.predict import memory_of
from topoplan.specs.spec import Spec
from topoplan.units import GIB

FULL = Recompute(granularity="full", method="uniform", num_layers=1)


def memory_rejection(spec: Spec, layout: Layout) -> Rejection:
    """Why a legal layout does not fit, and the nearest change after which it would."""
    memory = memory_of(case_of(spec, layout.backend), layout)
    worst = max(memory.by_stage, key=lambda stage: stage.allocated_bytes)
    largest = max(worst.parts_bytes, key=lambda part: worst.parts_bytes[part])
    if memory.excess_bytes > 0.0:
        who = f"stage {worst.stage}" if layout.is_megatron else "a GPU"
        reason = (
            f"{who} needs {memory.device_bytes / GIB:.1f} GiB and a margin of"
            f" {memory.margin_bytes / GIB:.1f}, the card has {memory.capacity_bytes / GIB:.1f}:"
            f" {memory.excess_bytes / GIB:.1f} GiB over; most is {largest} ({worst.parts_bytes[largest] / GIB:.1f} GiB)"
        )
    else:
        capacity = memory.host_capacity_bytes or 0.0
        reason = f"a node needs {memory.host_bytes / GIB:.0f} GiB of host memory and has {capacity / GIB:.0f}"
    return Rejection(layout=layout, rule="memory", reason=reason, fix=_fitting_change(spec, layout))


def _changes(spec: Spec, layout: Layout) -> list[tuple[str, Layout]]:
    """Single changes that save memory, the mildest first."""
    if not layout.is_megatron:
        return _sharded_changes(spec, layout)
    changes: list[tuple[str, Layout]] = []
    if layout.tp > 1 and not layout.sequence_parallel:
        changes.append(("sequence_parallel", replace(layout, sequence_parallel=True)))
    if layout.micro_batch_size > 1:
        smaller = replace(
            layout,
            micro_batch_size=layout.micro_batch_size // 2,
            gradient_accumulation_steps=layout.gradient_accumulation_steps * 2,
        )
        if layout.micro_batch_size % 2 == 0:
            changes.append((f"micro_batch_size {smaller.micro_batch_size}", smaller))
    if layout.recompute.granularity != "full":
        changes.append(("recompute full", replace(layout, recompute=FULL)))
    for key in ("tp", "pp", "cp"):
        if layout.dp % 2 == 0:
            twice = {key: getattr(layout, key) * 2}
            steps = layout.gradient_accumulation_steps * 2
            dp = layout.dp // 2
            changed = replace(layout, dp=dp, gradient_accumulation_steps=steps, pipeline_layout=None, **twice)
            if key == "tp":
                etp = changed.tp if layout.etp == layout.tp > 1 else layout.etp
                changed = replace(changed, sequence_parallel=True, etp=etp)
            changes.append((f"{key} {twice[key]}", changed))
            if layout.recompute.granularity != "full":
                changes.append((f"{key} {twice[key]} and recompute full", replace(changed, recompute=FULL)))
    changes.append(("optimizer_offload_fraction 1.0", replace(layout, optimizer_offload_fraction=1.0)))
    return changes


def _sharded_changes(spec: Spec, layout: Layout) -> list[tuple[str, Layout]]:
    """The same where data alone is split: the allocator, checkpointing, more sharding, offload, the loss."""
    changes: list[tuple[str, dict[str, Any]]] = [("expandable_segments", {"expandable_segments": True})]
    if layout.recompute.granularity != "full":
        changes.append(("recompute full", {"recompute": FULL}))
    changes.append(("fused_linear_cross_entropy", {"fused_linear_cross_entropy": True}))
    if layout.backend == "deepspeed":
        changes += [(f"zero_stage {n}", {"zero_stage": n}) for n in range(layout.zero_stage + 1, 4)]
        changes.append(("offload_optimizer", {"offload_optimizer": True}))
        both = {"zero_stage": 3, "offload_optimizer": True, "offload_param": True}
        changes.append(("zero_stage 3, offload_optimizer and offload_param", both))
    elif layout.backend == "fsdp2":
        changes.append(("offload", {"offload": True}))
    else:
        changes.append(("backend deepspeed with zero_stage 3", {"backend": "deepspeed", "zero_stage": 3}))
    if layout.backend != "ddp" and layout.dp % 2 == 0:
        twice = {
            "ulysses": layout.ulysses * 2,
            "dp": layout.dp // 2,
            "gradient_accumulation_steps": layout.gradient_accumulation_steps * 2,
        }
        changes.append((f"ulysses {layout.ulysses * 2}", twice))
    found: list[tuple[str, Layout]] = []
    before: dict[str, Any] = {}
    for name, change in changes:
        found.append((name, replace(layout, **change)))
        # What costs little is tried together with what comes behind it, too.
        if name in ("expandable_segments", "recompute full"):
            before |= change
        elif any(getattr(layout, key) != value for key, value in before.items()):
            found.append((f"{name}, recompute full and expandable_segments", replace(layout, **(before | change))))
    return found


def _keeps_pins(spec: Spec, layout: Layout) -> bool:
    pin = {key: recompute_from_value(value) if key == "recompute" else value for key, value in spec.job.pin.items()}
    return all(getattr(layout, key) == value for key, value in pin.items())


_ANY_HOST_BYTES = 2**60


def _fitting_change(spec: Spec, layout: Layout) -> str:
    if found := _first_that_fits(spec, layout):
        return found
    if spec.cluster.host_memory_bytes is None:
        # Offload is out where the spec does not say what there is to offload to.
        with_host = replace(spec, cluster=replace(spec.cluster, host_memory_bytes=_ANY_HOST_BYTES))
        if found := _first_that_fits(with_host, layout):
            return f"{found}: state host_memory in the spec"
    return "no single change makes it fit"


def _first_that_fits(spec: Spec, layout: Layout) -> str:
    """The mildest change after which it fits, and what it then needs; nothing where there is none."""
    for name, changed in _changes(spec, layout):
        rules = RULES if changed.is_megatron else SHARDED_RULES
        if _keeps_pins(spec, changed) and broken_rule(spec, changed, (*rules, TRAINER_RULE)) is None:
            memory = memory_of(case_of(spec, changed.backend), changed)
            if memory.fits:
                beside = f" and {memory.host_bytes / GIB:.0f} GiB of host memory a node" if memory.host_bytes else ""
                return f"{name} would fit ({memory.device_bytes / GIB:.1f} GiB{beside})"
    return ""


_Choice = tuple[str, Callable[[Layout], object]]
_CHOICES: tuple[_Choice, ...] = (
    ("zero stage", lambda layout: layout.zero_stage),
    ("ulysses", lambda layout: layout.ulysses),
    ("tp", lambda layout: layout.tp),
    ("pp", lambda layout: layout.pp),
    ("cp", lambda layout: layout.cp),
    ("ep", lambda layout: layout.ep),
    ("micro batch", lambda layout: layout.micro_batch_size),
    ("recompute", lambda layout: layout.recompute.granularity),
)
MAX_NOTES = 6


def memory_difference(best: Ranked, other: Ranked) -> str:
    """What another plan takes of the card, against the best one."""
    spared = (best.memory.device_bytes - other.memory.device_bytes) / GIB
    return f"{abs(spared):.1f} GiB {'less' if spared > 0 else 'more'}" if abs(spared) >= 0.05 else "as much memory"


def speed_difference(best: Ranked, other: Ranked) -> str:
    """How fast another plan is, against the best one."""
    slower = 1.0 - other.tokens_per_s_per_gpu / best.tokens_per_s_per_gpu
    return "as fast" if abs(slower) < 0.005 else f"{abs(slower):.0%} {'slower' if slower > 0 else 'faster'}"


def alternatives(order: Sequence[Ranked]) -> list[str]:
    """For every choice of the best plan, the best plan that chose otherwise: what it gains and loses.

    A plan that recomputes does so to fit, so that recomputation is a choice only where the best plan has it.
    """
    if not order:
        return []
    best = order[0]
    rivals = [plan for plan in order if plan.layout.backend == best.layout.backend]
    found: list[tuple[float, str]] = []
    told: set[str] = set()
    for name, choice in _CHOICES:
        mine = choice(best.layout)
        other = next((plan for plan in rivals if choice(plan.layout) != mine), None)
        if other is None or other.id in told or mine == "none":
            continue
        told.add(other.id)
        slower = 1.0 - other.tokens_per_s_per_gpu / best.tokens_per_s_per_gpu
        words = f"{speed_difference(best, other)}, {memory_difference(best, other)} ({other.id})"
        found.append((slower, f"{name} {choice(other.layout)} instead of {mine}: {words}"))
    return [text for _, text in sorted(found, key=lambda pair: pair[0])[:MAX_NOTES]]
