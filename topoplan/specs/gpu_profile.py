"""The few numbers that are fitted or measured, not derived: how much of a peak real kernels reach.

They live in `catalog/profiles.json`, one entry an architecture, or some cards of it whose chips are unlike the others.
Each constant says where it comes from. Each error band is earned: `planner/bands.py` works it out from the measured
runs of that entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any

from topoplan.catalog import gpu_names, profile_entries
from topoplan.specs.constants import BANDS, CONSTANTS, Constants
from topoplan.specs.facts import facts_of
from topoplan.specs.gpu import Gpu
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.profile import OwnProfile

SHARDED_BANDS = ("sharded_memory_band", "sharded_time_band")
"""The bands of ddp, deepspeed and fsdp2."""
POOLED_BANDS = ("sharded_memory_band", "adapter_memory_band")
"""Bands that the runs of all entries grade together. Why: what eager PyTorch keeps does not depend on the card, whose
context and NCCL's buffers are told apart; runs of these backends that say what memory they took are few, and on one or
two architectures."""
FEW_FIGURES = 5
"""From this many measured figures on, a band is earned by them alone."""
WIDER_FOR_FEW = 1.25
"""What the kin's band is multiplied by where fewer were measured, and for constants of a user's own."""
WIDER_FOR_NONE = 2.0
"""The same where none were."""
WIDENED = "wider for constants of your own"
"""The source of such a band."""
WIDEST = 0.6
"""Above it a band says no more than that nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where one number of a profile comes from, for `topoplan show profile`."""

    kind: str
    """calibrated (by the user's runs), measured (by the user), published, fitted (on published runs), assumed, kin
    (another's) or earned (a band)."""
    source: str
    kin: str = ""
    """The entry that the number, or the band that it is widened from, was taken from."""
    kind_of_kin: str = ""
    """What the number is there."""
    figures: int = 0
    """Of a band: measured figures that grade it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile(Constants):
    """The constants and bands of one GPU architecture.

    Compared and hashed by identity; there is one object a GPU (and file of a user's own).
    """

    name: str
    """The entry that the constants are of."""
    kin: str
    """The entry that bands are widened from where few runs were measured; empty for the one at the root."""
    date: str
    """Day on which the sources were last read."""
    origins: Mapping[str, Origin]
    """Constant or band -> where it comes from."""
    own: OwnProfile | None = None
    """The file of a user's own that some of the constants are from."""


def entry_name(gpu: Gpu) -> str:
    """The entry that names the card if there is one, else that of its architecture."""
    named = (name for name, entry in profile_entries().items() if gpu.name in entry.get("cards", ()))
    return next(named, gpu.architecture)


@lru_cache(maxsize=64)
def profile_of(gpu: Gpu, own: OwnProfile | None = None) -> Profile:
    """The profile of a GPU, with the constants of a user's own file in place of the catalog's.

    Where such a file gives constants that differ and no band, the bands are widened as for a GPU with few runs. A card
    that is not in the catalog has the constants of its architecture, and its bands widened as for a GPU without runs.

    Raises KeyError for an architecture outside the catalog (spec forms refuse those earlier).
    """
    if own is not None:
        base = profile_of(gpu)
        values, origins = {key: getattr(base, key) for key in base.origins}, {**base.origins}
        _put_own(values, origins, own)
        return replace(base, origins=origins, own=own, **values)
    name = entry_name(gpu)
    entry = profile_entries()[name]
    values, origins = {}, {}
    for key in CONSTANTS:
        values[key], origins[key] = _constant(name, key)
    kin = entry.get("kin", "")
    for key, band in entry["bands"].items():
        values[key], origins[key] = band["value"], Origin(kind="earned", source="", kin=kin, figures=band["figures"])
    if gpu.name not in gpu_names() and _disown(values, origins, name):
        kin = name
    return Profile(name=name, kin=kin, date=entry["date"], origins=origins, own=None, **values)


PRODUCTS = (
    "gemm_efficiency",
    "grouped_gemm_efficiency",
    "fp8_gemm_efficiency",
    "mxfp8_gemm_efficiency",
    "fp4_gemm_efficiency",
    "attention_forward_efficiency",
    "attention_backward_efficiency",
)
"""What follows a card's clock."""


@lru_cache(maxsize=256)
def slowest_of(profile: Profile, cards: int) -> Profile:
    """The constants of the slowest of so many cards, for which the others wait in every step.

    Its place among normally distributed ones: G. Blom, "Statistical Estimates and Transformed Beta-Variables", 1958.
    """
    away = NormalDist().inv_cdf((cards - 0.375) / (cards + 0.25))
    slower = 1.0 + profile.card_spread * away
    return replace(profile, **{key: getattr(profile, key) / slower for key in PRODUCTS})


def _constant(name: str, key: str) -> tuple[Any, Origin]:
    """A constant of an entry: that of another one where it names it, of its kin where it says nothing."""
    entry = profile_entries()[name]
    found = entry["constants"].get(key) or {"kin": entry["kin"]}
    if kin := found.get("kin"):
        value, origin = _constant(kin, key)
        kind = origin.kind_of_kin or origin.kind
        return value, Origin(kind="kin", source=origin.source, kin=origin.kin or kin, kind_of_kin=kind)
    value = found["value"]
    return tuple(value) if isinstance(value, list) else value, Origin(kind=found["kind"], source=found["source"])


def _disown(values: dict[str, Any], origins: dict[str, Origin], name: str) -> bool:
    """Widen the bands that the runs of an entry earned, for a card that is none of its; whether there were any."""
    earned = [key for key in BANDS if key not in POOLED_BANDS and origins[key].figures]
    for key in earned:
        values[key] = min(values[key] * WIDER_FOR_NONE, WIDEST)
        origins[key] = replace(origins[key], kin=name, figures=0)
    return bool(earned)


def _put_own(values: dict[str, Any], origins: dict[str, Origin], own: OwnProfile) -> None:
    source = f"{own.path}: {own.source}" if own.source else own.path
    differs = any(values[key] != value for key, value in own.constants.items() if key not in BANDS)
    kind = "calibrated" if own.calibrated else "measured"
    for key, value in own.constants.items():
        values[key], origins[key] = value, Origin(kind=kind, source=source)
    for key in BANDS:
        if differs and key not in own.constants:
            values[key] = min(values[key] * WIDER_FOR_FEW, WIDEST)
            origins[key] = replace(origins[key], source=WIDENED)


def band_keys(model: Model, job: Job) -> tuple[str, str]:
    """The bands of memory and of time of such a job on Megatron-core; SHARDED_BANDS are those of the others."""
    is_moe = facts_of(model).is_moe
    memory = "adapter_memory_band" if job.finetuning == "lora" else "moe_memory_band" if is_moe else "memory_band"
    if is_moe:
        return memory, "moe_time_band"
    return memory, "time_band" if job.precision in ("bf16", "fp16") else "eight_bit_time_band"


def notes_on_bands(profile: Profile, gpu: Gpu, keys: tuple[str, str]) -> tuple[str, ...]:
    """On the constants behind a plan: a file of the user's own, and bands that are borrowed.

    `keys` are the names of its bands of memory and time.
    """
    return _notes(profile, gpu.name, keys)


@lru_cache(maxsize=256)
def _notes(profile: Profile, card: str, keys: tuple[str, str]) -> tuple[str, ...]:
    notes = []
    if profile.own is not None:
        own = profile.own
        given = sum(key not in BANDS for key in own.constants)
        source = f" ({own.source})" if own.source else ""
        widened = "; bands widened" if any(profile.origins[key].source == WIDENED for key in keys) else ""
        if own.calibrated is None:
            notes.append(f"{given} of {len(CONSTANTS)} constants from {own.path}{source}{widened}")
        else:
            count = len(own.calibrated.measured)
            of_runs = f"{count} run{'s' * (count != 1)} on this cluster, {own.calibrated.date}"
            notes.append(f"constants from {of_runs} ({own.path}){widened}")
    borrowed = [key for key in keys if profile.origins[key].kind == "earned" and not profile.origins[key].figures]
    if borrowed and profile.kin:
        alike = {key for key in BANDS if (key in SHARDED_BANDS) == (keys[0] in SHARDED_BANDS)}
        none_at_all = not any(profile.origins[key].figures for key in alike - {*POOLED_BANDS})
        runs = "runs" if none_at_all else f"{' or '.join(map(_MEASURED_AS.__getitem__, borrowed))}"
        notes.append(f"{card} has no measured {runs}: band{'s' * (len(borrowed) > 1)} from {profile.kin}, widened")
    return tuple(notes)


_MEASURED_AS = {
    "memory_band": "memory of a dense model",
    "moe_memory_band": "memory of a mixture of experts",
    "adapter_memory_band": "memory of adapters on Megatron",
    "time_band": "speed of a dense model in bf16",
    "moe_time_band": "speed of a mixture of experts",
    "eight_bit_time_band": "speed of a dense model in fp8",
    "sharded_memory_band": "memory under ddp, deepspeed or fsdp2",
    "sharded_time_band": "speed under ddp, deepspeed or fsdp2",
}
