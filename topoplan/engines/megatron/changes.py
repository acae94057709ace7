"""Single changes to a layout of Megatron's that save memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from topoplan.layout.layout import Layout, Recompute

FULL = Recompute(granularity="full", method="uniform", num_layers=1)


def milder_first(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Each change with its name, the mildest first: a switch, a smaller micro batch, recomputation, more splits."""
    if layout.tp > 1 and not layout.sequence_parallel:
        yield "sequence_parallel", replace(layout, sequence_parallel=True)
    if layout.micro_batch_size % 2 == 0:
        half, steps = layout.micro_batch_size // 2, layout.gradient_accumulation_steps * 2
        yield (
            f"micro_batch_size {half}",
            replace(layout, micro_batch_size=half, gradient_accumulation_steps=steps),
        )
    recomputes = layout.recompute.granularity == "full"
    if not recomputes:
        yield "recompute full", replace(layout, recompute=FULL)
    for key in ("tp", "pp", "cp") if layout.dp % 2 == 0 else ():
        name = f"{key} {getattr(layout, key) * 2}"
        changed = _doubled(layout, key)
        yield name, changed
        if not recomputes:
            yield f"{name} and recompute full", replace(changed, recompute=FULL)
    yield "optimizer_offload_fraction 1.0", replace(layout, optimizer_offload_fraction=1.0)


def _doubled(layout: Layout, key: str) -> Layout:
    """The layout with twice the tp, pp or cp, and half the dp; its stages are split evenly."""
    twice = {key: getattr(layout, key) * 2}
    steps = layout.gradient_accumulation_steps * 2
    changed = replace(layout, dp=layout.dp // 2, gradient_accumulation_steps=steps, pipeline_layout=None, **twice)
    if key != "tp":
        return changed
    etp = changed.tp if layout.etp == layout.tp > 1 else layout.etp
    return replace(changed, sequence_parallel=True, etp=etp)
