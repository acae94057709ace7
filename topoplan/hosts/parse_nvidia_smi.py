"""Parse the output of nvidia-smi: the cards, the processes on them, their NVLinks, and the paths between devices.

A value that a card or a driver does not provide is written `N/A`, `[N/A]`, `[Not Supported]`, `[Unknown Error]` or
`[Insufficient Permissions]`, and becomes None.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import replace

from topoplan.hosts.facts import GpuFacts, GpuProcess
from topoplan.hosts.sections import number

_MIB = 2**20
# Rate of a PCI Express lane, each way, after encoding: 2.5 and 5 GT/s at 8b/10b, 8 to 32 GT/s at 128b/130b, 64 GT/s in
# flits of 242 of 256 bytes (PCI Express Base Specification 6.0, section 1.2 and 4.2.3).
_LANE_BYTES_PER_S = {
    1: 0.25e9,
    2: 0.5e9,
    3: 8e9 / 8 * 128 / 130,
    4: 16e9 / 8 * 128 / 130,
    5: 32e9 / 8 * 128 / 130,
    6: 64e9 / 8 * 242 / 256,
}
# Rates that vendors quote for a link, each way. The driver shows the signaling rate, which is slightly higher: 25.781
# for NVLink 2, 26.562 for NVLink 4, 53.125 for NVLink 5.
_LINK_GB_PER_S = (20.0, 25.0, 50.0, 100.0)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # the header is underlined, even in a pipe
_LINK = re.compile(r"NV\d{1,3}|PIX|PXB|PHB|NODE|SYS|SOC|C2C|N/A|X")
_DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}\d")


def parse_gpus(text: str) -> tuple[GpuFacts, ...]:
    """Parse the cards of `nvidia-smi --query-gpu=... --format=csv`, sorted by index."""
    found: dict[int, GpuFacts] = {}
    for row in _rows(text):
        index, name = number(row.get("index", "")), row.get("name", "")
        if index is None or not name or index in found:
            continue
        utilization = _quantity(row.get("utilization.gpu", ""), "%")
        found[index] = GpuFacts(
            index=index,
            name=name,
            uuid=_known(row.get("uuid", "")),
            memory_bytes=_mib(row.get("memory.total", "")),
            memory_used_bytes=_mib(row.get("memory.used", "")),
            mig=row.get("mig.mode.current", "").lower() == "enabled",
            pci_bus=pci_address(row.get("pci.bus_id", "")),
            pcie_bytes_per_s=_pcie(row.get("pcie.link.gen.max", ""), row.get("pcie.link.width.max", "")),
            utilization=None if utilization is None else utilization / 100,
        )
    return tuple(found[index] for index in sorted(found))


def parse_driver(text: str) -> str:
    """Return the driver's version from the output that `parse_gpus` reads, or an empty string."""
    return next((version for row in _rows(text) if (version := _known(row.get("driver_version", "")))), "")


def parse_processes(text: str) -> tuple[GpuProcess, ...]:
    """Parse the processes of `nvidia-smi --query-compute-apps=... --format=csv`, with `ps` output below `@owners`."""
    table, _, owners = text.partition("@owners")
    known: dict[int, tuple[str, int | None]] = {}
    for line in owners.splitlines():
        words = line.split()
        if len(words) == 3 and (pid := number(words[0])) is not None:
            known[pid] = (words[1], number(words[2]))
    found = []
    for row in _rows(table):
        if (pid := number(row.get("pid", ""))) is None:
            continue
        user, age_s = known.get(pid, ("", None))
        found.append(
            GpuProcess(
                pid=pid,
                gpu_uuid=_known(row.get("gpu_uuid", "")),
                memory_bytes=_mib(row.get("used_gpu_memory", row.get("used_memory", ""))),
                name=_known(row.get("process_name", "")),
                user=user,
                age_s=age_s,
            )
        )
    return tuple(found)


