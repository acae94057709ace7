"""Interfaces, routes, names and listening ports, as `ip`, `getent` and `ss` print them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from topoplan.hosts.facts import InterfaceFacts, RouteFacts
from topoplan.hosts.sections import number, pairs


def parse_interfaces(text: str, speeds: str = "") -> tuple[InterfaceFacts, ...]:
    """The interfaces of `ip -j addr show`, or of `ip -o addr show` where ip knows no JSON; `speeds` are the
    `interface<TAB>Mb/s` lines of /sys/class/net."""
    mbits = {name: speed for name, value in pairs(speeds) if (speed := number(value)) is not None and speed > 0}

    def facts(name: str, addresses: list[str], mtu: int | None, is_up: bool) -> InterfaceFacts:
        return InterfaceFacts(
            name=name,
            addresses=tuple(addresses),
            mtu_bytes=mtu,
            is_up=is_up,
            speed_bytes_per_s=mbits[name] * 1e6 / 8 if name in mbits else None,
        )

    entries = _json_list(text)
    if entries is None:
        by_name: dict[str, list[str]] = {}
        for line in text.splitlines():
            if match := re.match(r"\d+: +(\S{1,64}) +inet6? ([0-9a-fA-F.:]{2,45})", line, re.ASCII):
                by_name.setdefault(match[1], []).append(match[2])
        # What has an address and is listed is up as far as can be told.
        return tuple(facts(name, addresses, None, True) for name, addresses in by_name.items())
    found = []
    for entry in entries:
        name, flags = entry.get("ifname"), entry.get("flags")
        if not isinstance(name, str):
            continue
        held = entry.get("addr_info")
        addresses = [
            str(one["local"])
            for one in (held if isinstance(held, list) else [])
            if isinstance(one, dict) and "local" in one
        ]
        mtu = entry.get("mtu")
        is_up = entry.get("operstate") == "UP" or (
            entry.get("operstate") == "UNKNOWN" and isinstance(flags, list) and "UP" in flags
        )
        found.append(facts(name, addresses, mtu if isinstance(mtu, int) else None, is_up))
    return tuple(found)


def parse_default_interface(text: str) -> str:
    """The interface of the default route with the lowest metric."""
    entries = _json_list(text)
    if entries is None:
        entries = [_route_words(line) for line in text.splitlines() if line.startswith("default")]

    def metric(entry: Mapping[str, Any]) -> int:
        return number(str(entry.get("metric", 0))) or 0

    devices = [str(entry["dev"]) for entry in sorted(entries, key=metric) if isinstance(entry.get("dev"), str)]
    return devices[0] if devices else ""


def parse_route(text: str) -> RouteFacts | None:
    """One section of the collecting script: the name that was asked for, `getent`'s answer, and `ip route get`'s."""
    names, _, route = text.partition("@route")
    asked = dict(pairs(names)).get("asked")
    if asked is None:
        return None
    resolved = [words[0] for line in names.splitlines()[1:] if (words := line.split()) and _is_address(words[0])]
    if ":" in asked and not resolved:
        resolved = [asked]
    entries = _json_list(route)
    entry: Mapping[str, Any] = (entries or [{}])[0] if entries is not None else _route_words(route)
    return RouteFacts(
        address=asked,
        resolved=tuple(dict.fromkeys(resolved)),
        interface=str(entry.get("dev", "")),
        source=str(entry.get("prefsrc", entry.get("src", ""))),
    )


def parse_listening(text: str) -> frozenset[int]:
    """The ports of `ss -ltn`, or of the `hex` lines that the script makes of /proc/net/tcp."""
    ports: set[int] = set()
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == "hex":
            if match := re.search(r":([0-9A-Fa-f]{4})$", words[2]):
                ports.add(int(match[1], 16))
        elif len(words) > 3 and words[0] == "LISTEN" and (port := number(words[3].rpartition(":")[2])) is not None:
            ports.add(port)
    return frozenset(ports)


def _json_list(text: str) -> list[dict[str, Any]] | None:
    """The blocks of a JSON list; None where it is none. `ip -j` prints nothing at all for an empty list."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None if text.strip() else []
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else None


def _route_words(text: str) -> dict[str, str]:
    """`default via 10.0.0.1 dev eth0 metric 100` as dev -> eth0 and the like."""
    words = text.split()
    return {word: following for word, following in pairwise(words) if word in ("dev", "src", "metric")}


def _is_address(word: str) -> bool:
    return re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3}){3}|[0-9a-fA-F:]*:[0-9a-fA-F:.]*", word, re.ASCII) is not None
