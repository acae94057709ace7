"""Timings from `topoplan measure`, as the file that `calibrate` reads and as a table."""

from __future__ import annotations

import json

from rich.console import Console

from topoplan.planner.measures import Measures, Timed, measures_to_dict
from topoplan.report.tables import apart, paragraph, table_of
from topoplan.report.text import counted, significant
from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu_profile import profile_of

_MIB, _GIGA, _TERA = 2**20, 1e9, 1e12


def measures_text(measures: Measures) -> str:
    """Return the timings as the text of a file."""
    return json.dumps(measures_to_dict(measures), indent=1) + "\n"


def print_measures(console: Console, measures: Measures, cluster: Cluster) -> None:
    """Print a line per timing, next to the prediction of the cost model."""
    about = measures.about
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "cuda", "nccl") if about.get(name))
    gpus = f"{about.get('nodes')} x {about.get('gpus')} {about.get('gpu') or 'processors'}"
    paragraph(console, f"{gpus}; {versions}. {counted(len(measures.rows), 'measurement')}.")
    console.print()
    profile = profile_of(cluster.gpu)
    is_of_gpus = bool(about.get("gpu"))
    table = table_of("what", "size", right=("time", "slowest", "rate", "predicted", "error"))
    for one in measures.rows:
        predicted = one.predicted_s(cluster, profile) if one.is_used and is_of_gpus else None
        table.add_row(
            one.kind,
            _size(one),
            _time(one.seconds),
            _time(one.slowest_s),
            _rate(one),
            "" if predicted is None else _time(predicted),
            "" if predicted is None else f"{100 * (predicted / one.seconds - 1):+.0f}%",
        )
    console.print(table)
    apart(
        console,
        "time: median over the ranks; slowest: the slowest rank. rate: operations, or bytes copied or held by a rank of"
        " the group, per second. predicted: with the constants of the catalog; attention has no prediction here,"
        " because trainers call other kernels."
        if is_of_gpus
        else "Measured on CPUs: it shows that the measurement works, and says nothing about GPUs.",
        style="dim",
    )


def _size(one: Timed) -> str:
    facts = one.facts
    if one.kind == "matmul":
        return f"{facts['rows']:,} x {facts['columns']:,} x {facts['inner']:,}"
    if "heads" in facts:
        return f"{facts['heads']} heads of {facts['width']}, {facts['tokens']:,} tokens"
    size = f"{facts['bytes'] / _MIB:.3g} MiB"
    if "size" not in facts:
        return size
    where = "next to each other" if facts["stride"] == 1 else f"{facts['stride']} apart"
    return f"{size}, {facts['size']} ranks {where}"


def _time(seconds: float) -> str:
    return f"{significant(1e3 * seconds)} ms"


def _rate(one: Timed) -> str:
    facts = one.facts
    if one.kind == "matmul":
        flops = 2.0 * facts["rows"] * facts["columns"] * facts["inner"]
        return f"{significant(flops / one.seconds / _TERA)} TFLOP/s"
    if "heads" in facts:
        products = 2.0 if one.kind == "attention" else 7.0  # the backward pass has two and a half times as many
        flops = products * facts["heads"] * facts["tokens"] ** 2 * facts["width"]
        return f"{significant(flops / one.seconds / _TERA)} TFLOP/s"
    return f"{significant(facts['bytes'] / one.seconds / _GIGA)} GB/s"
