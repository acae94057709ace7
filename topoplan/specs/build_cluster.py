"""Build a cluster from a checked form: check its values against each other, and fill in the GPU's usual machine.

Any of `gpus_per_node` and the links (`nvlink_bandwidth`, `ib_bandwidth`, `nics_per_node`) that is left out is taken
from the GPU's usual machine: an HGX box with one NIC per GPU, an NVL72 rack, a PCIe server. A card outside the catalog
has no usual machine, so its links must be given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from topoplan import catalog
from topoplan.errors import SpecError, UnitError, listed
from topoplan.specs import known
from topoplan.specs.cluster import MOST_GPUS, USUAL_STORAGE_BYTES_PER_S, Cluster, Fabric, Host
from topoplan.specs.draft import Document
from topoplan.specs.gpu import Gpu
from topoplan.units import format_byte_rate

if TYPE_CHECKING:
    from topoplan.specs.forms import FabricForm, SpecForm

# A small message over TCP sockets crosses two kernels; the default of `Fabric` is RDMA's latency.
_TCP_LATENCY_S = 30e-6
_PCIE_GEN4_BYTES_PER_S = 32e9
_PCIE_GEN5_BYTES_PER_S = 64e9
_PCIE_GPUS_OF_A_SOCKET = 4
_OLDEST_WITH = {"fp4": "blackwell", "fp8": "hopper", "": "ampere"}
_PCIE_GEN5_SINCE = "hopper"
_AS_GIVEN = ("cpu_cores", "env", "secrets", "software", "slurm", "margin")
"""Keys that are copied to the cluster unchanged."""


def build_cluster(document: Document, default_name: str) -> Cluster:
    """Build the cluster of a document; an empty `default_name` is replaced by GPU and counts. Raises SpecError."""
    form = document.form
    gpu, in_catalog = _gpu(document)
    nodes = _nodes(document)
    gpus_per_node = form.gpus_per_node or (gpu.gpus_per_node if in_catalog else 0)
    if not gpus_per_node:
        document.fail_missing("gpus_per_node", remedy="add `gpus_per_node: 8`")
    if not in_catalog:
        _check_own_links(document, gpu, nodes, gpus_per_node)
    if nodes * gpus_per_node > MOST_GPUS:
        what = f"{nodes} * gpus_per_node {gpus_per_node} = {nodes * gpus_per_node} GPUs"
        document.fail(("nodes",), what, expected=f"expected at most {MOST_GPUS}")
    nvlink = _nvlink(document, gpu, in_catalog)
    usual_nics = max(1, round(gpu.nics_per_node * gpus_per_node / gpu.gpus_per_node))
    cluster = Cluster(
        name=form.name or default_name or f"{gpu.name}-{nodes}x{gpus_per_node}",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=gpu,
        nvlink_bytes_per_s=nvlink,
        nvlink_domain_gpus=_nvlink_domain(gpu, nvlink, nodes, gpus_per_node),
        pcie_bytes_per_s=form.pcie_bandwidth or gpu.pcie_bytes_per_s,
        nics_per_node=form.nics_per_node or usual_nics,
        nic_bytes_per_s=form.ib_bandwidth or gpu.nic_bytes_per_s,
        sockets=form.sockets or usual_sockets(gpus_per_node, nvlink),
        host_memory_bytes=form.host_memory,
        storage_bytes_per_s=form.storage_bandwidth or USUAL_STORAGE_BYTES_PER_S,
        hosts=_hosts(document, nodes),
        assumed=_assumed(form, gpu, nodes, gpus_per_node) if in_catalog else (),
        unused=_unused(document, nodes, gpus_per_node),
        **{name: getattr(form, name) for name in _AS_GIVEN},
    )
    if both := sorted(set(cluster.secrets) & set(cluster.env)):
        document.fail(("secrets",), f"{both[0]} is under env too", remedy="leave it out there")
    _check_visible(document, cluster)
    _check_rack(document, cluster)
    _check_hcas(document, cluster)
    return replace(cluster, fabric=_fabric(document, cluster))


def usual_sockets(gpus_per_node: int, nvlink_bytes_per_s: float) -> int:
    """Return the number of CPU sockets of a machine whose spec gives none."""
    return 1 if gpus_per_node <= _PCIE_GPUS_OF_A_SOCKET and not nvlink_bytes_per_s else 2


def _assumed(form: SpecForm, gpu: Gpu, nodes: int, gpus_per_node: int) -> tuple[str, ...]:
    """Return the relevant keys that the spec leaves out, and `gpu` if it is given by a short name."""
    left_out = {
        "gpu": form.gpu.name.strip().lower() != gpu.name,
        "gpus_per_node": form.gpus_per_node is None,
        "nvlink_bandwidth": form.nvlink_bandwidth is None and gpus_per_node > 1,
        "ib_bandwidth": form.ib_bandwidth is None and nodes > 1,
        "nics_per_node": form.nics_per_node is None and nodes > 1,
    }
    return tuple(key for key, is_so in left_out.items() if is_so)


def _unused(document: Document, nodes: int, gpus_per_node: int) -> tuple[str, ...]:
    idle = (() if nodes > 1 else ("ib_bandwidth", "fabric")) + (
        () if nodes * gpus_per_node > 1 else ("nvlink_bandwidth",)
    )
    return tuple(key for key in idle if document.has(key))


def _check_own_links(document: Document, gpu: Gpu, nodes: int, gpus_per_node: int) -> None:
    """Require the links of a card outside the catalog, which has no usual machine to take them from."""
    form = document.form
    needed = {
        "nvlink_bandwidth": (gpus_per_node > 1, "`nvlink_bandwidth: 900GB/s`, or none where the GPUs talk over PCIe"),
        "ib_bandwidth": (nodes > 1, "`ib_bandwidth: 400Gb/s`, the rate of one NIC"),
    }
    for key, (is_needed, example) in needed.items():
        if is_needed and getattr(form, key) is None:
            why = f", and {gpu.name!r} is not in the catalog, whose cards have the links of their usual machine"
            document.fail_missing(key, why, at=("gpu",), remedy=f"add {example}")


def _check_visible(document: Document, cluster: Cluster) -> None:
    visible = cluster.env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (count := len(visible.split(","))) < cluster.gpus_per_node:
        what = f"{count} GPUs, and gpus_per_node is {cluster.gpus_per_node}"
        document.fail(("env", "CUDA_VISIBLE_DEVICES"), what, remedy="leave it out")


def _check_rack(document: Document, cluster: Cluster) -> None:
    rack, gpus = cluster.gpu.nvlink_domain_gpus, cluster.gpus_per_node
    is_rack = cluster.nvlink_bytes_per_s and rack > cluster.gpu.gpus_per_node
    if is_rack and cluster.nodes > 1 and rack % gpus:
        document.fail(
            ("gpus_per_node",),
            f"{rack} GPUs of an NVLink domain % {gpus} GPUs of a node = {rack % gpus}",
            expected=f"expected a divisor of {rack}; the usual machine has {cluster.gpu.gpus_per_node}",
        )


def _check_hcas(document: Document, cluster: Cluster) -> None:
    """Refuse `hcas` where they have no effect: they set NCCL_IB_HCA, ignored with NCCL_IB_DISABLE and AWS's plugin."""
    kind = document.form.fabric.kind if document.form.fabric else None
    whys = {"ethernet": "which is TCP without RDMA", "efa": "whose plugin takes all adapters that there are"}
    for index, host in enumerate(cluster.hosts):
        if kind in whys and host.hcas:
            remedy = "make it kind: roce, or leave hcas out" if kind == "ethernet" else "leave hcas out"
            what = f"RDMA adapters with fabric.kind {kind}, {whys[kind]}"
            document.fail(("hosts", index, "hcas"), what, remedy=remedy)


