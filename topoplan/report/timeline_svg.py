"""Draw a timeline as SVG: a lane per pipeline rank, or per part of a GPU and its host, with a box per event."""

from __future__ import annotations

import math
from html import escape

from topoplan.engines.timeline import Timeline
from topoplan.planner.plan import Plan
from topoplan.report.text import layout_label, significant
from topoplan.report.timeline import (
    MARKS,
    NUMBERED,
    Window,
    idle_name,
    kinds_of,
    lane_names,
    talks_words,
    totals_line,
    windows,
)

MARK = "<!-- written by `topoplan timeline` -->"
"""The start of every drawing written by topoplan."""

_LEFT, _RIGHT, _TOP, _DRAWN, _CUT = 70, 86, 70, 1440, 30
_LANE, _GAP, _CHARACTER = 30, 6, 6.2
_PER_FORWARD = 16.0
_TICKS = 12
_NARROWEST = 0.3
"""In pixels: narrower boxes are skipped, or in the lanes of a GPU, drawn at this width."""

# Hue, saturation, and the lightness (in percent) of the first and the last chunk.
_SHADES = {"forward": (212, 62, 48, 78), "backward": (142, 42, 38, 72), "recompute": (178, 40, 42, 74)}
_PLAIN = {
    "p2p": "#f2b134",
    "idle": "#eceff1",
    "reference": "#8e6bbf",
    "layer collectives": "#f2b134",
    "gradient reduce": "#d1495b",
    "optimizer": "#6d4c8f",
    "parameter gather": "#ef8354",
    "buffers": "#9bc1bc",
    "launches": "#f2d398",
    "copy": "#f2b134",
    "host work": "#a7a2a9",
}


def svg(title: str, plan: Plan, drawn: Timeline) -> str:
    """Return the drawing as text; it depends only on the timeline."""
    shown, pixel_s = windows(drawn, _DRAWN - _CUT, _PER_FORWARD)
    lanes = _lane(drawn.ranks + len(drawn.communications))
    width, height = _LEFT + _DRAWN + _RIGHT, lanes + 118
    out = [
        MARK,
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="Helvetica, Arial, sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(_LEFT, 22, title, 'font-size="15" font-weight="bold"'),
        _text(_LEFT, 42, f"Plan {layout_label(plan.layout)}. {totals_line(plan, drawn)}", 'font-size="12"'),
        _text(_LEFT + _DRAWN + 10, _TOP - 8, idle_name(drawn), 'fill="#555"'),
    ]
    for rank, idle in enumerate(drawn.idle_shares):
        middle = _lane(rank) + _LANE / 2 + 4
        name = lane_names(drawn)[rank]
        out.append(_text(_LEFT - 8, middle, name if drawn.lanes else f"rank {name}", 'text-anchor="end"'))
        out.append(_text(_LEFT + _DRAWN + 10, middle, f"{100 * idle:.1f}%"))
    for number, communication in enumerate(drawn.communications, start=drawn.ranks):
        out.append(_text(_LEFT - 8, _lane(number) + _LANE / 2 + 4, communication.name, 'text-anchor="end"'))
    left = float(_LEFT)
    for number, window in enumerate(shown):
        if number:
            out += _cut(left, lanes)
            left += _CUT
        right = left + (window.end_s - window.start_s) / pixel_s
        out += _stretch(drawn, window, left, right, pixel_s)
        out += _axis(window, left, right, lanes, pixel_s, last=number == len(shown) - 1)
        left = right
    out += _legend(drawn, lanes + 58)
    if len(shown) > 1:
        left_out = significant(shown[1].start_s - shown[0].end_s)
        out.append(
            _text(_LEFT, lanes + 104, f"At the break, {left_out} s of the steady state are left out.", 'fill="#555"')
        )
    return "\n".join([*out, "</svg>", ""])


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _lane(rank: int) -> int:
    return _TOP + rank * (_LANE + _GAP)


def _colour(kind: str, chunk: int, chunks: int) -> str:
    if kind in _PLAIN:
        return _PLAIN[kind]
    hue, saturation, dark, light = _SHADES[kind]
    lightness = dark + (light - dark) * chunk / max(1, chunks - 1)
    return f"hsl({hue},{saturation}%,{lightness:.0f}%)"


