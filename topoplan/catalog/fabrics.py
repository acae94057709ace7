"""What each kind of network between nodes requires of a host, and how cloud machines are recognized: `fabrics.json`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

from topoplan.catalog import load

FabricKind = Literal["infiniband", "roce", "efa", "tcpxo", "ethernet"]


class Need(NamedTuple):
    """Files that every host must have before NCCL can use the network as planned."""

    use: Literal["library", "profile", "path"]
    """How the files are used: a plugin's directory is put on the loader's path, a settings script is sourced, or a path
    is exported."""
    variable: str
    """The variable that names another plugin, from which the script reads its directory, or that holds the path."""
    what: str
    """In Markdown, for the person who sets up the hosts; without a full stop."""
    why: str
    """In one phrase, for the script."""
    paths: tuple[str, ...]
    """Alternatives, any one of which is enough."""
    missing: str
    """What to say if none of the paths exists, in one phrase."""
    remedy: str
    source: str


class Machine(NamedTuple):
    """A kind of cloud machine."""

    name: str
    """Name with its article: `an A3 Mega machine of Google Cloud`."""
    firmware: tuple[tuple[str, str], ...]
    """Files of /sys/class/dmi/id with their contents on such a machine."""
    pci: tuple[str, ...]
    """PCI devices (`vendor:device`, hexadecimal), at least one of which the machine has."""
    kind: FabricKind | None = None
    """Kind of the machine's network, if its adapters alone do not show it."""
    topology_file: str | None = None
    """Path of the topology file in the vendor's own images."""
    remedy: str = ""
    """How to put the topology file on a machine that lacks it."""
    nics: int | None = None
    """Number of NICs for the GPUs, if they are not RDMA adapters."""
    nic_bytes_per_s: float | None = None
    """Rate of one of these NICs each way, as stated by the vendor."""


class Daemon(NamedTuple):
    """A program that must run on every host during a run."""

    name: str
    """Name of the executable."""
    missing: str
    remedy: str


def _table() -> Mapping[str, Any]:
    return load("fabrics.json")


def fabric_name(kind: FabricKind) -> str:
    """Return the display name of a kind of network: `RoCE`."""
    return str(_table()["kinds"][kind]["name"])


def link_layers(kind: FabricKind) -> frozenset[str]:
    """Return the link layers of its adapters in /sys/class/infiniband; empty if they are not RDMA adapters."""
    return frozenset(_table()["kinds"][kind]["link_layers"])


def kind_of_link_layer(layer: str) -> FabricKind | None:
    """Return the kind of network whose adapters have this link layer, or None."""
    kinds: tuple[FabricKind, ...] = get_args(FabricKind)
    return next((kind for kind in kinds if layer in link_layers(kind)), None)


@cache
def needs_of_kind(kind: FabricKind) -> tuple[Need, ...]:
    """Return what a kind of network requires of a host."""
    return tuple(Need(**{**row, "paths": tuple(row["paths"])}) for row in _table()["kinds"][kind]["needs"])


@cache
def daemon_of_kind(kind: FabricKind) -> Daemon | None:
    """Return the program that a kind of network requires to run during a run, or None."""
    row = _table()["kinds"][kind].get("daemon")
    return None if row is None else Daemon(name=row["name"], missing=row["missing"], remedy=row["remedy"])


def topology_file(path: str) -> Need:
    """Return the requirement of a topology file at this path."""
    row = _table()["topology_file"]
    remedies = (machine.remedy for machine in machines() if machine.topology_file == path)
    remedy = next(remedies, row["remedy"])
    own = {"what": f"{row['what']}, `{path}`: {remedy}", "missing": f"{row['missing']} at {path}", "remedy": remedy}
    return Need(**{**row, **own, "paths": (path,)})


@cache
def machines() -> tuple[Machine, ...]:
    """Return the known machines."""
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
    """Return the kind of machine with this firmware and these PCI devices, or None."""
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
    """Return the variables set by the vendor profile to which any of these variable names belongs; empty if none does.

    The vendor's plugin aborts a run in which one of the variables is missing or has another value.
    """
    rows = [row for row in _table()["kinds"].values() if "profile_prefixes" in row]
    own = [row for row in rows if any(name.startswith(tuple(row["profile_prefixes"])) for name in names)]
    return frozenset(name for row in own for name in row["profile_variables"])