def _gpu(document: Document) -> tuple[Gpu, bool]:
    """Return the GPU, and whether it is in the catalog (and so has a usual machine)."""
    figures = document.form.gpu.given()
    name = figures.pop("name")
    if "bf16_flops" in figures:
        figures.setdefault("fp16_flops", figures["bf16_flops"])
    if not figures or name.strip().lower() in catalog.gpu_names():
        with document.errors_at("gpu"):
            return replace(known.gpu(name), **figures), True
    needed = {
        "memory_bytes": "memory: 81559MiB",
        "bf16_flops": "bf16_tflops: 989",
        "memory_bytes_per_s": "memory_bandwidth: 3.35TB/s",
    }
    if lacking := [line for field, line in needed.items() if field not in figures]:
        keys = listed([f"`{line.partition(':')[0]}`" for line in lacking])
        remedy = f"add {', '.join(f'`{line}`' for line in lacking)}, or use a name of `topoplan show gpus`"
        what = f"{keys} {'is' if len(lacking) == 1 else 'are'} missing in `gpu`: {name!r} is not in the catalog"
        raise SpecError(what, where=document.place(("gpu",)), remedy=remedy)
    return _own_gpu(document, name, figures), False


def _own_gpu(document: Document, name: str, figures: Mapping[str, Any]) -> Gpu:
    """Return a card outside the catalog: its links come from the spec, since it has no usual machine."""
    form = document.form
    newest = "fp4" if "fp4_flops" in figures else "fp8" if "fp8_flops" in figures else ""
    architecture = figures.get("architecture", _OLDEST_WITH[newest])
    known = catalog.architectures()
    is_recent = known.index(architecture) >= known.index(_PCIE_GEN5_SINCE)
    guessed = {
        "architecture": architecture,
        "sm_count": 132 if is_recent else 108,
        "nvlink_bytes_per_s": (form.nvlink_bandwidth or 0.0) / 2,
        "nvlink_domain_gpus": 1,
        "pcie_bytes_per_s": _PCIE_GEN5_BYTES_PER_S if is_recent else _PCIE_GEN4_BYTES_PER_S,
        "gpus_per_node": form.gpus_per_node or 1,
        "nics_per_node": 1,
        "nic_bytes_per_s": form.ib_bandwidth or 12.5e9,
    }
    return Gpu(name=name, source=f"gpu block of {document.place(('gpu',))}", **{**guessed, **figures})


