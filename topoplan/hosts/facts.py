"""What one host said of itself, in bytes and seconds. A field is None where the host could not say it.

`HostFacts.missing` says why: a tool that is not installed, a file that may not be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from topoplan.catalog.packages import packages

LIBRARIES = tuple(dict.fromkeys(("torch", "nccl", *packages())))
"""Packages of trainers whose versions are asked for, and have to be the same on all hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU, as nvidia-smi lists it."""

    index: int
    name: str
    """As the driver calls it: `NVIDIA H100 80GB HBM3`."""
    uuid: str = ""
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    mig: bool = False
    """Cut into instances."""
    pci_bus: str = ""
    numa_node: int | None = None
    pcie_bytes_per_s: float | None = None
    """Of its link at its widest, each way."""
    nvlink_count: int | None = None
    """Active links."""
    nvlink_bytes_per_s: float | None = None
    """All active links together, each way."""
    utilization: float | None = None
    """Share of time in use, 0 to 1."""


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
    """`mlx5_0`."""
    port: int
    link_layer: str
    """InfiniBand or Ethernet."""
    state: str
    """ACTIVE, DOWN, INIT ..."""
    rate_bytes_per_s: float | None = None
    """Each way."""
    interface: str = ""
    """The network interface of the same function, where there is one."""
    numa_node: int | None = None
    pci_bus: str = ""
    gids: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Index -> (GID, type: `RoCE v2`, `IB/RoCE v1`); empty ones are left out."""
    active_mtu_bytes: int | None = None
    traffic_class: int | None = None
    """That the host gives to all that the port sends, whatever programs ask for; None: what they ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts:
    """One network interface, from `ip -j addr`."""

    name: str
    addresses: tuple[str, ...] = ()
    """IPv4 and IPv6 without the prefix length."""
    mtu_bytes: int | None = None
    is_up: bool = False
    speed_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFacts:
    """A path that was asked about."""

    path: str
    exists: bool
    is_writable: bool | None = None
    """Of it, or of the nearest directory above it that exists."""
    file_system: str = ""
    """Type: ext4, nfs, lustre ..."""
    mount: str = ""
    """Source of the mount: the same on two hosts means storage that they share (for network file systems)."""
    free_bytes: int | None = None
    fingerprint: str = ""
    """Names and sizes of the files in it, as one digest; of config.json and the like the content too."""
    size_bytes: int | None = None
    files: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteFacts:
    """Which way leads to an address."""

    address: str
    """As it was asked for."""
    resolved: tuple[str, ...] = ()
    """What `getent ahostsv4` makes of it."""
    interface: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """One host."""

    hostname: str = ""
    gpus: tuple[GpuFacts, ...] | None = None
    gpu_processes: tuple[GpuProcess, ...] | None = None
    topology: Mapping[tuple[str, str], str] | None = None
    """(device, device) -> NV18, PIX, PXB, PHB, NODE or SYS, as `nvidia-smi topo -m` has them; NICs by device name."""
    adapters: tuple[AdapterFacts, ...] | None = None
    interfaces: tuple[InterfaceFacts, ...] | None = None
    routes: tuple[RouteFacts, ...] = ()
    default_interface: str = ""
    sockets: int | None = None
    cpu_cores: int | None = None
    """Physical ones."""
    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    memlock_bytes: int | None = None
    """Of this very session; -1: unlimited."""
    open_files: int | None = None
    """Soft limit."""
    port_range: tuple[int, int] | None = None
    """net.ipv4.ip_local_port_range."""
    listening_ports: frozenset[int] | None = None
    peermem: bool | None = None
    """nvidia_peermem or nv_peer_mem is loaded."""
    kernel: str = ""
    boot_id: str = ""
    clock_s: float | None = None
    """Seconds since 1970, when it was asked."""
    paths: Mapping[str, PathFacts] = field(default_factory=dict)
    """What each path that was asked about is."""
    python: str = ""
    """The Python that was asked for versions."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of driver, cuda, python, and of LIBRARIES what is installed."""
    nccl_settings: Mapping[str, str] = field(default_factory=dict)
    """NCCL_* of the session's environment and of /etc/nccl.conf, ~/.nccl.conf."""
    cgroup_memory_bytes: int | None = None
    """Limit of the container or slice that the session is in."""
    in_container: bool | None = None
    firmware: Mapping[str, str] = field(default_factory=dict)
    """Of /sys/class/dmi/id: sys_vendor, product_name, chassis_asset_tag; what cannot be read is left out."""
    pci: tuple[str, ...] = ()
    """Kinds of PCI devices, `vendor:device` in hexadecimal."""
    daemons: tuple[str, ...] = ()
    """Of those that a network wants, the ones that run."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Field -> why it is not known."""
