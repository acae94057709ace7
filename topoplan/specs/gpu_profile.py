"""The few numbers that are fitted or measured rather than derived: how much of a peak real kernels reach.

They are stored in `catalog/profiles.json`, with one entry for each architecture, or for some of its cards whose chips
differ from the rest. Each constant states its source. Each error band is computed by `planner/bands.py` from the
measured runs of its entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any

from topoplan.catalog import gpu_names, profile_entries
from topoplan.errors import listed
from topoplan.specs.constants import BANDS, CONSTANTS, OF_MEMORY, OF_TIME, Constants
from topoplan.specs.facts import facts_of
from topoplan.specs.gpu import Gpu
from topoplan.specs.job import Job
from topoplan.specs.model import Model
from topoplan.specs.profile import OwnProfile

SHARDED_BANDS = ("sharded_memory_band", "sharded_time_band")
"""The bands of the ddp, deepspeed and fsdp2 backends."""
POOLED_BANDS = ("sharded_memory_band", "adapter_memory_band")
"""Bands that are graded on the runs of all entries together: what eager PyTorch keeps in memory does not depend on
the card (its context and NCCL's buffers are predicted separately), and few runs of these backends report their memory,
on one or two architectures only."""
FEW_FIGURES = 5
"""The number of measured figures from which a band is computed from them alone."""
WIDER_FOR_FEW = 1.25
"""Factor on the related entry's band if fewer figures were measured, and for constants from a user's own file."""
WIDER_FOR_NONE = 2.0
"""Factor on the related entry's band if no figures were measured."""
WIDENED = "wider for constants of your own"
"""The source shown for a band widened because of constants from a user's own file."""
WIDEST = 0.6
"""The widest band: beyond it, a band would only say that nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where one number of a profile comes from, for `topoplan show profile`."""

    kind: str
    """calibrated (on the user's runs), measured (by the user), published, fitted (to published runs), assumed, kin
    (taken from a related entry) or earned (a band computed from measured runs)."""
    source: str
    kin: str = ""
    """The entry that the number was taken from, or whose band was widened."""
    kind_of_kin: str = ""
    """The `kind` of the number in the entry that it was taken from."""
    figures: int = 0
    """For a band: the number of measured figures behind it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile(Constants):
    """The constants and bands of a GPU. Compared and hashed by identity: there is one object per GPU and own file."""

    name: str
    """The catalog entry of the constants."""
    kin: str
    """The related entry whose bands are widened if few runs were measured; empty for the root entry."""
    date: str
    """Date on which the sources were last checked."""
    origins: Mapping[str, Origin]
    """Name of a constant or band -> where its value comes from."""
    own: OwnProfile | None = None
    """The user's own file that some of the constants come from."""


def entry_name(gpu: Gpu) -> str:
    """Return the entry that names the card, or else the entry of the card's architecture."""
    named = (name for name, entry in profile_entries().items() if gpu.name in entry.get("cards", ()))
    return next(named, gpu.architecture)


@lru_cache(maxsize=64)
def profile_of(gpu: Gpu, own: OwnProfile | None = None) -> Profile:
    """Return the profile of a GPU, with the constants of a user's own file replacing the catalog's.

    A band that the file does not give is widened as for a GPU with few runs, if the file changes constants on which the
    band's predictions depend: efficiencies of kernels do not make memory less certain. A card outside the catalog gets
    the constants of its architecture, and bands widened as for a GPU without runs. Raises KeyError for an architecture
    outside the catalog (spec forms refuse those earlier).
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
"""Constants that scale with the card's clock."""


@lru_cache(maxsize=256)
def slowest_of(profile: Profile, cards: int) -> Profile:
    """Return the constants of the slowest of `cards` cards, which all others wait for in every step.

    Uses the expected extreme of a normal sample: G. Blom, "Statistical Estimates and Transformed Beta-Variables", 1958.
    """
    away = NormalDist().inv_cdf((cards - 0.375) / (cards + 0.25))
    slower = 1.0 + profile.card_spread * away
    return replace(profile, **{key: getattr(profile, key) / slower for key in PRODUCTS})


def _constant(name: str, key: str) -> tuple[Any, Origin]:
    """Return a constant of an entry: its own, or that of the entry it names, or else that of its related entry."""
    entry = profile_entries()[name]
    found = entry["constants"].get(key) or {"kin": entry["kin"]}
    if kin := found.get("kin"):
        value, origin = _constant(kin, key)
        kind = origin.kind_of_kin or origin.kind
        return value, Origin(kind="kin", source=origin.source, kin=origin.kin or kin, kind_of_kin=kind)
    value = found["value"]
    return tuple(value) if isinstance(value, list) else value, Origin(kind=found["kind"], source=found["source"])


def _disown(values: dict[str, Any], origins: dict[str, Origin], name: str) -> bool:
    """Widen the bands that an entry's runs earned, for a card outside the entry. Returns whether there were any."""
    earned = [key for key in BANDS if key not in POOLED_BANDS and origins[key].figures]
    for key in earned:
        values[key] = min(values[key] * WIDER_FOR_NONE, WIDEST)
        origins[key] = replace(origins[key], kin=name, figures=0)
    return bool(earned)


def _put_own(values: dict[str, Any], origins: dict[str, Origin], own: OwnProfile) -> None:
    source = f"{own.path}: {own.source}" if own.source else own.path
    moved = {key for key, value in own.constants.items() if key not in BANDS and values[key] != value}
    kind = "calibrated" if own.calibrated else "measured"
    for key, value in own.constants.items():
        values[key], origins[key] = value, Origin(kind=kind, source=source)
    for key in BANDS:
        if key not in own.constants and moved & (OF_TIME if key.endswith("time_band") else OF_MEMORY):
            values[key] = min(values[key] * WIDER_FOR_FEW, WIDEST)
            origins[key] = replace(origins[key], source=WIDENED)


def band_keys(model: Model, job: Job) -> tuple[str, str]:
    """Return the keys of the memory and time bands of a job on Megatron-core (other backends: SHARDED_BANDS)."""
    is_moe = facts_of(model).is_moe
    memory = "adapter_memory_band" if job.finetuning == "lora" else "moe_memory_band" if is_moe else "memory_band"
    if is_moe:
        return memory, "moe_time_band"
    return memory, "time_band" if job.precision in ("bf16", "fp16") else "eight_bit_time_band"


@lru_cache(maxsize=256)
def notes_on_bands(profile: Profile, card: str, keys: tuple[str, str]) -> tuple[str, ...]:
    """Return notes on the constants behind a plan (a user's own file, borrowed bands); `keys` name its bands."""
    notes = []
    if profile.own is not None:
        own = profile.own
        given = sum(key not in BANDS for key in own.constants)
        source = f" ({own.source})" if own.source else ""
        which = [key for key in keys if profile.origins[key].source == WIDENED]
        of_what = listed(["step time" if key.endswith("time_band") else "memory" for key in which])
        widened = f"; error band{'s' * (len(which) > 1)} of {of_what} widened" if which else ""
        if own.calibrated is None:
            notes.append(f"{given} of {len(CONSTANTS)} constants from {own.path}{source}{widened}")
        else:
            count = len(own.calibrated.measured)
            of_runs = f"{count} run{'s' * (count != 1)} on this cluster, {own.calibrated.date}"
            beyond = own.constants.get("tensors_beyond", 0.0)
            shown = f"; tensors that come and go counted {100 * beyond:.0f}% higher, as a run out of memory shows"
            notes.append(f"constants from {of_runs} ({own.path}){shown if beyond else ''}{widened}")
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
