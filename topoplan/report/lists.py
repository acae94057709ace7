"""What `topoplan show` lists: models and GPUs of the catalog, and the table of recipes."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from topoplan.catalog import gpu_names, model_names
from topoplan.operators.params import parameter_count
from topoplan.planner.view import rounded
from topoplan.report.tables import Column, bullets, fitting, paragraph, table_of
from topoplan.report.text import billions, counted, gib, significant
from topoplan.specs.gpu import Gpu
from topoplan.specs.known import gpu, model
from topoplan.specs.model import LatentAttention, LinearAttention, Model, Moe
from topoplan.trainers.trinity.document import trained_positions
from topoplan.trainers.trinity.recipes import Cell
from topoplan.units import gib as in_gib


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
    contexts = [entry["max_position_embeddings"] for entry in entries]
    columns = fitting(
        [
            Column(header="type", cells=tuple(entry["model_type"] for entry in entries), left=True, drop=2),
            Column(header="size", cells=tuple(billions(entry["parameters"]) for entry in entries)),
            Column(header="context", cells=tuple(f"{one:,}" if one else "-" for one in contexts), drop=1),
            Column(header="kind", cells=tuple(map(_kind, entries)), left=True),
        ],
        console.width - max(len(entry["name"]) for entry in entries),
    )
    table = table_of("name", whole=1)
    for column in columns:
        table.add_column(column.header, justify="left" if column.left else "right")
    for number, entry in enumerate(entries):
        table.add_row(entry["name"], *(column.cells[number] for column in columns))
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


COLUMNS = ("gpus", "max_model_len", "model", "cell")
"""Columns of the CSV."""
_LEGEND = (
    "vanilla: the trainer's defaults.",
    "Env: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, set before Ray is started.",
    "SP=N: ulysses_sequence_parallel_size: N.",
    "Offload: trainer_strategy fsdp2 with offload_policy, and save_hf_checkpoint: never.",
)


def short_name(model: Model) -> str:
    """Return the model's name without its organization."""
    return model.name.rpartition("/")[2]


def table_to_dict(gpu: Gpu, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return every cell, with its recipe's settings and the memory it needs."""
    return {"schema": "topoplan.table/1", "gpu": gpu.name, "cells": [_cell_to_dict(cell) for cell in cells]}


def _cell_to_dict(cell: Cell) -> dict[str, Any]:
    layout, memory, factor = cell.layout, cell.memory, cell.yarn_factor
    (stage,) = memory.by_stage
    live = {moment.name: moment.total_bytes for moment in stage.moments}
    peak = max(live, key=live.__getitem__)
    always = memory.allocated_bytes - live[peak]
    return {
        "gpus": cell.gpus,
        "max_model_len": cell.max_model_len,
        "model": cell.model.name,
        "cell": cell.recipe,
        "fits": layout is not None,
        **{key: getattr(layout, key, None) for key in ("expandable_segments", "ulysses", "offload")},
        "yarn_factor": None if factor is None else rounded(factor),
        "memory": {
            "device_gib": rounded(in_gib(memory.device_bytes)),
            "capacity_gib": rounded(in_gib(memory.capacity_bytes - memory.margin_bytes)),
            "host_gib": rounded(in_gib(stage.host_bytes)),
            "peak": peak,
            "moments_gib": {name: rounded(in_gib(always + size)) for name, size in live.items()},
            "stranded_gib": rounded(in_gib(memory.reserved_bytes - memory.allocated_bytes)),
            "context_gib": rounded(in_gib(memory.device_bytes - memory.reserved_bytes)),
        },
    }


def write_csv(stream: TextIO, cells: Sequence[Cell]) -> None:
    """Write a header, and a row for every cell."""
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((cell.gpus, cell.max_model_len, short_name(cell.model), cell.recipe) for cell in cells)


def print_table(console: Console, gpu: Gpu, cells: Sequence[Cell]) -> None:
    """Print a block per number of GPUs, with a row per context length and a column per model."""
    card = f"{gpu.name} ({gib(gpu.memory_bytes)} GiB)"
    for gpus, block in groupby(cells, key=lambda cell: cell.gpus):
        paragraph(console, f"{counted(gpus, 'GPU')}, {card}", style="bold")
        console.print(_block(list(block)))
        console.print()
    bullets(console, _LEGEND)
    stretched = [cell.model for cell in cells if cell.yarn_factor is not None]
    if stretched:
        own, trained = (
            " or ".join(f"{count:,}" for count in sorted({positions(model) for model in stretched}))
            for positions in (attrgetter("max_position_embeddings"), trained_positions)
        )
        yarn = f"model.rope_scaling of type yarn, factor = max_model_len / {trained}"
        bullets(console, [f"*: longer than the model's own {own}: {yarn}."])


def _block(cells: Sequence[Cell]) -> Table:
    models = list(dict.fromkeys(short_name(cell.model) for cell in cells))
    table = table_of(right=["max_model_len"], last=models)
    for context, of_context in groupby(cells, key=lambda cell: cell.max_model_len):
        row = list(of_context)
        mark = "* " if any(cell.yarn_factor is not None for cell in row) else ""
        table.add_row(f"{mark}{context:,}", *(cell.recipe for cell in row))
    return table
