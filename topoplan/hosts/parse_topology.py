"""Parse the matrix of `nvidia-smi topo -m`: the kind of path between each two devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # the header is underlined, even in a pipe
_LINK = re.compile(r"NV\d{1,3}|PIX|PXB|PHB|NODE|SYS|SOC|C2C|N/A|X")
_DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}\d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The contents of the matrix."""

    links: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(device, device) -> NV18, PIX, PXB, PHB, NODE, SYS. GPUs are `GPU0`; NICs have their device names."""
    numa_nodes: Mapping[int, int] = field(default_factory=dict)
    """GPU index -> NUMA node."""


def parse_topology(text: str) -> Topology:
    """Parse the matrix of any driver since 2014.

    NICs may be columns with their own names or NIC0 with a legend below, separators may be tabs or blanks, and columns
    may have run into each other (`SYSSYS`).
    """
    lines = [_ESCAPE.sub("", line) for line in text.splitlines()]
    legend = [re.fullmatch(r"\s*(NIC\d+): +(\S{1,64})\s*", line, re.ASCII) for line in lines]
    names = {match[1]: match[2] for match in legend if match}
    devices: list[str] = []
    links: dict[tuple[str, str], str] = {}
    numa_nodes: dict[int, int] = {}
    for line in lines:
        words = line.split()
        if not devices:
            head = re.split(r"\s*(?:CPU|NUMA|GPU NUMA) ", line, maxsplit=1)[0].split()
            if head and head[0] == "GPU0" and all(_DEVICE.fullmatch(word) for word in head):
                devices = head
            continue
        if not words or words[0] not in devices:
            continue
        cells, rest = _cells(line[line.index(words[0]) + len(words[0]) :], len(devices))
        if len(cells) != len(devices):
            continue
        own = names.get(words[0], words[0])
        for device, cell in zip(devices, cells, strict=True):
            if device != words[0] and cell not in ("X", "N/A"):
                links[own, names.get(device, device)] = "SYS" if cell == "SOC" else cell
        gpu = re.fullmatch(r"GPU(\d{1,4})", words[0], re.ASCII)
        # After the links come the CPUs, then the NUMA nodes; for a Grace CPU, the first one is the node with the CPUs.
        after = rest.split()
        if gpu and len(after) > 1 and (node := re.match(r"\d{1,4}\b", after[1], re.ASCII)):
            numa_nodes[int(gpu[1])] = int(node[0])
    return Topology(links=links, numa_nodes=numa_nodes)


def _cells(text: str, count: int) -> tuple[list[str], str]:
    """Return the first `count` links of a row, and the rest of the row."""
    cells: list[str] = []
    position = 0
    while len(cells) < count:
        position += len(text[position:]) - len(text[position:].lstrip())
        match = _LINK.match(text, position)
        if match is None:
            break
        cells.append(match[0])
        position = match.end()
    return cells, text[position:]
