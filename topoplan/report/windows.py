"""Choose the parts of a long timeline to draw: its beginning and its end, at the same scale."""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.engines.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A drawn interval of time."""

    start_s: float
    end_s: float


def windows(timeline: Timeline, units: int, per_forward: float) -> tuple[tuple[Window, ...], float]:
    """Return (windows, seconds per unit): the whole step if it fits in `units`, otherwise its two ends.

    A forward pass of one chunk should be `per_forward` units wide on average. A short step is drawn wider; of a long
    one, the middle of the steady state is left out. If even the two ends do not fit, the scale shrinks until the
    pipeline's fill and drain do.
    """
    total = timeline.total_s
    widths = [event.end_s - event.start_s for event in timeline.events if event.kind == "forward"]
    unit_s = sum(widths) / len(widths) / per_forward
    if total <= units * unit_s:
        return (Window(start_s=0.0, end_s=total),), total / units
    ends = timeline.fill_s + max(0.0, total - timeline.drain_s)
    unit_s = max(unit_s, min(total, 1.25 * ends) / units)
    if total <= units * unit_s * 1.000001:
        return (Window(start_s=0.0, end_s=total),), total / units
    # The space left over by fill and drain is divided between them.
    spare = (units * unit_s - ends) / 2
    first = timeline.fill_s + spare
    return (
        Window(start_s=0.0, end_s=first),
        Window(start_s=total - (units * unit_s - first), end_s=total),
    ), unit_s
