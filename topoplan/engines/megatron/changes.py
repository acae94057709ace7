"""Single changes to a Megatron layout that save memory."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.layout.layout import FULL, Layout, changed


def milder_first(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield each change with its name, mildest first: a switch, a smaller micro-batch, recomputation, more splits."""
    if layout.tp > 1 and not layout.sequence_parallel:
        yield "sequence_parallel", changed(layout, sequence_parallel=True)
    if layout.micro_batch_size % 2 == 0:
        half, steps = layout.micro_batch_size // 2, layout.gradient_accumulation_steps * 2
        yield (
            f"micro_batch_size {half}",
            changed(layout, micro_batch_size=half, gradient_accumulation_steps=steps),
        )
    recomputes = layout.recompute.granularity == "full"
    if not recomputes:
        yield "recompute full", changed(layout, recompute=FULL)
    for key in ("tp", "pp", "cp") if layout.dp % 2 == 0 else ():
        name = f"{key} {getattr(layout, key) * 2}"
        fewer = _doubled(layout, key)
        yield name, fewer
        if not recomputes:
            yield f"{name} and recompute full", changed(fewer, recompute=FULL)
    yield "optimizer_offload_fraction 1.0", changed(layout, optimizer_offload_fraction=1.0)


def _doubled(layout: Layout, key: str) -> Layout:
    """Return the layout with twice the tp, pp or cp, half the dp, and evenly split stages."""
    twice = {key: getattr(layout, key) * 2}
    steps = layout.gradient_accumulation_steps * 2
    fewer = changed(layout, dp=layout.dp // 2, gradient_accumulation_steps=steps, pipeline_layout=None, **twice)
    if key != "tp":
        return fewer
    etp = fewer.tp if layout.etp == layout.tp > 1 else layout.etp
    return changed(fewer, sequence_parallel=True, etp=etp)
