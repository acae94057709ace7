"""Calibration profiles: as JSON (`topoplan.profile/1`), as tables, and as the YAML file for `--profile`."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from topoplan.catalog import gpu_names
from topoplan.planner.bands import EarnedBand
from topoplan.report.dump import picked
from topoplan.report.tables import apart, paragraph, table_of
from topoplan.report.text import counted
from topoplan.specs.constants import BANDS, CONSTANTS, GROUPS, Constants
from topoplan.specs.gpu import Gpu
from topoplan.specs.gpu_profile import FEW_FIGURES, Origin, Profile, profile_of
from topoplan.specs.known import gpu as gpu_named
from topoplan.units import parse_rate, parse_seconds

_WIDTH = 110


def profile_to_dict(gpu: Gpu, profile: Profile) -> dict[str, Any]:
    """Return every number with its meaning, origin and unit, in base units."""
    return {
        "schema": "topoplan.profile/1",
        "gpu": gpu.name,
        "profile": profile.name,
        "kin": profile.kin or None,
        "date": profile.date,
        "file": profile.own.path if profile.own else None,
        "constants": [_number_to_dict(profile, key) for key in CONSTANTS],
        "bands": [_number_to_dict(profile, key) for key in BANDS],
    }


def _number_to_dict(profile: Profile, key: str) -> dict[str, Any]:
    origin, value = profile.origins[key], getattr(profile, key)
    return {
        "name": key,
        "value": list(value) if isinstance(value, tuple) else value,
        "unit": unit(key),
        "meaning": meaning(key),
        "kind": origin.kind,
        "source": origin_text(profile, key),
        **({"figures": origin.figures} if key in BANDS else {}),
    }


def profiles_to_dict() -> dict[str, Any]:
    """Return a summary of each profile in the catalog."""
    return {
        "schema": "topoplan.profiles/1",
        "profiles": [
            {
                "name": profile.name,
                "gpus": cards,
                "date": profile.date,
                "kin": profile.kin or None,
                "kinds": dict(_kinds(profile)),
                "bands": {key: getattr(profile, key) for key in BANDS},
            }
            for profile, cards in catalog_profiles()
        ],
    }


def catalog_profiles() -> list[tuple[Profile, list[str]]]:
    """Return the profiles of the catalog's GPUs, each with the names of its GPUs."""
    cards: dict[str, list[str]] = {}
    profiles: dict[str, Profile] = {}
    for name in gpu_names():
        profile = profile_of(gpu_named(name))
        profiles.setdefault(profile.name, profile)
        cards.setdefault(profile.name, []).append(name)
    return [(profile, cards[name]) for name, profile in profiles.items()]


def bands_to_dict(bands: Sequence[EarnedBand]) -> dict[str, Any]:
    """Return the bands computed from measured runs, next to those stored in the catalog."""
    return {
        "schema": "topoplan.bands/1",
        "bands": [picked(band, "profile=entry band=key value figures stored") for band in bands],
    }


_UNITS = {
    "_bytes_per_s": "bytes/s",
    "_gb_per_s": "GB/s",
    "_flops_per_sm": "FLOP/s",
    "_bytes": "bytes",
    "_s": "s",
    "_kernels": "kernels",
    "_channels": "channels",
    "_modules": "modules",
    "_width": "elements",
    "_tile": "elements",
    "_prologue": "elements",
    "_tail": "queries",
    "flash_attention": "",
    "_transposes": "",
    "_rings": "",
}
"""Suffix of a constant's name -> its unit, longer suffixes first; constants with no match are fractions."""


def unit(key: str) -> str:
    """Return the unit of a constant, from the suffix of its name."""
    return next((name for ending, name in _UNITS.items() if key.endswith(ending)), "fraction")


def meaning(key: str) -> str:
    """Return the description of a constant."""
    words: str = Constants.__dataclass_fields__[key].metadata["description"]
    return words


