"""Parse a machine's network: interfaces, routes, names, listening ports and RDMA adapters.

Their sources are `ip`, `getent`, /proc/net/tcp, `ibv_devinfo`, and /sys/class/infiniband as the script reads it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from topoplan.hosts.facts import AdapterFacts, InterfaceFacts, RouteFacts
from topoplan.hosts.sections import address_of, number, pairs


def parse_interfaces(text: str, speeds: str = "") -> tuple[InterfaceFacts, ...]:
    """Parse `ip -j addr show`; `speeds` are the `interface<TAB>Mb/s` lines of /sys/class/net."""
    mbits = {name: speed for name, value in pairs(speeds) if (speed := number(value)) is not None and speed > 0}
    found = []
    for entry in _json_list(text):
        name, flags, held, mtu = (entry.get(key) for key in ("ifname", "flags", "addr_info", "mtu"))
        if not isinstance(name, str):
            continue
        addresses = [one.get("local") for one in (held if isinstance(held, list) else []) if isinstance(one, dict)]
        is_up = entry.get("operstate") == "UP" or (
            entry.get("operstate") == "UNKNOWN" and isinstance(flags, list) and "UP" in flags
        )
        found.append(
            InterfaceFacts(
                name=name,
                addresses=tuple(str(one) for one in addresses if one is not None),
                mtu_bytes=mtu if isinstance(mtu, int) else None,
                is_up=is_up,
                speed_bytes_per_s=mbits[name] * 1e6 / 8 if name in mbits else None,
            )
        )
    return tuple(found)


def parse_default_interface(text: str) -> str:
    """Return the interface of the default route with the lowest metric."""

    def metric(entry: Mapping[str, Any]) -> int:
        return number(str(entry.get("metric", 0))) or 0

    entries = sorted(_json_list(text), key=metric)
    return next((str(entry["dev"]) for entry in entries if isinstance(entry.get("dev"), str)), "")


def parse_route(text: str) -> RouteFacts | None:
    """Parse a route section of the collecting script: the requested name, the output of `getent` and `ip route get`."""
    names, _, route = text.partition("@route")
    asked = dict(pairs(names)).get("asked")
    if asked is None:
        return None
    resolved = [words[0] for line in names.splitlines()[1:] if (words := line.split()) and address_of(words[0])]
    if ":" in asked and not resolved:
        resolved = [asked]
    entry: Mapping[str, Any] = next(iter(_json_list(route)), {})
    return RouteFacts(
        address=asked,
        resolved=tuple(dict.fromkeys(resolved)),
        interface=str(entry.get("dev", "")),
        source=str(entry.get("prefsrc", entry.get("src", ""))),
    )


def parse_listening(text: str) -> frozenset[int]:
    """Return the ports of addresses in the format of /proc/net/tcp: `0100007F:733C`."""
    return frozenset(int(port, 16) for port in re.findall(r":([0-9A-Fa-f]{4})$", text, re.MULTILINE))


def _json_list(text: str) -> list[dict[str, Any]]:
    """Return the objects of a JSON list; `ip -j` prints nothing at all for an empty list."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def parse_adapters(text: str, mtus: Mapping[tuple[str, int], int] | None = None) -> tuple[AdapterFacts, ...]:
    """Return the ports of all RDMA adapters, sorted by device and port; `mtus` are those of `parse_mtus`."""
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
