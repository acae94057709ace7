"""The error bands that profiles have earned: what measured runs leave between a prediction and the truth.

The rule, for each entry of `catalog/profiles.json` and each band:

- Every figure of memory grades it; every figure of speed does but those of runs that were slowed on purpose, and of
  adapters on Megatron. Where a source leaves out settings that the figure depends on, only the fastest run of a
  cluster, model and job grades speed.
- Five or more: the 90th percentile of their sizes.
- Fewer: the kin's band times WIDER_FOR_FEW, or the median of their sizes where that is wider: a few figures say nothing
  of the tail, but something of the middle.
- None: the kin's band times WIDER_FOR_NONE.
- POOLED_BANDS are graded by the figures of all entries together.
- Never below NARROWEST, never above WIDEST, and in whole percent, upwards.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topoplan.catalog import profile_entries
from topoplan.planner.validate import THROUGHPUT, Figure, at_90_percent
from topoplan.specs.gpu_profile import (
    BANDS,
    FEW_FIGURES,
    POOLED_BANDS,
    WIDER_FOR_FEW,
    WIDER_FOR_NONE,
    WIDEST,
)

NARROWEST: Mapping[str, float] = {
    "memory_band": 0.03,
    "moe_memory_band": 0.05,
    "adapter_memory_band": 0.05,
    "time_band": 0.10,
    "moe_time_band": 0.10,
    "eight_bit_time_band": 0.10,
    "sharded_memory_band": 0.05,
    "sharded_time_band": 0.10,
}
"""Why: the last step of memory, from torch's allocator to the card, is graded by no run, and few runs of a mixture of
experts routed their tokens freely. Speeds of one layout on one kind of machine differ by some 10% between releases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarnedBand:
    """A band of one entry, as the measured runs have it."""

    entry: str
    key: str
    value: float
    """Half width, as a fraction of the prediction."""
    figures: int
    """Figures that grade it."""
    stored: float
    """What `catalog/profiles.json` says."""


def earned_bands(figures: Sequence[Figure]) -> tuple[EarnedBand, ...]:
    """Every band of every entry of the catalog, by the rule above."""
    return tuple(
        EarnedBand(
            entry=name,
            key=key,
            value=_band(name, key, figures),
            figures=len(_sizes(name, key, figures)),
            stored=entry["bands"][key]["value"],
        )
        for name, entry in profile_entries().items()
        for key in BANDS
    )


def _band(name: str, key: str, figures: Sequence[Figure]) -> float:
    sizes = _sizes(name, key, figures)
    kin = profile_entries()[name].get("kin")
    if len(sizes) >= FEW_FIGURES:
        width = at_90_percent(sizes)
    elif kin is None:
        width = WIDEST
    elif sizes:
        width = max(WIDER_FOR_FEW * _band(kin, key, figures), statistics.median(sizes))
    else:
        width = WIDER_FOR_NONE * _band(kin, key, figures)
    percent = math.ceil(100.0 * round(width, 6))
    return min(max(percent / 100.0, NARROWEST[key]), WIDEST)


def _sizes(name: str, key: str, figures: Sequence[Figure]) -> list[float]:
    """How far the truth was from the prediction, in parts of the prediction: what a band around it has to hold."""
    found = [figure for figure in figures if figure.band == key and (figure.entry == name or key in POOLED_BANDS)]
    fastest: dict[str, Figure] = {}
    for figure in found:
        if figure.kind.startswith(THROUGHPUT):
            other = fastest.setdefault(figure.alike, figure)
            if figure.error < other.error:
                fastest[figure.alike] = figure
    # A step takes longer by as much as throughput was predicted too high; memory is larger as it was predicted too low.
    speed = [abs(figure.error) for figure in fastest.values()]
    memory = [abs(1.0 / (1.0 + f.error) - 1.0) for f in found if not f.kind.startswith(THROUGHPUT)]
    return speed + memory


def profiles_text(bands: Sequence[EarnedBand]) -> str:
    """The text of `catalog/profiles.json` with these bands, one number a line."""
    blocks = []
    for name, entry in profile_entries().items():
        earned = {band.key: {"value": band.value, "figures": band.figures} for band in bands if band.entry == name}
        lines = [f"    {json.dumps(key)}: {json.dumps(entry[key])}" for key in ("date", "kin", "cards") if key in entry]
        for key, numbers in (("constants", entry["constants"]), ("bands", earned)):
            rows = ",\n".join(f"      {json.dumps(name)}: {json.dumps(number)}" for name, number in numbers.items())
            lines.append(f'    "{key}": {{\n{rows}\n    }}')
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"