def parse_nvlink(text: str) -> Mapping[int, tuple[int, float]]:
    """Return the number of active links and their total rate, each way, by card, from `nvidia-smi nvlink -s`.

    Rates are those that vendors quote: 25 GB/s for a link whose signaling rate the driver shows as 26.562 GB/s.
    """
    found: dict[int, tuple[int, float]] = {}
    card: int | None = None
    for line in text.splitlines():
        if head := re.match(r"\s*GPU (\d{1,4}):", line, re.ASCII):
            card = int(head[1])
            found.setdefault(card, (0, 0.0))
        elif card is not None and (link := re.match(r"\s*Link \d+: ([0-9.]{1,12}) GB/s", line, re.ASCII)):
            rate = _quantity(link[1], "")
            if rate:
                count, total = found[card]
                found[card] = (count + 1, total + _quoted(rate) * 1e9)
    return found


def with_nvlink(gpus: tuple[GpuFacts, ...], links: Mapping[int, tuple[int, float]]) -> tuple[GpuFacts, ...]:
    """Return the cards with their links; a card that is not in `links` is unchanged."""
    return tuple(
        replace(gpu, nvlink_count=links[gpu.index][0], nvlink_bytes_per_s=links[gpu.index][1])
        if gpu.index in links
        else gpu
        for gpu in gpus
    )


def pci_address(text: str) -> str:
    """Convert nvidia-smi's `00000000:18:00.0` to the form of sysfs, `0000:18:00.0`."""
    match = re.fullmatch(r"(?:[0-9a-f]{4})?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])", text.strip().lower())
    return match[1] if match else ""


def _rows(text: str) -> list[dict[str, str]]:
    """Return the lines below the first header as column -> value; the units of the header (`[MiB]`) are dropped."""
    columns: list[str] = []
    rows: list[dict[str, str]] = []
    for line in text.splitlines():
        # Parsed line by line: a stray quotation mark must not swallow the rest.
        try:
            cells = [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True), [])]
        except csv.Error:
            continue
        if not columns:
            names = [cell.partition(" [")[0].lower() for cell in cells]
            columns = names if names and names[0] in ("index", "pid") else []
        elif len(cells) >= len(columns):
            # Only the last column, the process name, may contain a comma.
            cells[len(columns) - 1 :] = [", ".join(cells[len(columns) - 1 :])]
            rows.append(dict(zip(columns, cells, strict=True)))
    return rows


def _known(text: str) -> str:
    """Return `text`, or an empty string if it means that there is no value."""
    return "" if text.startswith("[") or text.upper() in ("N/A", "NONE", "ERR!", "UNKNOWN") else text


def _quantity(text: str, unit: str) -> float | None:
    match = re.fullmatch(rf"([0-9]{{1,12}}(?:\.[0-9]{{1,6}})?)\s*{re.escape(unit)}", text.strip(), re.ASCII)
    return float(match[1]) if match else None


def _mib(text: str) -> int | None:
    value = _quantity(text, "MiB")
    return None if value is None else round(value * _MIB)


def _pcie(generation: str, width: str) -> float | None:
    lane, lanes = _LANE_BYTES_PER_S.get(number(generation) or 0), number(width)
    return lane * lanes if lane and lanes and 0 < lanes <= 32 else None


def _quoted(gb_per_s: float) -> float:
    near = [quoted for quoted in _LINK_GB_PER_S if 0.95 * quoted <= gb_per_s <= 1.1 * quoted]
    return near[0] if near else gb_per_s


def parse_topology(text: str) -> tuple[Mapping[tuple[str, str], str], Mapping[int, int]]:
    """Parse the matrix of `nvidia-smi topo -m` of any driver since 2014: the kind of path between each two devices.

    Return (device, device) -> NV18, PIX, PXB, PHB, NODE, SYS, with GPUs as `GPU0` and NICs by their device names, and
    GPU index -> NUMA node. NICs may be columns with their own names or NIC0 with a legend below, separators may be tabs
    or blanks, and columns may have run into each other (`SYSSYS`).
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
    return links, numa_nodes


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
