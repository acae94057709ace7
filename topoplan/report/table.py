"""The table of recipes: JSON (`topoplan.table/1`), CSV, and a text block per number of GPUs."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from topoplan.planner.view import rounded
from topoplan.report.tables import bullets, paragraph, table_of
from topoplan.report.text import counted, gib
from topoplan.specs.gpu import Gpu
from topoplan.specs.model import Model
from topoplan.trainers.trinity.document import trained_positions
from topoplan.trainers.trinity.recipes import Cell
from topoplan.units import gib as in_gib

SCHEMA = "topoplan.table/1"
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
    return {"schema": SCHEMA, "gpu": gpu.name, "cells": [_cell_to_dict(cell) for cell in cells]}


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
        "expandable_segments": None if layout is None else layout.expandable_segments,
        "ulysses": None if layout is None else layout.ulysses,
        "offload": None if layout is None else layout.offload,
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
