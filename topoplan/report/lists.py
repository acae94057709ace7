"""Lists of the catalog's models and GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from topoplan.catalog import gpu_names, model_names
from topoplan.operators.params import parameter_count
from topoplan.report.tables import table_of
from topoplan.report.text import billions, gib, significant
from topoplan.specs.known import gpu, model
from topoplan.specs.model import LatentAttention, LinearAttention, Model, Moe


def model_entries() -> list[dict[str, Any]]:
    """Return an entry for every model in the catalog."""
    return [_model_entry(model(name)) for name in model_names()]


def _model_entry(entry: Model) -> dict[str, Any]:
    routed = [layer.ffn for layer in entry.layers if isinstance(layer.ffn, Moe)]
    return {
        "name": entry.name,
        "model_type": entry.model_type,
        "parameters": parameter_count(entry),
        "layers": entry.num_layers,
        "hidden_size": entry.hidden_size,
        "vocab_size": entry.vocab_size,
        "experts": routed[0].experts if routed else 0,
        "experts_per_token": routed[0].experts_per_token if routed else 0,
        "attention": sorted({_attention_kind(layer.attention) for layer in entry.layers}),
        "vision": entry.vision is not None,
        "max_position_embeddings": entry.max_position_embeddings,
    }


def _attention_kind(attention: object) -> str:
    if isinstance(attention, LatentAttention):
        return "latent"
    return "linear" if isinstance(attention, LinearAttention) else "softmax"


def print_models(console: Console, entries: Sequence[Mapping[str, Any]]) -> None:
    """Print one row per model."""
    table = table_of("name", "type", right=("size", "context"), last=("kind",), whole=1)
    for entry in entries:
        context = entry["max_position_embeddings"]
        table.add_row(
            entry["name"],
            entry["model_type"],
            billions(entry["parameters"]),
            f"{context:,}" if context else "-",
            _kind(entry),
        )
    console.print(table)


def _kind(entry: Mapping[str, Any]) -> str:
    words = [f"MoE {entry['experts_per_token']}/{entry['experts']}"] if entry["experts"] else ["dense"]
    words += [kind for kind in entry["attention"] if kind != "softmax"]
    return ", ".join(words + ["vision"] * entry["vision"])


def gpu_entries() -> list[dict[str, Any]]:
    """Return every GPU in the catalog, in bytes, FLOP/s and bytes per second, one way."""
    return [asdict(gpu(name)) for name in gpu_names()]


def print_gpus(console: Console, entries: Sequence[Mapping[str, Any]]) -> None:
    """Print one row per GPU in vendors' units: NVLink as both directions together, networks in bits."""
    right = ("memory\nGiB", "TB/s", "bf16\nTFLOP/s", "fp8\nTFLOP/s", "NVLink\nGB/s", "NICs\nGb/s")
    table = table_of("name", right=right, whole=1)
    for entry in entries:
        nvlink = 2 * entry["nvlink_bytes_per_s"] / 1e9
        table.add_row(
            entry["name"],
            gib(entry["memory_bytes"]),
            significant(entry["memory_bytes_per_s"] / 1e12),
            f"{entry['bf16_flops'] / 1e12:,.0f}",
            f"{entry['fp8_flops'] / 1e12:,.0f}" if entry["fp8_flops"] else "-",
            f"{nvlink:,.0f}" if nvlink else "-",
            f"{entry['nics_per_node']} x {8 * entry['nic_bytes_per_s'] / 1e9:,.0f}",
        )
    console.print(table)
