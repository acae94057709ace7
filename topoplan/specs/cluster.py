"""A cluster: nodes, their GPUs, the links inside a node and between nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from typing import Annotated, Any, ClassVar

from topoplan.catalog.fabrics import FabricKind
from topoplan.errors import SpecError
from topoplan.specs.blocks import Block, key
from topoplan.specs.gpu import Gpu
from topoplan.specs.kinds import PATH, SIZE, Count, Fraction, Number, Text, Words
from topoplan.specs.passed_on import BATCH_OPTIONS, ENVIRONMENT, SECRET_NAMES, VERSIONS
from topoplan.units import shown

MOST_GPUS = 131_072
"""Limit on the GPUs of a cluster, however they are divided into nodes."""

USUAL_STORAGE_BYTES_PER_S = 1e9
"""Assumed: storage mounted over 10 Gb/s Ethernet, less protocol overhead."""

Nodes = Annotated[int, Count(1, MOST_GPUS)]
GpusPerNode = Annotated[int, Count(1, 144)]
Nics = Annotated[int, Count(1, 64)]
Sockets = Annotated[int, Count(1, 8)]
Cores = Annotated[int, Count(1, 10_000)]
Environment = Annotated[Mapping[str, str], ENVIRONMENT]
SecretNames = Annotated[tuple[str, ...], SECRET_NAMES]
Software = Annotated[Mapping[str, str], VERSIONS]
BatchOptions = Annotated[Mapping[str, str | bool], BATCH_OPTIONS]
Margin = Annotated[float, Fraction(is_zero_allowed=True, is_below_half=True)]


class _Address(Text):
    """A host name or address for SSH; port and user are separate keys."""

    def _usable(self, value: Any) -> Any:
        found = super()._usable(value)
        name, colon, port = found.rpartition(":")
        if colon and ":" not in name and port.isdigit():
            raise SpecError(f"{shown(found)} has a port", remedy=f"write {{address: {name}, port: {port}}}")
        if re.fullmatch(r"[0-9.]+", found) and not re.fullmatch(rf"{_BYTE}(\.{_BYTE}){{3}}", found):
            raise SpecError(f"{shown(found)} is not an address", expected="expected four numbers up to 255")
        return found


_BYTE = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
_ADDRESS = _Address(pattern=r"[A-Za-z0-9_:\[][A-Za-z0-9._:%\[\]-]*", meaning="a host name or address, without user@")
"""A leading `-` would be parsed as an option by ssh."""
_USER = Text(pattern=r"[A-Za-z0-9_][A-Za-z0-9._@-]*", meaning="a user name")
_INTERFACE = Text(pattern=r"[A-Za-z0-9_][A-Za-z0-9._@:-]*", meaning="a network interface such as eth0", longest=64)
_ADAPTERS = Words(
    pattern=r"[A-Za-z0-9_][A-Za-z0-9._-]*(:[0-9]+)?", meaning="adapters such as mlx5_0:1", is_tuple=True, least=0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(Block):
    """A machine: its address, or a block that says how to reach and use it."""

    short_key: ClassVar[str] = "address"

    address: Annotated[str, _ADDRESS] = key("Name or address for SSH and the rendezvous.", "node0", default=MISSING)
    user: Annotated[str | None, _USER] = key("SSH user; left out: SSH's own default.")
    port: Annotated[int | None, Count(1, 65535)] = key("SSH port; left out: SSH's own default.")
    workdir: Annotated[str | None, PATH] = key("Absolute directory on the host in which the run starts.")
    venv: Annotated[str | None, PATH] = key("Absolute path of the trainer's Python virtual environment on the host.")
    socket_interface: Annotated[str | None, _INTERFACE] = key("Network interface of NCCL's and Gloo's sockets.", "eth0")
    hcas: Annotated[tuple[str, ...], _ADAPTERS] = key(
        "InfiniBand or RoCE adapters to use; with fabric kind tcpxo the interfaces of the GPUs' NICs.",
        ["mlx5_0", "mlx5_1"],
        default=(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The network between the nodes."""

    kind: FabricKind = key(
        "infiniband, roce, efa (AWS), tcpxo (GPUDirect-TCPXO of Google's A3 Mega), or ethernet for plain TCP sockets.",
        default="infiniband",
    )
    latency_s: Annotated[float, Number()] = 5e-6
    """Time of one small message, NIC to NIC, through the switches."""
    rails: Annotated[int | None, Count(1, 64)] = key(
        "Leaf planes: NIC i of every node is on plane i modulo rails. Left out: one plane for all NICs."
    )
    nodes_per_leaf: Annotated[int | None, Count(1, MOST_GPUS)] = key(
        "Nodes on one leaf switch (in one rail). Left out: all of them; with oversubscription above 1 each its own."
    )
    oversubscription: Annotated[float, Number(1, 1e6)] = 1.0
    """A leaf's downlink capacity over its uplink capacity; 1 is non-blocking."""
    traffic_class: Annotated[int | None, Count(0, 255)] = key(
        "Traffic class of NCCL's packets (NCCL_IB_TC), with roce and infiniband: DSCP times 4, plus 2 with ECN. "
        "Whoever runs the network knows it: where PFC follows DSCP, NCCL's own, 0, is a queue that drops packets.",
        106,
    )
    service_level: Annotated[int | None, Count(0, 15)] = key(
        "Service level of NCCL's packets (NCCL_IB_SL), with roce and infiniband."
    )
    topology_file: Annotated[str | None, PATH] = key(
        "NCCL's topology file (NCCL_TOPO_FILE) on every host, for virtual machines that hide which NIC is near which "
        "GPU.",
        "/opt/microsoft/ndv5-topo.xml",
    )

    @property
    def uses_verbs(self) -> bool:
        """Whether NCCL drives the adapters itself, through its own InfiniBand transport."""
        return self.kind in ("infiniband", "roce")

    @property
    def uses_rdma(self) -> bool:
        """Whether the NICs are RDMA adapters."""
        return self.uses_verbs or self.kind == "efa"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cluster:
    """A homogeneous set of nodes. Rates are bytes per second, one way. Compared and hashed by identity."""

    name: str
    nodes: Nodes
    gpus_per_node: GpusPerNode
    gpu: Gpu
    nvlink_bytes_per_s: Annotated[float, Number(0)]
    """Per GPU, one way; 0 if the GPUs of a node communicate over PCIe."""
    nvlink_domain_gpus: Annotated[int, Count(1, MOST_GPUS)]
    """GPUs connected by NVLink: gpus_per_node in a box, more in an NVL72 rack, 1 without NVLink."""
    pcie_bytes_per_s: Annotated[float, Number()]
    nics_per_node: Nics
    nic_bytes_per_s: Annotated[float, Number()]
    sockets: Sockets = 2
    """CPU sockets of a node; its PCIe switches, and with them GPUs and NICs, are divided among the sockets."""
    fabric: Fabric = field(default_factory=Fabric)
    host_memory_bytes: Annotated[int | None, SIZE] = None
    """Main memory of one node."""
    storage_bytes_per_s: Annotated[float, Number()] = USUAL_STORAGE_BYTES_PER_S
    """Rate at which one node reads the model and writes its part of a checkpoint."""
    cpu_cores: Cores | None = key("CPU cores of a machine.")
    hosts: tuple[Host, ...] = key("The machines, one for each node; rank 0 first.", default=())
    env: Environment = key("Environment variables for the trainer, passed through.", default=dict)
    secrets: SecretNames = key(
        "Names of variables that the trainer needs and no file may hold: `topoplan launch` takes their values from the "
        "environment that it is called in.",
        ["HF_TOKEN", "WANDB_API_KEY"],
        default=(),
    )
    software: Software = key(
        "What the hosts have: the version of python, and of packages as pip lists them. Plans then say what these "
        "versions cannot do, and what cannot be had on this Python; memory and speed follow them.",
        {"python": "3.12", "torch": "2.11.0"},
        default=dict,
    )
    slurm: BatchOptions = key(
        "Options of sbatch for the job script of Slurm, by their long names; they take the place of topoplan's own. "
        "true is an option without a value, false leaves out one of topoplan's.",
        {"partition": "gpu", "time": "24:00:00"},
        default=dict,
    )
    margin: Margin | None = key(
        "Part of the card that a plan must leave free; by default the error band of the prediction and what the driver "
        "keeps.",
        "8%",
    )
    assumed: tuple[str, ...] = ()
    """Keys left out of the spec and taken from the GPU's usual machine; `gpu` if it is given by a short name."""

    unused: tuple[str, ...] = ()
    """Link keys given in the spec although no traffic crosses those links."""

    @property
    def world_size(self) -> int:
        """Number of GPUs in the cluster."""
        return self.nodes * self.gpus_per_node

    def may_run(self, package: str, versions: str) -> bool:
        """Return whether the hosts may have one of these versions of a package, written as pip does: `<2.3`.

        They may have any that `software` does not rule out.
        """
        if (stated := self.software.get(package)) is None:
            return True
        from topoplan.catalog.packages import allows  # only needed where versions are given

        return allows(versions, stated)