def shown_value(key: str, value: Any) -> str:
    """Format a number for reading: `76%`, `20 us`, `600 MB`, `128 x 256`, `40 to 3 GB/s`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    match unit(key):
        case "fraction":
            return f"{100 * value:.3g}%"
        case "s":
            return f"{1e6 * value:g} us" if value < 1e-3 else f"{1e3 * value:g} ms"
        case "bytes" if value < 1e6:
            return f"{value:,} bytes"
        case "bytes":
            return f"{value / 1e6:,.1f} MB"
        case "bytes/s":
            return f"{value / 1e9:g} GB/s"
        case "FLOP/s":
            return f"{value / 1e12:.3g} TFLOP/s"
        case "GB/s":
            return f"{value[0]:g} to {value[-1]:g} GB/s" if isinstance(value, tuple) else f"{value:g} GB/s"
    return " x ".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


def origin_text(profile: Profile, key: str) -> str:
    """Return the origin of a number as a phrase."""
    origin = profile.origins[key]
    if origin.kind == "earned":
        return _band_text(origin)
    if origin.kind == "kin":
        return f"as {origin.kin}, {origin.kind_of_kin}: {origin.source}"
    return f"{origin.kind}: {origin.source}"


def _band_text(origin: Origin) -> str:
    figures = counted(origin.figures, "measured figure") if origin.figures else "no measured figures"
    widened = f"; {origin.source}" if origin.source else ""
    if origin.figures >= FEW_FIGURES or not origin.kin:
        return f"90th percentile of {figures}{widened}"
    return f"{figures}: from {origin.kin}, widened{widened}"


def _kinds(profile: Profile) -> Counter[str]:
    return Counter(profile.origins[key].kind for key in CONSTANTS)


def print_profile(console: Console, gpu: Gpu, profile: Profile) -> None:
    """Print a row per number (value, meaning, origin), with a table per topic."""
    file = f" with the constants of {profile.own.path}" if profile.own else ""
    paragraph(console, f"{gpu.name}: profile {profile.name}{file}, sources read {profile.date}.", style="bold")
    for title, keys in GROUPS.items():
        table = table_of(title, "value", "what it is, and where it comes from", whole=1)
        for key in keys:
            text = Text(f"{meaning(key)}\n").append(origin_text(profile, key), style="dim")
            table.add_row(key, shown_value(key, getattr(profile, key)), text)
        apart(console, table)
    apart(
        console,
        "Efficiencies are fractions of the vendor's peak. A band is the half width around a prediction within which"
        " measured runs fell; `topoplan validate --bands` derives it.",
        style="dim",
    )


def print_profiles(console: Console) -> None:
    """Print a row per profile."""
    table = table_of("profile", "memory", "time", "constants", "GPUs", whole=1)
    for profile, cards in catalog_profiles():
        table.add_row(profile.name, memory_bands(profile), time_bands(profile), kinds_text(profile), ", ".join(cards))
    console.print(table)
    apart(
        console,
        "memory: error band of a dense model / a mixture of experts / adapters on Megatron / under ddp, deepspeed and"
        " fsdp2. time: of a dense model in bf16 / a mixture of experts / in fp8 / under ddp, deepspeed and fsdp2."
        " `topoplan show profile GPU` shows each number with its source.",
        style="dim",
    )


def memory_bands(profile: Profile) -> str:
    """Return `3% / 5% / 30% / 15%`: dense, mixture of experts, adapters on Megatron, data-parallel backends."""
    return _bands(
        profile.memory_band, profile.moe_memory_band, profile.adapter_memory_band, profile.sharded_memory_band
    )


def time_bands(profile: Profile) -> str:
    """Return `10% / 43% / 22% / 30%`: dense in bf16, mixture of experts, fp8, data-parallel backends."""
    return _bands(profile.time_band, profile.moe_time_band, profile.eight_bit_time_band, profile.sharded_time_band)


def _bands(*bands: float) -> str:
    return " / ".join(f"{100 * band:.0f}%" for band in bands)


def kinds_text(profile: Profile) -> str:
    """Return the number of constants of each kind: `8 published, 3 assumed, 11 kin`."""
    return ", ".join(f"{count} {kind}" for kind, count in _kinds(profile).most_common())


def print_bands(console: Console, bands: Sequence[EarnedBand]) -> None:
    """Print every band as computed from the runs, and as stored in the catalog."""
    table = table_of("profile", "band", right=("figures", "earned", "catalog"), whole=1)
    for band in bands:
        table.add_row(
            band.entry,
            band.key,
            str(band.figures),
            f"{100 * band.value:.0f}%",
            f"{100 * band.stored:.0f}%",
            style=None if abs(band.value - band.stored) < 0.005 else "yellow",
        )
    console.print(table)


def profile_text(gpu: Gpu, profile: Profile) -> str:
    """Return the profile as a YAML file to edit. Bands are comments, so that the usual rule decides them."""
    source = profile.own.source if profile.own else ""
    lines = [
        *_comment(
            f"Calibration constants of {gpu.name}. Change what you measured and delete the rest: constants left out"
            " keep topoplan's values. Use the file with --profile, or as `profile: FILE` in a cluster spec."
        ),
        f"gpu: {gpu.name}",
        f"source: {json.dumps(source or f'topoplan show profile {profile.name}, {profile.date}')}",
    ]
    for title, keys in GROUPS.items():
        constants = [key for key in keys if key not in BANDS]
        lines += ["", f"# --- {title}"] if constants else []
        for key in constants:
            lines += ["", *_comment(meaning(key)), *_comment(origin_text(profile, key))]
            lines.append(f"{key}: {_yaml(profile, key)}")
    lines += [
        "",
        *_comment("Error bands. Left out, they are the GPU's, and wider where a constant differs from the GPU's."),
    ]
    lines += [f"# {key}: {getattr(profile, key):g}" for key in BANDS]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False)


def _yaml(profile: Profile, key: str) -> str:
    value = getattr(profile, key)
    parse = {"s": parse_seconds, "bytes/s": parse_rate}.get(unit(key))
    if parse is not None:
        # Use the human-readable unit if parsing it back gives exactly the same number.
        text = shown_value(key, value).replace(" ", "")
        return text if value and parse(text) == value else f"{value:g}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)
