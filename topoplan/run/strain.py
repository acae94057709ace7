"""What may be slowing a node down, as reported by its host: GPU clocks, contention for CPUs, waits for disks.

All ranks wait for the slowest in every step, so their logs show the same times, and only the hosts know which node it
is. Reported is what one node shows and the others do not, or what no healthy machine shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from topoplan.errors import HostError
from topoplan.remote.connection import Connection
from topoplan.remote.fanout import run_on_all
from topoplan.run import programs
from topoplan.run.node import key_values
from topoplan.units import named

_DEADLINE_S = 40.0
_SLOWER = 0.9
"""A GPU is slow below this fraction of the other GPUs' clock: cards of one kind differ by less under the same work."""
_IDLE = 0x1
_SLOWDOWNS = {
    0x80: "power brake by the power supply",
    0x40: "thermal slowdown by the hardware",
    0x20: "thermal slowdown by the driver",
    0x8: "slowed down by the hardware",
    0x4: "at its power limit",
}
"""Bits of nvml.h, nvmlClocksEventReasons; specific ones before general ones."""
_CROWDED = 1.25
"""Runnable processes per CPU."""
_WAITS = {"io": (20.0, "a disk or a file system"), "memory": (10.0, "host memory")}
"""Section of /proc/pressure -> percent of a minute that are too many, and what was waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU under load."""

    index: int
    mhz: float
    """Highest clock among several samples."""
    reasons: int
    """Reasons for throttling, as bits; the union of all samples."""
    celsius: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """The load of one machine."""

    load: float = 0.0
    """Running and runnable processes, averaged over the last minute."""
    cpus: int = 1
    waits: Mapping[str, float]
    """Percentage of the last minute during which some process waited for `io` or for `memory`."""
    gpus: Sequence[Gpu] = ()
    """The GPUs under load."""


def load_texts(connections: Mapping[str, Connection]) -> list[str]:
    """Ask hosts, keyed by node name, and describe what stands out; a host that does not answer is left out."""
    if not connections:
        return []
    found = run_on_all(
        connections,
        lambda node, host: parse_load(key_values(host.run(programs.STRAIN, deadline_s=_DEADLINE_S))),
        deadline_s=_DEADLINE_S + 1.0,
    )
    return list(conspicuous({node: one for node, one in found.items() if not isinstance(one, HostError)}))


def parse_load(values: Mapping[str, str]) -> HostLoad:
    """Parse the output of strain.sh."""
    looks: dict[int, list[list[str]]] = {}
    for key, value in values.items():
        if match := re.fullmatch(r"gpu\.([0-9]{1,4})\.[0-9]", key):
            looks.setdefault(int(match[1]), []).append([word.strip() for word in value.split(",")])
    waits = {key: _number(values.get(key, ""), r"avg60=([0-9.]+)") or 0.0 for key in _WAITS}
    return HostLoad(
        load=_number(values.get("load", ""), r"([0-9.]+)") or 0.0,
        cpus=max(1, int(_number(values.get("cpus", ""), r"([0-9]+)") or 1)),
        waits=waits,
        gpus=[gpu for index, words in sorted(looks.items()) if (gpu := _gpu(index, words))],
    )


def _gpu(index: int, looks: Sequence[Sequence[str]]) -> Gpu | None:
    clocks = [mhz for words in looks if (mhz := _number(words[0], r"([0-9.]+)"))]
    reasons = [int(words[1], 16) for words in looks if len(words) > 1 and re.fullmatch("0x[0-9a-fA-F]+", words[1])]
    if not clocks or (reasons and all(bits & _IDLE for bits in reasons)):
        return None
    heat = _number(looks[-1][2], r"([0-9.]+)") if len(looks[-1]) > 2 else None
    together = 0
    for bits in reasons:
        together |= bits
    return Gpu(index=index, mhz=max(clocks), reasons=together, celsius=heat)


def _number(text: str, pattern: str) -> float | None:
    found = re.search(pattern, text)
    try:
        return float(found[1]) if found else None
    except ValueError:
        return None


def conspicuous(loads: Mapping[str, HostLoad]) -> Iterator[str]:
    """Describe what is wrong, one line per node and finding."""
    clocks = [gpu.mhz for load in loads.values() for gpu in load.gpus]
    usual = median(clocks) if clocks else 0.0
    for node, load in loads.items():
        slow = [gpu for gpu in load.gpus if gpu.mhz < _SLOWER * usual]
        if slow:
            slowest = min(slow, key=lambda gpu: gpu.mhz)
            many = f"GPU{'s' * (len(slow) > 1)} {named((str(gpu.index) for gpu in slow), 8)}"
            runs = f"run{'s' * (len(slow) == 1)} at {slowest.mhz:,.0f} MHz{_why(slowest)}"
            yield f"{node}: {many} {runs}, the others at {usual:,.0f} MHz, and all wait for the slowest"
        hot = [gpu for gpu in load.gpus if gpu not in slow and gpu.reasons & 0xE8]
        if hot:
            yield f"{node}: GPU {named((str(gpu.index) for gpu in hot), 8)} is slowed down{_why(hot[0])}"
    crowds = {node: load.load / load.cpus for node, load in loads.items()}
    for node, load in loads.items():
        if crowds[node] > _CROWDED and (len(crowds) == 1 or crowds[node] > 2.0 * min(crowds.values())):
            yield f"{node}: {load.load:.0f} runnable processes compete for its {load.cpus} CPUs"
        for key, (most, what) in _WAITS.items():
            if load.waits[key] >= most:
                yield f"{node}: processes waited for {what} during {load.waits[key]:.0f}% of the last minute"


def _why(gpu: Gpu) -> str:
    reason = next((words for bit, words in _SLOWDOWNS.items() if gpu.reasons & bit), "")
    heat = f"{gpu.celsius:.0f} °C" if gpu.celsius else ""
    words = ", ".join(filter(None, (reason, heat)))
    return f" ({words})" if words else ""