def _stretch(drawn: Timeline, window: Window, left: float, right: float, pixel_s: float) -> list[str]:
    out: list[str] = []

    def box(rank: int, start: float, end: float, colour: str, text: str = "", *, dark: bool = True) -> None:
        x = left + max(0.0, start - window.start_s) / pixel_s
        wide = min(right, left + (end - window.start_s) / pixel_s) - x
        if wide < _NARROWEST:
            # Otherwise a GPU's lane would look empty where many short calls follow each other.
            if not (drawn.lanes or rank >= drawn.ranks) or wide <= 0:
                return
            wide = _NARROWEST
        edge = ' stroke="white" stroke-width="0.6"' if wide > 3 else ""
        out.append(f'<rect x="{x:.2f}" y="{_lane(rank)}" width="{wide:.2f}" height="{_LANE}" fill="{colour}"{edge}/>')
        if text and wide > len(text) * _CHARACTER + 3:
            ink = "white" if dark else "#222"
            middle = f'text-anchor="middle" fill="{ink}"'
            out.append(_text(x + wide / 2, _lane(rank) + _LANE / 2 + 4, text, middle))

    for rank in range(drawn.ranks):
        idle_from, idle_to = drawn.pipeline_start_s, drawn.pipeline_end_s
        box(rank, idle_from, idle_to, _PLAIN["idle"])
    for event in drawn.events:
        if event.end_s > window.start_s and event.start_s < window.end_s:
            colour = _colour(event.kind, event.chunk, drawn.chunks)
            number = str(event.microbatch + 1) if event.kind in NUMBERED else ""
            dark = drawn.chunks == 1 or event.chunk / (drawn.chunks - 1) < 0.6
            box(event.rank, event.start_s, event.end_s, colour, number, dark=dark)
    for phase in drawn.phases:
        for rank in range(drawn.ranks):
            box(rank, phase.start_s, phase.end_s, _PLAIN[phase.name])
    for lane, communication in enumerate(drawn.communications, start=drawn.ranks):
        box(lane, 0.0, drawn.total_s, _PLAIN["idle"])
        for span in communication.spans:
            if span.end_s > window.start_s and span.start_s < window.end_s:
                box(lane, span.start_s, span.end_s, _PLAIN[span.name])
    return out


def _cut(left: float, lanes: int) -> list[str]:
    """Return a zigzag across all lanes where time is left out."""
    x = left + _CUT / 2
    points = " ".join(f"{x + (4 if step % 2 else -4)},{y}" for step, y in enumerate(range(_TOP - 6, lanes + 8, 8)))
    return [f'<polyline points="{points}" fill="none" stroke="#555" stroke-width="1.4"/>']


def _axis(window: Window, left: float, right: float, y: int, pixel_s: float, *, last: bool) -> list[str]:
    spacing = _round_up(_DRAWN * pixel_s / _TICKS)
    decimals = max(0, -math.floor(math.log10(spacing) + 1e-9))
    out = [f'<line x1="{left:.1f}" y1="{y}" x2="{right:.1f}" y2="{y}" stroke="#555"/>']
    tick = math.ceil(window.start_s / spacing - 1e-9)
    while tick * spacing <= window.end_s:
        x = left + (tick * spacing - window.start_s) / pixel_s
        out.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 5}" stroke="#555"/>')
        out.append(_text(x, y + 18, f"{tick * spacing:.{decimals}f}", 'text-anchor="middle" fill="#333"'))
        tick += 1
    if last:
        out.append(_text(right, y + 34, "seconds from the start of the step", 'text-anchor="end" fill="#333"'))
    return out


def _round_up(value: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))


def _legend(drawn: Timeline, y: int) -> list[str]:
    kinds = kinds_of(drawn)
    out, x = [], float(_LEFT)
    for kind in (kind for kind in MARKS if kind in kinds):
        chunks = range(drawn.chunks) if kind in _SHADES else range(1)
        name = MARKS[kind][2] + (f", chunk 0 to {drawn.chunks - 1}" if len(chunks) > 1 else "")
        for chunk in chunks:
            colour = _colour(kind, chunk, drawn.chunks)
            out.append(f'<rect x="{x:.1f}" y="{y}" width="14" height="14" fill="{colour}"/>')
            x += 14
        out.append(_text(x + 6, y + 11, name))
        x += 6 + len(name) * _CHARACTER + 18
    notes = "Numbers in boxes: micro batches, from 1."
    if drawn.communications:
        notes += f" {talks_words(drawn)}."
    out.append(_text(_LEFT, y + 32, notes, 'fill="#555"'))
    return out
