"""Single changes to a layout of the data-parallel family that save memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from topoplan.layout.layout import FULL, Layout, changed

_CHEAP = ("expandable_segments", "recompute full")


def milder_first(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield each change with its name, mildest first; cheap changes are also tried together with each later one."""
    before: dict[str, Any] = {}
    for name, change in _changes(layout):
        yield name, changed(layout, **change)
        if name in _CHEAP:
            before |= change
        elif any(getattr(layout, key) != value for key, value in before.items()):
            yield f"{name}, recompute full and expandable_segments", changed(layout, **(before | change))


def _changes(layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield changes of the allocator, checkpointing, the loss, sharding, offload and sequence sharing."""
    yield "expandable_segments", {"expandable_segments": True}
    if layout.recompute.granularity != "full":
        yield "recompute full", {"recompute": FULL}
    yield "fused_linear_cross_entropy", {"fused_linear_cross_entropy": True}
    if layout.backend == "deepspeed":
        yield from ((f"zero_stage {stage}", {"zero_stage": stage}) for stage in range(layout.zero_stage + 1, 4))
        yield "offload_optimizer", {"offload_optimizer": True}
        both = {"zero_stage": 3, "offload_optimizer": True, "offload_param": True}
        yield "zero_stage 3, offload_optimizer and offload_param", both
    elif layout.backend == "fsdp2":
        yield "offload", {"offload": True}
    else:
        yield "backend deepspeed with zero_stage 3", {"backend": "deepspeed", "zero_stage": 3}
    if layout.backend != "ddp" and layout.dp % 2 == 0:
        ulysses, steps = layout.ulysses * 2, layout.gradient_accumulation_steps * 2
        yield (
            f"ulysses {ulysses}",
            {"ulysses": ulysses, "dp": layout.dp // 2, "gradient_accumulation_steps": steps},
        )
