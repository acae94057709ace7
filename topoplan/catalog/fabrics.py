"""What each kind of network between nodes asks of a host, and how the machines of clouds are known: `fabrics.json`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from topoplan.catalog import load

FabricKind = Literal["infiniband", "roce", "efa", "tcpxo", "ethernet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Files that have to be on every host before NCCL can use the network as planned."""

    use: Literal["library", "profile", "path"]
    """A plugin, whose directory the loader has to know; a script of settings that is read; a path that is exported."""
    variable: str
    """What names another plugin; what the script reads its directory from; what holds the path."""
    what: str
    """In Markdown, for who sets the hosts up; without a full stop."""
    why: str
    """In one phrase, for the script."""
    paths: tuple[str, ...]
    """Any of these will do."""
    missing: str
    """What to say where none is there, in one phrase."""
    remedy: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A kind of machine of a cloud."""

    name: str
    """With its article: `an A3 Mega machine of Google Cloud`."""
    firmware: tuple[tuple[str, str], ...]
    """Files of /sys/class/dmi/id, and what they hold on such a machine."""
    pci: tuple[str, ...]
    """PCI devices (`vendor:device`, hexadecimal), any of which it has."""
    kind: FabricKind | None = None
    """Of its network, where that cannot be seen from its adapters alone."""
    topology_file: str | None = None
    """Where the vendor's own images have it."""
    remedy: str = ""
    """How that file gets onto a machine that has none."""
    nics: int | None = None
    """NICs of the GPUs, where they are no RDMA adapters."""
    nic_bytes_per_s: float | None = None
    """Of one of them, each way, as the vendor says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """A program that has to run on every host beside the run."""

    name: str
    """Of its executable."""
    missing: str
    remedy: str


def _table() -> Mapping[str, Any]:
    return load("fabrics.json")


def fabric_name(kind: FabricKind) -> str:
    """The name of a kind of network: `RoCE`."""
    return str(_table()["kinds"][kind]["name"])


def link_layers(kind: FabricKind) -> frozenset[str]:
    """What /sys/class/infiniband calls the link layer of its adapters; none where they are no RDMA adapters."""
    return frozenset(_table()["kinds"][kind]["link_layers"])


def kind_of_link_layer(layer: str) -> FabricKind | None:
    """The kind of network whose adapters have that link layer."""
    kinds: tuple[FabricKind, ...] = get_args(FabricKind)
    return next((kind for kind in kinds if layer in link_layers(kind)), None)


@cache
def needs_of_kind(kind: FabricKind) -> tuple[Need, ...]:
    """What a kind of network asks of a host."""
    return tuple(Need(**{**row, "paths": tuple(row["paths"])}) for row in _table()["kinds"][kind]["needs"])


@cache
def daemon_of_kind(kind: FabricKind) -> Daemon | None:
    """The program that a kind of network wants to run beside the run; None where there is none."""
    row = _table()["kinds"][kind].get("daemon")
    return None if row is None else Daemon(name=row["name"], missing=row["missing"], remedy=row["remedy"])


def topology_file(path: str) -> Need:
    """The need of a topology file at that path."""
    row = _table()["topology_file"]
    remedies = (machine.remedy for machine in machines() if machine.topology_file == path)
    remedy = next(remedies, row["remedy"])
    own = {"what": f"{row['what']}, `{path}`: {remedy}", "missing": f"{row['missing']} at {path}", "remedy": remedy}
    return Need(**{**row, **own, "paths": (path,)})


@cache
def machines() -> tuple[Machine, ...]:
    """The machines that are known."""
    return tuple(
        Machine(
            name=row["name"],
            firmware=tuple(row["firmware"].items()),
            pci=tuple(row["pci"]),
            **row["fabric"],
            remedy=row.get("remedy", ""),
            nics=row.get("nics"),
            nic_bytes_per_s=row["nic_gbit_per_s"] * 1e9 / 8 if "nic_gbit_per_s" in row else None,
        )
        for row in _table()["machines"]
    )


def machine_of(firmware: Mapping[str, str], pci: Collection[str]) -> Machine | None:
    """The kind of machine that has this firmware and these PCI devices."""
    return next(
        (
            one
            for one in machines()
            if all(firmware.get(name) == value for name, value in one.firmware)
            and any(device in pci for device in one.pci)
        ),
        None,
    )


def profile_of(names: Collection[str]) -> frozenset[str]:
    """Variables that a vendor's profile sets, where one of its own is among those of that name; else none.

    Its plugin ends a run in which one of them is missing or has another value.
    """
    rows = [row for row in _table()["kinds"].values() if "profile_prefixes" in row]
    own = [row for row in rows if any(name.startswith(tuple(row["profile_prefixes"])) for name in names)]
    return frozenset(name for row in own for name in row["profile_variables"])
