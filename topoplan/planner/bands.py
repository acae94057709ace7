"""The error bands that profiles have earned: the remaining errors of predictions against measured runs.

The rule, for each entry of `catalog/profiles.json` and each band:

- Every memory figure grades it, and every speed figure except those of runs that were slowed on purpose and of adapters
  on Megatron. If a source omits settings that the figure depends on, only the fastest run of a cluster, model and job
  grades speed.
- Five or more figures: the 90th percentile of how far off they are. A source counts as five figures at most, because
  its runs share a machine and software, and a band has to hold for a source that nobody has seen.
- Fewer: the band of the parent entry (`kin`) times WIDER_FOR_FEW, or the median of the figures' errors if that is
  wider: a few figures say nothing about the tail, but something about the middle.
- None: the band of the parent entry times WIDER_FOR_NONE; at the root, the band of the other precisions.
- Memory is graded by all figures of an architecture, even if some of its cards have an entry of their own.
- POOLED_BANDS are graded by the figures of all entries together.
- Never below NARROWEST, never above WIDEST, and rounded up to whole percent.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topoplan.catalog import profile_entries
from topoplan.planner.validate import Figure
from topoplan.specs.constants import BANDS
from topoplan.specs.gpu_profile import (
    FEW_FIGURES,
    POOLED_BANDS,
    WIDER_FOR_FEW,
    WIDER_FOR_NONE,
    WIDEST,
)

NARROWEST: Mapping[str, float] = {
    "memory_band": 0.04,
    "moe_memory_band": 0.05,
    "adapter_memory_band": 0.05,
    "time_band": 0.10,
    "moe_time_band": 0.10,
    "eight_bit_time_band": 0.10,
    "sharded_memory_band": 0.05,
    "sharded_time_band": 0.10,
}
"""Reasons: the last step of memory, from torch's allocator to the card, is graded by few runs, which hold up to 4 GiB
more beside torch than is predicted, and few MoE runs routed their tokens freely. The speed of one layout on one kind of
machine differs by some 10% between releases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarnedBand:
    """A band of one entry, as the measured runs determine it."""

    entry: str
    key: str
    value: float
    """Half width, as a fraction of the prediction."""
    figures: int
    """Number of figures that grade it."""
    stored: float
    """Value in `catalog/profiles.json`."""


def earned_bands(figures: Sequence[Figure]) -> tuple[EarnedBand, ...]:
    """Return every band of every entry of the catalog, by the rule in the module docstring."""
    return tuple(
        EarnedBand(
            entry=name,
            key=key,
            value=_band(name, key, figures),
            figures=len(_graded_by(name, key, figures)),
            stored=entry["bands"][key]["value"],
        )
        for name, entry in profile_entries().items()
        for key in BANDS
    )


def _band(name: str, key: str, figures: Sequence[Figure]) -> float:
    found = _graded_by(name, key, figures)
    kin = profile_entries()[name].get("kin")
    if len(found) >= FEW_FIGURES:
        width = _at_90_percent(found)
    elif kin is None:
        # At the root, a precision that was not measured is more uncertain than one that was.
        other = {"time_band": "eight_bit_time_band"}.get(key)
        width = WIDER_FOR_NONE * _band(name, other, figures) if other else WIDEST
    elif found:
        width = max(WIDER_FOR_FEW * _band(kin, key, figures), statistics.median(figure.off_by for figure in found))
    else:
        width = WIDER_FOR_NONE * _band(kin, key, figures)
    percent = math.ceil(100.0 * round(width, 6))
    return min(max(percent / 100.0, NARROWEST[key]), WIDEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How many measured figures are inside their predicted bands."""

    key: str
    """Name of the band, or `time` or `memory` for all bands of that kind."""
    figures: int
    inside: int
    inside_without_source: int
    """Figures inside the band that results from all other sources: what a new source can expect."""
    median_half_width: float
    """Median half width of the predicted bands, as a fraction."""


def coverages(figures: Sequence[Figure]) -> tuple[Coverage, ...]:
    """Return the coverage of time, of memory, and of each band that any figure grades."""
    held = [figure for figure in figures if figure.band]
    unseen: dict[tuple[str, str, str], float] = {}
    for name, key, source in {(figure.entry, figure.band, figure.family) for figure in held}:
        others = [figure for figure in held if figure.family != source]
        unseen[name, key, source] = _band(name, key, others)
    groups: dict[str, list[Figure]] = {"time": [], "memory": [], **{key: [] for key in BANDS}}
    for figure in held:
        groups["time" if figure.is_speed else "memory"].append(figure)
        groups[figure.band].append(figure)
    return tuple(
        Coverage(
            key=key,
            figures=len(members),
            inside=sum(one.off_by <= one.half_width for one in members),
            inside_without_source=sum(one.off_by <= unseen[one.entry, one.band, one.family] for one in members),
            median_half_width=statistics.median(one.half_width for one in members),
        )
        for key, members in groups.items()
        if members
    )


def _graded_by(name: str, key: str, figures: Sequence[Figure]) -> list[Figure]:
    def grades(figure: Figure) -> bool:
        if figure.is_speed or key in POOLED_BANDS:
            return figure.entry == name or key in POOLED_BANDS
        return _architecture(figure.entry) == _architecture(name)

    found = [figure for figure in figures if figure.band == key and grades(figure)]
    fastest: dict[str, Figure] = {}
    for figure in found:
        if figure.is_speed:
            other = fastest.setdefault(figure.setup_key, figure)
            if figure.error < other.error:
                fastest[figure.setup_key] = figure
    return [*fastest.values(), *(figure for figure in found if not figure.is_speed)]


def _architecture(name: str) -> str:
    """Return the entry of the architecture: cards with an entry of their own differ from it in speed, not in memory."""
    entry = profile_entries()[name]
    return entry["kin"] if "cards" in entry else name


def _at_90_percent(figures: Sequence[Figure]) -> float:
    """Return the 90th percentile of how far off figures are; a source counts as FEW_FIGURES figures at most."""
    of_source = Counter(figure.family for figure in figures)
    weighed = sorted((figure.off_by, min(1.0, FEW_FIGURES / of_source[figure.family])) for figure in figures)
    reached, needed = 0.0, 0.9 * sum(weight for _, weight in weighed)
    for off_by, weight in weighed:
        reached += weight
        if reached >= needed - 1e-9:
            return off_by
    raise AssertionError("no figures")


def profiles_text(bands: Sequence[EarnedBand]) -> str:
    """Return the text of `catalog/profiles.json` with these bands, one number per line."""
    blocks = []
    for name, entry in profile_entries().items():
        earned = {band.key: {"value": band.value, "figures": band.figures} for band in bands if band.entry == name}
        lines = [f"    {json.dumps(key)}: {json.dumps(entry[key])}" for key in ("date", "kin", "cards") if key in entry]
        for key, numbers in (("constants", entry["constants"]), ("bands", earned)):
            rows = ",\n".join(f"      {json.dumps(name)}: {json.dumps(number)}" for name, number in numbers.items())
            lines.append(f'    "{key}": {{\n{rows}\n    }}')
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"