def _nodes(document: Document) -> int:
    form = document.form
    if form.nodes is not None:
        return form.nodes
    if form.hosts:
        return len(form.hosts)
    if not document.is_run_document:
        document.fail_missing("nodes", remedy="add `nodes: 4`")
    return 1


def _nvlink(document: Document, gpu: Gpu, in_catalog: bool) -> float:
    """Return the one-way NVLink rate of a GPU, from the vendors' figure for both directions together."""
    both_ways = document.form.nvlink_bandwidth
    if both_ways is None:
        return gpu.nvlink_bytes_per_s if in_catalog else 0.0
    if not both_ways:
        return 0.0
    usual = gpu.nvlink_bytes_per_s * 2
    if in_catalog and not usual:
        document.fail(
            ("nvlink_bandwidth",),
            f"a machine of {gpu.name} has no NVLink between all its GPUs",
            remedy="leave nvlink_bandwidth out; bridges between pairs of cards are not modelled",
        )
    # 900Gb/s is a rate that exists (a bridge between two cards), so only the card reveals the mistake.
    written = str(document.raw["nvlink_bandwidth"])
    if usual and re.search("b(?!yte)", written) and math.isclose(both_ways * 8, usual, rel_tol=0.02):
        raise UnitError(
            f"nvlink_bandwidth: {written} is {format_byte_rate(both_ways)}, an eighth of the NVLink of {gpu.name}",
            where=document.place(("nvlink_bandwidth",)),
            remedy=f"did you mean {format_byte_rate(usual)}?",
        )
    return both_ways / 2


def _nvlink_domain(gpu: Gpu, nvlink_bytes_per_s: float, nodes: int, gpus_per_node: int) -> int:
    """Return the number of GPUs connected by NVLink: one machine's, or up to all machines' of an NVL72 rack."""
    if not nvlink_bytes_per_s:
        return 1
    is_rack = gpu.nvlink_domain_gpus > gpu.gpus_per_node
    return min(max(gpu.nvlink_domain_gpus, gpus_per_node), nodes * gpus_per_node) if is_rack else gpus_per_node


def _fabric(document: Document, cluster: Cluster) -> Fabric:
    form = document.form.fabric
    if form is None:
        return Fabric()
    rails, nics = form.rails or 1, cluster.nics_per_node
    if rails > nics:
        what = f"rails {rails} > nics_per_node {nics}"
        document.fail(("fabric", "rails"), what, expected="expected at most one rail for each NIC of a node")
    if nics % rails:
        what = f"nics_per_node {nics} % rails {rails} = {nics % rails}"
        document.fail(("fabric", "rails"), what, expected="expected as many NICs of a node on each rail")
    given = form.given()
    for key in ("traffic_class", "service_level"):
        if key in given and not form.uses_verbs:
            what = f"NCCL gives it to InfiniBand and RoCE alone, and fabric.kind is {form.kind}"
            document.fail(("fabric", key), what, remedy="leave one of them out")
    if given.pop("uplinks_per_leaf", None) is not None:
        given["oversubscription"] = _oversubscription(document, cluster, form)
    if form.kind == "ethernet":
        given.setdefault("latency_s", _TCP_LATENCY_S)
    return Fabric(**given)


def _oversubscription(document: Document, cluster: Cluster, form: FabricForm) -> float:
    """Return downlinks over uplinks of a full leaf; 1 if it has more uplinks than downlinks."""
    path, uplinks, nodes = ("fabric", "uplinks_per_leaf"), form.uplinks_per_leaf, form.nodes_per_leaf
    if document.has("fabric", "oversubscription"):
        document.fail(path, "is given beside oversubscription", remedy="leave one of them out")
    if nodes is None:
        document.fail(path, "is given without nodes_per_leaf", remedy="add nodes_per_leaf")
    if not uplinks and cluster.nodes > nodes:
        what = f"a leaf of {nodes} nodes has no uplink, and the cluster has {cluster.nodes} nodes"
        document.fail(path, what, expected="expected uplinks where nodes are on more than one leaf")
    downlinks = nodes * cluster.nics_per_node / (form.rails or 1)
    return max(1.0, downlinks / uplinks) if uplinks else 1.0


def _hosts(document: Document, nodes: int) -> tuple[Host, ...]:
    hosts = document.form.hosts
    if hosts and len(hosts) != nodes:
        what = f"{len(hosts)} hosts != nodes {nodes}"
        document.fail(("hosts",), what, expected="expected one host for each node, or none at all")
    seen: set[tuple[str, int]] = set()
    for index, host in enumerate(hosts):
        place = (host.address, host.port or 22)
        if place in seen:
            document.fail(("hosts", index), f"{host.address} is listed twice")
        seen.add(place)
    return hosts
