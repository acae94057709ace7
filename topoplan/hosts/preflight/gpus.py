"""Checks of GPUs: present, of the right kind, free, and not shared by two hosts."""

from __future__ import annotations

import re

from topoplan.catalog.packages import allows
from topoplan.hosts.facts import GpuFacts, GpuProcess
from topoplan.hosts.preflight.fleet import Fleet, Node
from topoplan.hosts.result import Result, failure, ok, warning
from topoplan.trainers.environment import DRIVER_FOR_RTX_40, asks_for_driver, lacking_for_older_driver
from topoplan.units import format_gib, format_seconds, named

_IDLE_BYTES = 2**30
"""Above this, a GPU is in use: a driver without a process takes some hundred MiB."""
_SAME_MEMORY = 0.03
"""Reports of one card's memory differ by up to this fraction: drivers reserve different amounts (ECC, firmware)."""
_CONSUMER = re.compile(r"GeForce|RTX [2345]0\d\d", re.IGNORECASE)


def gpus_present(fleet: Fleet, node: Node) -> Result:
    """Row 22: fewer GPUs than in the spec, or MIG instances, which NCCL does not connect."""
    wanted = fleet.cluster.gpus_per_node
    gpus = node.facts.gpus
    if gpus is None:
        return node.not_reported("gpus")
    if len(gpus) < wanted:
        found = f"{len(gpus)} GPUs where the spec has {wanted} a node" if gpus else "no GPU"
        return failure(found, "see `nvidia-smi` and dmesg there; or change gpus_per_node in the spec and plan again")
    if cut := [gpu.index for gpu in gpus[:wanted] if gpu.mig]:
        return failure(
            f"partitioned into MIG instances: GPU {named(map(str, cut), 8)}",
            "turn MIG off (`nvidia-smi -mig 0`, as root): a process sees one instance, and NCCL connects none",
        )
    return ok(f"{len(gpus)} x {gpus[0].name}")


def gpus_kind(fleet: Fleet, node: Node) -> Result | None:
    """Row 22: another card than the plan was made for, with other memory and speed."""
    gpu, gpus = fleet.cluster.gpu, _used(fleet, node)
    if not gpus:
        return None
    replan = "name the right GPU in the spec and plan again"
    least = min((one.memory_bytes for one in gpus if one.memory_bytes is not None), default=None)
    if fleet.needs is not None and least is not None and least < fleet.needs.gpu_bytes:
        return failure(
            f"{gpus[0].name} with {format_gib(least)}, and the plan takes {format_gib(fleet.needs.gpu_bytes)}", replan
        )
    names = sorted({one.name for one in gpus})
    if len(names) > 1:
        return warning(f"GPUs of several kinds: {named(names)}", "the slowest sets the pace; use hosts of one kind")
    if not is_kind(names[0], gpu.name):
        return warning(f"{names[0]}, and the spec has {gpu.name}", replan)
    if least is not None and least < (1 - _SAME_MEMORY) * gpu.memory_bytes:
        return warning(
            f"{format_gib(least)} of memory, and the spec's {gpu.name} has {format_gib(gpu.memory_bytes)}", replan
        )
    return ok(names[0])


def is_kind(driver_name: str, catalog_name: str) -> bool:
    """Whether the driver's name for a card, `NVIDIA H100 80GB HBM3`, may mean the spec's, `h100-sxm-80gb`.

    True if the spec's name is no known model number, so that there is nothing to compare. H200 is not H20, GB200 is not
    B200, and a PCIe card is distinguished from an SXM one if the driver's name tells.
    """
    model, *rest = catalog_name.lower().split("-")
    parts = re.fullmatch(r"([a-z]+)(\d+)([a-z]?)", model)
    said = driver_name.lower()
    if parts is None:
        return True
    letters, digits, suffix = parts.groups()
    if not re.search(rf"(?<![a-z0-9]){letters} ?{digits}{suffix}(?![a-z0-9])", said):
        # A name of the user's own, such as `node7`, is not compared.
        return letters not in ("v", "a", "h", "b", "l", "gb", "gh", "rtx", "t", "p")
    return ("pcie" in said) == ("pcie" in rest) or not {"pcie", "sxm"} & set(rest) or "sxm" in said


