"""Parse RDMA adapters, as the collecting script read them in /sys/class/infiniband, and the output of `ibv_devinfo`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from topoplan.hosts.facts import AdapterFacts
from topoplan.hosts.sections import number, pairs


def parse_adapters(text: str, mtus: Mapping[tuple[str, int], int] | None = None) -> tuple[AdapterFacts, ...]:
    """Return the ports of all adapters, sorted by device and port; `mtus` are those of `parse_mtus`."""
    own: dict[str, dict[str, str]] = defaultdict(dict)
    nets: dict[tuple[str, int], str] = {}
    ports: dict[tuple[str, int], dict[str, str]] = defaultdict(dict)
    gids: dict[tuple[str, int], dict[int, list[str]]] = defaultdict(dict)
    for label, value in pairs(text):
        words = label.split()
        index = number(words[-1]) if words else None
        port = number(words[1]) if len(words) > 2 else None
        if len(words) == 2:
            own[words[0]][words[1]] = value
        elif len(words) == 3 and words[1] == "net" and index is not None:
            nets.setdefault((words[0], index), value)
        elif len(words) == 3 and port is not None:
            ports[words[0], port][words[2]] = value
        elif len(words) == 4 and port is not None and index is not None:
            entry = gids[words[0], port].setdefault(index, ["", "", ""])
            kind = ("gid", "gid_type", "gid_net").index(words[2]) if words[2].startswith("gid") else None
            if kind is not None:
                entry[kind] = value
    return tuple(
        AdapterFacts(
            device=device,
            port=port,
            link_layer=said.get("link_layer", ""),
            state=said.get("state", "").rpartition(":")[2].strip().upper(),
            rate_bytes_per_s=parse_rate(said.get("rate", "")),
            interface=_interface(gids[device, port], nets, device, port),
            numa_node=_numa(own[device].get("numa_node", "")),
            pci_bus=own[device].get("pci", ""),
            gids={index: (gid, kind) for index, (gid, kind, _) in sorted(gids[device, port].items()) if gid},
            active_mtu_bytes=(mtus or {}).get((device, port)),
            traffic_class=_traffic_class(said.get("traffic_class", "")),
        )
        for (device, port), said in sorted(ports.items(), key=lambda item: (_natural(item[0][0]), item[0][1]))
    )


def parse_rate(text: str) -> float | None:
    """Parse `400 Gb/sec (4X NDR)` into bytes per second, each way; None for anything else, or 0."""
    match = re.match(r"\s*([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec", text, re.ASCII)
    return (float(match[1]) * 1e9 / 8 or None) if match else None


def parse_mtus(text: str) -> Mapping[tuple[str, int], int]:
    """Return (device, port) -> active MTU in bytes, from `ibv_devinfo`."""
    found: dict[tuple[str, int], int] = {}
    device, port = "", 0
    for line in text.splitlines():
        if match := re.match(r"\s*hca_id:\s*(\S{1,64})", line):
            device, port = match[1], 0
        elif match := re.match(r"\s*port:\s*(\d{1,4})\s*$", line, re.ASCII):
            port = int(match[1])
        elif (match := re.match(r"\s*active_mtu:\s*(\d{1,6})", line, re.ASCII)) and device and port:
            found[device, port] = int(match[1])
    return found


def _interface(gids: Mapping[int, list[str]], nets: Mapping[tuple[str, int], str], device: str, port: int) -> str:
    """Return the interface that the port's GIDs belong to (e.g. a bond), else that of the same function and port."""
    return next((net for _, (_, _, net) in sorted(gids.items()) if net), "") or nets.get((device, port - 1), "")


def _traffic_class(text: str) -> int | None:
    """Parse `Global tclass=106`, which NVIDIA's driver shows for a port with tc/PORT/traffic_class set."""
    match = re.match(r"\s*Global tclass=(\d{1,3})\b", text, re.ASCII)
    return int(match[1]) if match and int(match[1]) < 256 else None


def _numa(text: str) -> int | None:
    """Return the NUMA node; -1 means that the firmware does not know it."""
    node = number(text)
    return node if node is not None and node >= 0 else None


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts mlx5_2 before mlx5_10."""
    return [(int(part) if part.isdigit() and part.isascii() else -1, part) for part in re.split(r"(\d+)", name[:64])]
