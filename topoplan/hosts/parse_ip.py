"""Parse interfaces, routes, names and listening ports from the output of `ip`, `getent` and /proc/net/tcp."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from topoplan.hosts.facts import InterfaceFacts, RouteFacts
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