def gpus_free(fleet: Fleet, node: Node) -> Result | None:
    """Rows 22 and 23: GPUs in use by somebody else, or by processes that an earlier run has left."""
    busy, over = [], []
    gpus = _used(fleet, node)
    if not gpus:
        return None
    known = [gpu for gpu in gpus if gpu.memory_bytes is not None and gpu.memory_used_bytes is not None]
    if not known:
        return node.not_reported("memory_used_bytes")
    for gpu in known:
        used, total = gpu.memory_used_bytes or 0, gpu.memory_bytes or 0
        if used > _IDLE_BYTES:
            busy.append(gpu)
            if fleet.needs is not None and total - used < fleet.needs.gpu_bytes:
                over.append(gpu)
    processes = [
        process for process in node.facts.gpu_processes or () if process.gpu_uuid in {gpu.uuid for gpu in gpus}
    ]
    held = f": {named(map(_process, processes))}" if processes else ""
    remedy = f"wait for them or stop them: perhaps {fleet.earlier_run(node)}"
    if over and fleet.needs is not None:
        free = min((gpu.memory_bytes or 0) - (gpu.memory_used_bytes or 0) for gpu in over)
        what = f"{format_gib(free)} free on GPU {_indices(over)} where the plan takes"
        return failure(f"{what} {format_gib(fleet.needs.gpu_bytes)}{held}", remedy)
    if busy:
        used = max(gpu.memory_used_bytes or 0 for gpu in busy)
        return warning(f"up to {format_gib(used)} in use on GPU {_indices(busy)}{held}", remedy)
    if processes:
        return warning(f"in use{held}", remedy)
    return ok("no memory in use")


def gpus_distinct(fleet: Fleet, node: Node) -> Result | None:
    """One machine under two names in the spec: both would start their ranks on the same GPUs."""
    own = {gpu.uuid for gpu in _used(fleet, node) if gpu.uuid}
    if not own:
        return None
    for other in fleet.others(node):
        if own & {gpu.uuid for gpu in _used(fleet, other)}:
            return failure(
                f"has the same GPUs as {other.name}: both are the same machine",
                "name each machine once under hosts in the spec",
            )
    return ok("GPUs of its own")


def peer_access(fleet: Fleet, node: Node) -> Result | None:
    """Row 20: direct access between consumer cards hangs if PCIe routes it through an IOMMU or ACS.

    RTX 40 cards have none, and accelerate refuses to start with a driver that may offer it.
    """
    gpus = _used(fleet, node)
    if len(gpus) < 2 or not _CONSUMER.search(gpus[0].name):
        return None
    if refused := _refused_by_accelerate(fleet, node, gpus[0].name):
        return refused
    if fleet.cluster.env.get("NCCL_P2P_DISABLE") == "1":
        return ok("NCCL_P2P_DISABLE=1 in the spec")
    links = {
        link
        for pair, link in (node.facts.topology or {}).items()
        if all(device.startswith("GPU") for device in pair) and link.startswith("NV")
    }
    if links:
        return ok("NVLink between GPUs")
    return warning(
        f"{gpus[0].name}: NCCL may hang at the first collective where PCIe has ACS or an IOMMU on",
        "see `nvidia-smi topo -p2p r`; turn both off in the BIOS, or set NCCL_P2P_DISABLE: '1' under env in the spec",
    )


def _refused_by_accelerate(fleet: Fleet, node: Node, card: str) -> Result | None:
    driver = node.facts.versions.get("driver", "")
    if not asks_for_driver(card, fleet.cluster) or allows(f">={DRIVER_FOR_RTX_40}", driver):
        return None
    lacking = lacking_for_older_driver(fleet.cluster, node.number, node.facts.nccl_settings)
    if not lacking:
        return None
    said = " and ".join(f"{name}: '{value}'" for name, value in lacking.items())
    return warning(
        f"driver {driver} with {card}: trainers that use accelerate refuse to start",
        f"install driver {DRIVER_FOR_RTX_40} or newer, or set {said} under env in the spec",
    )


def _used(fleet: Fleet, node: Node) -> tuple[GpuFacts, ...]:
    """Return the GPUs to which torchrun assigns a rank: the first ones."""
    return (node.facts.gpus or ())[: fleet.cluster.gpus_per_node]


def _indices(gpus: list[GpuFacts]) -> str:
    return named((str(gpu.index) for gpu in gpus), 8)


def _process(process: GpuProcess) -> str:
    of = f" of {process.user}" if process.user else ""
    age = f" for {format_seconds(process.age_s)}" if process.age_s else ""
    holds = f" holds {format_gib(process.memory_bytes)}" if process.memory_bytes else ""
    return f"pid {process.pid} ({process.name.rpartition('/')[2] or 'unknown'}{of}{age}){holds}"
