"""A cluster: nodes, their GPUs, the links inside a node and between nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from topoplan.specs.gpu import Gpu

MOST_GPUS = 131_072
"""In one cluster: the largest that a spec may describe, as that many nodes of one GPU or fewer of more."""

FabricKind = Literal["infiniband", "roce", "efa", "tcpxo", "ethernet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine that a run can be started on. Everything but the address is optional."""

    address: str
    """Name or address that SSH and the rendezvous use."""
    user: str | None = None
    """None is what the SSH configuration says, else the user who runs this."""
    port: int | None = None
    """None is what the SSH configuration says, else 22."""
    workdir: str | None = None
    """Absolute directory on the host in which the run starts."""
    venv: str | None = None
    """Absolute path of the Python virtual environment of the trainer."""
    socket_interface: str | None = None
    """Network interface for NCCL's and Gloo's sockets, such as `eth0`."""
    hcas: tuple[str, ...] = ()
    """InfiniBand or RoCE adapters to use, such as `mlx5_0:1`; interfaces of the GPUs' NICs with GPUDirect-TCPXO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The network between nodes."""

    kind: FabricKind = "infiniband"
    """InfiniBand, RoCE, AWS's EFA, Google's GPUDirect-TCPXO, or ethernet (plain TCP sockets, no RDMA)."""
    latency_s: float = 5e-6
    """One message, NIC to NIC, through the switches."""
    rails: int | None = None
    """Leaf planes: NIC i of every node is on plane i modulo rails. None is one plane for all NICs."""
    nodes_per_leaf: int | None = None
    """Nodes on one leaf switch (in one plane). None is all of them, or with oversubscription each on its own."""
    oversubscription: float = 1.0
    """Downlink over uplink capacity of a leaf: 1 is non-blocking."""
    traffic_class: int | None = None
    """Of InfiniBand and RoCE packets, 0 to 255: with RoCE DSCP times 4 plus the ECN bits. None is NCCL's own, 0."""
    service_level: int | None = None
    """Of InfiniBand and RoCE packets, 0 to 15. None is NCCL's own, 0."""
    topology_file: str | None = None
    """Absolute path of NCCL's topology file on every host, for machines that hide which NIC is near which GPU."""

    @property
    def uses_verbs(self) -> bool:
        """NCCL drives the adapters itself, by its own InfiniBand transport."""
        return self.kind in ("infiniband", "roce")

    @property
    def uses_rdma(self) -> bool:
        """The NICs are RDMA adapters."""
        return self.uses_verbs or self.kind == "efa"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cluster:
    """A homogeneous set of nodes. Rates are bytes per second each way. Compared and hashed by identity."""

    name: str
    nodes: int
    gpus_per_node: int
    gpu: Gpu
    nvlink_bytes_per_s: float
    """Per GPU and each way; 0 means the GPUs of a node talk over PCIe."""
    nvlink_domain_gpus: int
    """GPUs that reach each other over NVLink: gpus_per_node in a box, more in an NVL72 rack, 1 without NVLink."""
    pcie_bytes_per_s: float
    nics_per_node: int
    nic_bytes_per_s: float
    sockets: int = 2
    """CPU sockets of a node; its PCIe switches, and through them GPUs and NICs, are spread over them."""
    fabric: Fabric = field(default_factory=Fabric)
    host_memory_bytes: int | None = None
    """Memory of one node."""
    cpu_cores: int | None = None
    hosts: tuple[Host, ...] = ()
    """Empty, or one for each node."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Extra environment of the trainer, passed through."""
    secrets: tuple[str, ...] = ()
    """Names of further variables of the trainer, whose values are in no file and not here."""
    software: Mapping[str, str] = field(default_factory=dict)
    """Versions that the hosts have: of `python`, and of packages as pip lists them; what is not here is not known."""
    slurm: Mapping[str, str | bool] = field(default_factory=dict)
    """Options of sbatch by their long names; true is one without a value, false leaves out one of topoplan's own."""
    margin: float | None = None
    """Fraction of the card that a plan must leave free; None takes the error band of the prediction."""

    @property
    def world_size(self) -> int:
        """GPUs of the whole cluster."""
        return self.nodes * self.gpus_per_node
