"""The facts that a host reports about itself, in bytes and seconds. A field is None if the host could not tell.

`HostFacts.missing` gives the reason: a tool that is not installed, a file without read permission.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from topoplan.catalog.packages import packages

LIBRARIES = tuple(dict.fromkeys(("torch", "nccl", *packages())))
"""Packages of trainers whose versions are collected, and must be the same on all hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU, as nvidia-smi lists it."""

    index: int
    name: str
    """The driver's name for the card: `NVIDIA H100 80GB HBM3`."""
    uuid: str = ""
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    mig: bool = False
    """Whether the GPU is partitioned into MIG instances."""
    pci_bus: str = ""
    numa_node: int | None = None
    pcie_bytes_per_s: float | None = None
    """Rate of its PCIe link at full width and speed, each way."""
    nvlink_count: int | None = None
    nvlink_bytes_per_s: float | None = None
    """Total rate of the active links, each way."""
    utilization: float | None = None
    """Fraction of time in use, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    pid: int
    gpu_uuid: str
    memory_bytes: int | None = None
    name: str = ""
    user: str = ""
    age_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """One port of an RDMA adapter, from /sys/class/infiniband."""

    device: str
    """Device name, such as `mlx5_0`."""
    port: int
    link_layer: str
    """InfiniBand or Ethernet."""
    state: str
    """ACTIVE, DOWN, INIT ..."""
    rate_bytes_per_s: float | None = None
    """Each way."""
    interface: str = ""
    """Network interface of the same PCI function, if there is one."""
    numa_node: int | None = None
    pci_bus: str = ""
    gids: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Index -> (GID, type: `RoCE v2`, `IB/RoCE v1`); empty GIDs are left out."""
    active_mtu_bytes: int | None = None
    traffic_class: int | None = None
    """Traffic class that the host forces on everything the port sends; None if programs choose it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts:
    """One network interface, from `ip -j addr`."""

    name: str
    addresses: tuple[str, ...] = ()
    """IPv4 and IPv6 addresses without the prefix length."""
    mtu_bytes: int | None = None
    is_up: bool = False
    speed_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFacts:
    """Facts about a path."""

    path: str
    exists: bool
    is_writable: bool | None = None
    """Whether the path is writable, or else its nearest existing parent directory."""
    file_system: str = ""
    """Type of the file system: ext4, nfs, lustre ..."""
    mount: str = ""
    """Source of the mount; for network file systems, the same source on two hosts means shared storage."""
    free_bytes: int | None = None
    fingerprint: str = ""
    """Digest of the names and sizes of the files below the path, and of the content of config.json and the like."""
    size_bytes: int | None = None
    files: int | None = None
    numbered: tuple[str, ...] | None = None
    """Directories in it with files and a number at the end of the name, as checkpoints have: checkpoint-100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteFacts:
    """The route to an address."""

    address: str
    """The name or address that was looked up."""
    resolved: tuple[str, ...] = ()
    """Its addresses according to `getent ahostsv4`."""
    interface: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The facts about one host."""

    hostname: str = ""
    gpus: tuple[GpuFacts, ...] | None = None
    gpu_processes: tuple[GpuProcess, ...] | None = None
    topology: Mapping[tuple[str, str], str] | None = None
    """(device, device) -> NV18, PIX, PXB, PHB, NODE or SYS, as in `nvidia-smi topo -m`; NICs by device name."""
    adapters: tuple[AdapterFacts, ...] | None = None
    interfaces: tuple[InterfaceFacts, ...] | None = None
    routes: tuple[RouteFacts, ...] = ()
    default_interface: str = ""
    sockets: int | None = None
    cpu_cores: int | None = None
    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    memlock_bytes: int | None = None
    """Limit of the SSH session that collects the facts; -1: unlimited."""
    open_files: int | None = None
    """Soft limit of the SSH session."""
    port_range: tuple[int, int] | None = None
    listening_ports: frozenset[int] | None = None
    peermem: bool | None = None
    """Whether nvidia_peermem or nv_peer_mem is loaded."""
    kernel: str = ""
    boot_id: str = ""
    clock_s: float | None = None
    """Seconds since 1970 by the host's clock, when the facts were collected."""
    paths: Mapping[str, PathFacts] = field(default_factory=dict)
    python: str = ""
    """The Python that reported the versions."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of driver, cuda, python, and of the installed LIBRARIES."""
    nccl_settings: Mapping[str, str] = field(default_factory=dict)
    """NCCL_* variables of the session's environment, /etc/nccl.conf and ~/.nccl.conf."""
    cgroup_memory_bytes: int | None = None
    """Memory limit of the container or slice in which the session runs."""
    in_container: bool | None = None
    firmware: Mapping[str, str] = field(default_factory=dict)
    """From /sys/class/dmi/id: sys_vendor, product_name, chassis_asset_tag; unreadable ones are left out."""
    pci: tuple[str, ...] = ()
    """Types of PCI devices, `vendor:device` in hexadecimal."""
    daemons: tuple[str, ...] = ()
    """The running daemons, of those that a network needs."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Field -> why it is unknown."""
