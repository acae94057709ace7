"""The times measured by `topoplan measure`, as observations of a machine's constants.

Each row is compared with the same formula that plans are timed with. Attention is not used, because PyTorch's own
attention runs other kernels than trainers call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from topoplan.errors import InputError
from topoplan.network.collectives import all_gather_s, all_reduce_s, all_to_all_s
from topoplan.network.placement import Group
from topoplan.operators.machine import elementwise_s, gemm_s
from topoplan.specs import known
from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu_profile import Profile
from topoplan.specs.source import read_source, shown_path

SCHEMA = "topoplan.measure/1"
_COLLECTIVES = {"all-reduce": all_reduce_s, "all-gather": all_gather_s, "all-to-all": all_to_all_s}
_SPREADS = {"matmul": 0.05, "copy": 0.05}
"""Standard deviation of what a formula misses in one size: for matrix products 3.5% in the median
(operators/machine.py)."""
_SPREAD_OF_COLLECTIVES = 0.15
"""Assumed: NCCL chooses among algorithms and protocols by tables of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One measured time."""

    kind: str
    seconds: float
    """Median over the ranks."""
    slowest_s: float
    facts: Mapping[str, int]
    """rows, columns and inner of a matmul; bytes; size and stride of a group; heads, tokens and width of attention."""
    noise: float = 0.0
    """Standard deviation of the logarithm of its prediction."""

    @property
    def is_used(self) -> bool:
        """Whether the time says something about the constants of plans."""
        return self.kind in _SPREADS or self.kind in _COLLECTIVES

    def predicted_s(self, cluster: Cluster, profile: Profile) -> float:
        """Return the seconds by the formulas of plans. Raises KeyError if `is_used` is False."""
        facts, gpu = self.facts, cluster.gpu
        if self.kind == "matmul":
            return gemm_s(facts["rows"], facts["columns"], facts["inner"], gpu, profile, "bf16")
        if self.kind == "copy":
            return elementwise_s(2 * facts["bytes"], gpu, profile)
        group = Group(facts["size"], facts["stride"])
        return _COLLECTIVES[self.kind](group, facts["bytes"], cluster, profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """A file written by `topoplan measure`."""

    name: str
    about: Mapping[str, Any]
    """gpu as the driver calls it, GPUs per node, nodes, versions and clocks."""
    rows: tuple[Timed, ...]

    def check(self, cluster: Cluster) -> None:
        """Raise InputError if the file is of another machine."""
        card = known.gpu_of_driver(str(self.about.get("gpu", "")), None)
        if not self.about.get("gpu"):
            raise InputError("was measured on processors, and tells nothing of GPUs", where=self.name)
        if card is not None and card.name != cluster.gpu.name:
            raise InputError(f"is of {card.name}, and the cluster has {cluster.gpu.name}", where=self.name)
        shape = (self.about.get("nodes"), self.about.get("gpus"))
        if shape != (cluster.nodes, cluster.gpus_per_node):
            what = f"is of {shape[0]} x {shape[1]} GPUs, and the cluster has {cluster.nodes} x {cluster.gpus_per_node}"
            raise InputError(what, where=self.name, remedy="give the spec that was measured")


def is_measures(path: Path) -> bool:
    """Return whether a file was written by `topoplan measure`, by its beginning."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return SCHEMA in file.read(200)
    except OSError:
        return False


def read_measures(path: Path) -> Measures:
    """Return the contents of a file. Raises InputError for a file that `topoplan measure` did not write."""
    source, name = read_source(path), shown_path(path)
    try:
        if source.data["schema"] != SCHEMA:
            raise InputError(f"is no {SCHEMA}", where=name)
        return measures_of(source.data["about"], source.data["rows"], name)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"is not whole: {error}", where=name, remedy="run `topoplan measure` again") from None


def measures_of(about: Mapping[str, Any], rows: Any, name: str) -> Measures:
    """Return measures from the program's rows; noise grows with the sizes of one kind, whose formula's error is one."""
    found = [
        Timed(
            kind=str(row["kind"]),
            seconds=float(row["seconds"]),
            slowest_s=float(row["slowest_s"]),
            facts={key: int(value) for key, value in row.items() if key not in ("kind", "seconds", "slowest_s")},
        )
        for row in rows
    ]
    if any(not (math.isfinite(one.seconds) and one.seconds > 0.0) for one in found):
        raise ValueError("a time that is none")
    alike = Counter(map(_alike, found))
    return Measures(
        name=name,
        about=dict(about),
        rows=tuple(
            replace(one, noise=_SPREADS.get(one.kind, _SPREAD_OF_COLLECTIVES) * math.sqrt(alike[_alike(one)]))
            for one in found
        ),
    )


def _alike(one: Timed) -> tuple[str, int | None, int | None]:
    return one.kind, one.facts.get("size"), one.facts.get("stride")


def measures_to_dict(measures: Measures) -> dict[str, Any]:
    """Return the contents of a file for these measures."""
    rows = measures.rows
    return {
        "schema": SCHEMA,
        "about": dict(measures.about),
        "rows": [{"kind": one.kind, "seconds": one.seconds, "slowest_s": one.slowest_s, **one.facts} for one in rows],
    }
