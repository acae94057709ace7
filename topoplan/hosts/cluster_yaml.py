"""Turn the facts of probed hosts into the text of a spec that `topoplan rank` accepts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from topoplan.catalog.fabrics import FabricKind, machine_of
from topoplan.catalog.packages import PYTHON, is_version, packages
from topoplan.hosts.differences import differences, gpu_names, memory_of, named
from topoplan.hosts.facts import GpuFacts, HostFacts
from topoplan.hosts.preflight.fleet import most_common
from topoplan.hosts.probe import ComputeNetwork, Probed, network_of, socket_interface, usable_address
from topoplan.hosts.result import Result, failure, warning
from topoplan.specs import known
from topoplan.specs.gpu import Gpu
from topoplan.specs.kinds import NONE
from topoplan.specs.scalars import scalar
from topoplan.trainers.yaml_text import one_line, spec_line
from topoplan.units import format_bit_rate, format_byte_rate, format_gib

MARK = "# A cluster as `topoplan probe` found it."
"""First line of every spec written here."""
_SEAL = "# As written; a change of the lines above is never overwritten: "
_ASSUMED_BYTES_PER_S = 10e9 / 8
_MEMORY_TOLERANCE = 0.005
"""The memory sizes that drivers report for cards of one name differ by less than this fraction."""

_EXAMPLE = """\
# What is trained. Fill it in, or leave it to `topoplan rank SPEC --model NAME --job FILE`.
# model: Qwen/Qwen3-8B       # a name of `topoplan show models`, or a directory with config.json
# job:
#   seq_len: 4096            # tokens in a sequence
#   global_batch_size: 64    # sequences in an optimizer step, over all GPUs
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecDraft:
    """The result of a probe."""

    text: str | None
    """The spec; None if the hosts cannot form a cluster, for which the findings give the reasons."""
    findings: tuple[Result, ...]
    is_complete: bool = True
    """Whether `rank` can use the spec as soon as model and job are added."""


def cluster_spec(hosts: Sequence[Probed], *, name: str | None = None, below: str = _EXAMPLE) -> SpecDraft:
    """Return the spec of a cluster of these hosts, rank 0 first, with findings; `below` is the text for model and job.

    Where hosts differ, the spec states what every host has. Hosts with different GPUs cannot form a cluster.
    """
    findings = [*(check for one in hosts for check in _alone(one)), *differences(hosts)]
    if any(check.outcome == "failure" for check in findings):
        return SpecDraft(text=None, findings=tuple(findings))
    networks = {one.name: network_of(one, hosts) for one in hosts}
    findings += [check for one in hosts for check in _connected(one, hosts)]
    gpus = [gpu for one in hosts for gpu in one.facts.gpus or ()]
    per_node = min(len(one.facts.gpus or ()) for one in hosts)
    more = [one.name for one in hosts if len(one.facts.gpus or ()) > per_node]
    memory = min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes), default=None)
    card = known.gpu_of_driver(gpus[0].name, memory)
    is_rack = card is not None and card.nvlink_domain_gpus > card.gpus_per_node
    if card is None:
        what = f"{gpus[0].name} is not in the catalog, and a driver does not tell how fast it computes"
        remedy = "fill in the figures of its data sheet under `gpu` in the spec"
        findings.append(warning(what, remedy, name="gpu-figures"))
    title = name or f"{_slug(card.name if card else gpus[0].name)}-{len(hosts)}x{per_node}"
    blocks = [
        _head(hosts),
        [
            spec_line("name", scalar(title)),
            spec_line("nodes", len(hosts)),
            spec_line("gpus_per_node", per_node, f"the fewest; more on {named(more)}" if more else ""),
            *_gpu_lines(card, gpus[0].name, memory),
        ],
        [*_nvlink(card, gpus, [one.facts for one in hosts], findings), *_network(hosts, networks, findings)],
        _machine(hosts, gpus, is_rack),
        _software([one.facts for one in hosts]),
        _host_lines(hosts, networks),
        below.splitlines(),
    ]
    text = "\n\n".join("\n".join(block) for block in blocks if block) + "\n\n"
    return SpecDraft(
        text=f"{text}{_SEAL}{_digest(text)}\n",
        findings=tuple(findings),
        is_complete=card is not None,
    )


def is_edited(text: str) -> bool:
    """Whether a spec written here has been changed since, most likely by filling it in."""
    above, seal, digest = text.rpartition(_SEAL)
    return text.startswith(MARK) and (not seal or digest.strip() != _digest(above))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _alone(one: Probed) -> list[Result]:
    """Return the problems of a single host, regardless of the other hosts."""
    facts, host = one.facts, one.name
    if not facts.gpus:
        why = facts.missing.get("gpus", "nvidia-smi lists none")
        return [failure(f"no GPUs: {why}", "install the driver, or leave the host out", name="gpus", host=host)]
    found = []
    if cut := [str(gpu.index) for gpu in facts.gpus if gpu.mig]:
        are = "is" if len(cut) == 1 else "are"
        what = f"GPU {', '.join(cut)} {are} partitioned into MIG instances, which have no NVLink"
        found.append(failure(what, "turn MIG off (nvidia-smi -mig 0) on all its GPUs", name="mig", host=host))
    if len({gpu.name for gpu in facts.gpus}) > 1:
        remedy = "a run needs the same card everywhere"
        found.append(failure(f"has {gpu_names(facts)}", remedy, name="gpu-kind", host=host))
    return found


def _connected(one: Probed, hosts: Sequence[Probed]) -> list[Result]:
    found = []
    if not usable_address(one, hosts):
        doubters = [other.name for other in hosts if not _finds(other, one)]
        what = f"no address of it means the same on all hosts{'; unknown on ' + named(doubters) if doubters else ''}"
        remedy = "write an address under `hosts` that all hosts reach it by"
        found.append(warning(what, remedy, name="address", host=one.name))
    interface, several = socket_interface(one, hosts)
    what = f"reaches the other hosts through {' and '.join(several)}" if len(several) > 1 else ""
    if not interface and len(hosts) > 1:
        what = "does not say which interface leads to the other hosts"
    if what:
        found.append(warning(what, "set socket_interface by hand", name="interface", host=one.name))
    return found


def _finds(one: Probed, other: Probed) -> bool:
    wanted = (other.host.address, other.hostname)
    return any(route.resolved for route in one.facts.routes if route.address in wanted)


def _head(hosts: Sequence[Probed]) -> list[str]:
    lines = [MARK]
    shared = _shared([one.facts for one in hosts])
    if others := [f"{name} {version}" for name, version in shared.items() if name not in (PYTHON, *packages())]:
        lines.append(f"# Everywhere: {one_line(', '.join(others))}")
    return lines


def _software(facts: Sequence[HostFacts]) -> list[str]:
    lines = [
        f'  {name}: "{version}"'
        for name, version in _shared(facts).items()
        if name in (PYTHON, *packages()) and is_version(version)
    ]
    return ["software:  # the same on all hosts", *lines] if lines else []


def _shared(facts: Sequence[HostFacts]) -> dict[str, str]:
    versions = facts[0].versions
    return {name: text for name, text in versions.items() if len({one.versions.get(name) for one in facts}) == 1}


def _gpu_lines(known: Gpu | None, driver_name: str, memory: int | None) -> list[str]:
    said = f"the driver calls it {driver_name}"
    size = f"{memory // 2**20}MiB" if memory else ""
    if known is not None:
        if memory is None or abs(memory - known.memory_bytes) <= _MEMORY_TOLERANCE * known.memory_bytes:
            return [spec_line("gpu", known.name, said)]
        return ["gpu:", spec_line("  name", known.name, said), spec_line("  memory", size, "as the driver reports it")]
    unknown = "not known: fill in, from its data sheet"
    return [
        f"gpu:  # {one_line(said)}, and the catalog has none of that name",
        spec_line("  name", scalar(_slug(driver_name))),
        spec_line("  memory", size) if size else spec_line("  # memory", "81559MiB", unknown),
        spec_line("  # memory_bandwidth", "3.35TB/s", unknown),
        spec_line("  # bf16_tflops", 989, f"{unknown}; dense, without sparsity"),
        spec_line("  # fp8_tflops", 1979, "if it has fp8"),
    ]


def _nvlink(
    known: Gpu | None, gpus: Sequence[GpuFacts], facts: Sequence[HostFacts], findings: list[Result]
) -> list[str]:
    """Return the NVLink line, or the reason for its absence; append a finding if NVLink is incomplete."""
    slowest = min((gpu.nvlink_bytes_per_s for gpu in gpus if gpu.nvlink_bytes_per_s is not None), default=None)
    links = min((gpu.nvlink_count for gpu in gpus if gpu.nvlink_count is not None), default=None)
    usual = known.nvlink_bytes_per_s if known is not None else 0.0
    all_joined = all(_all_joined(one) for one in facts)
    if usual and ((slowest is not None and slowest < 0.99 * usual) or not all_joined):
        what = [f"NVLink is {format_byte_rate(2 * usual)} per {known.name if known else 'GPU'}"]
        if slowest is not None and slowest < 0.99 * usual:
            what.append(f"here {format_byte_rate(2 * slowest)}" if slowest else "a GPU here has no link up")
        if not all_joined:
            what.append("not every pair of GPUs is joined by it")
        remedy = "see `nvidia-smi nvlink -s` and `topo -m`, and the fabric manager"
        findings.append(warning(", ".join(what), remedy, name="nvlink"))
    rate = usual if slowest is None else slowest
    if not rate:
        why = "a GPU has no link up, so they talk over PCIe" if usual else "the GPUs talk over PCIe"
        return [spec_line("nvlink_bandwidth", NONE, why)] if usual or known is None else []
    if not usual and (known is not None or not all_joined):
        return [spec_line("nvlink_bandwidth", NONE, "bridges join some pairs of cards only, which is not modelled")]
    how = "of the usual machine: the driver lists no links" if links is None else f"{links} links up"
    return [spec_line("nvlink_bandwidth", format_byte_rate(2 * rate), f"per GPU, both ways; {how}")]


def _all_joined(facts: HostFacts) -> bool:
    """Whether every two GPUs are connected by NVLink; True if the topology is unknown."""
    links = [link for pair, link in (facts.topology or {}).items() if all(re.fullmatch(r"GPU\d+", d) for d in pair)]
    return all(link.startswith("NV") for link in links)


def _network(hosts: Sequence[Probed], networks: dict[str, ComputeNetwork], findings: list[Result]) -> list[str]:
    """Return the lines about the network between the hosts, with notes on what is not used."""
    kinds = {network.kind for network in networks.values()}
    kind: FabricKind = kinds.pop() if len(kinds) == 1 else "ethernet"
    is_socket = kind == "ethernet"
    rates = [_socket_rate(one, hosts) if is_socket else networks[one.name].rate_bytes_per_s for one in hosts]
    known = [rate for rate in rates if rate]
    rate = min(known) if len(known) == len(hosts) else None
    who = "the vendor" if kind == "tcpxo" else "the port"
    comment = f"per NIC, each way; {'the slowest of them' if len(set(rates)) > 1 else f'as {who} says'}"
    if rate is None and len(hosts) > 1:
        rate, comment = _ASSUMED_BYTES_PER_S, "ASSUMED: the interface does not say its speed; measure it, with iperf3"
        what = "the speed of the network between the hosts is not known; the spec assumes 10Gb/s"
        findings.append(warning(what, "measure it, and correct ib_bandwidth in the spec", name="network-rate"))
    lines = [spec_line("ib_bandwidth", format_bit_rate(rate), comment)] if rate else []
    nics = 1 if is_socket else min(network.nics for network in networks.values())
    why = "one socket interface" if is_socket else _why_these(networks[hosts[0].name])
    lines.append(spec_line("nics_per_node", nics, why))
    lines.append(_fabric(hosts, kind, networks))
    return lines + _left_out(hosts, networks)


def _fabric(hosts: Sequence[Probed], kind: FabricKind, networks: dict[str, ComputeNetwork]) -> str:
    """Return the fabric line: the kind, and what else NCCL needs to know, as far as all hosts agree."""
    fabric: dict[str, Any] = {"kind": kind}
    machines = {machine_of(one.facts.firmware, one.facts.pci) for one in hosts}
    machine = machines.pop() if len(machines) == 1 else None
    if machine is not None and machine.topology_file:
        fabric["topology_file"] = machine.topology_file
    classes = {one.traffic_class for network in networks.values() for one in network.adapters}
    if kind == "roce" and len(classes) == 1 and None not in classes:
        fabric["traffic_class"] = classes.pop()
    reasons = [_fabric_reason(kind, networks), *([machine.name] if machine is not None else [])]
    return spec_line("fabric", scalar(fabric), "; ".join(filter(None, reasons)))


def _left_out(hosts: Sequence[Probed], networks: dict[str, ComputeNetwork]) -> list[str]:
    """Return comments on unused adapters; those with the same reason on the same hosts share a line."""
    owners: dict[tuple[str, str], list[str]] = {}
    for one in hosts:
        for device, why in networks[one.name].left_out:
            owners.setdefault((device, why), []).append(one.name)
    devices: dict[tuple[str, str], list[str]] = {}
    for (device, why), names in owners.items():
        where = "" if len(names) == len(hosts) else f" on {named(names)}"
        devices.setdefault((where, why), []).append(device)
    return [one_line(f"# not used: {', '.join(found)}{where} ({why})") for (where, why), found in devices.items()]


def _socket_rate(one: Probed, hosts: Sequence[Probed]) -> float | None:
    name = socket_interface(one, hosts)[0]
    return next((face.speed_bytes_per_s for face in one.facts.interfaces or () if face.name == name), None)


def _why_these(network: ComputeNetwork) -> str:
    if not network.adapters:
        return "of the GPUs, as the vendor says"
    return "ports that share a PCIe switch with a GPU" if network.near_gpus else "active ports; none is near a GPU"


def _fabric_reason(kind: FabricKind, networks: dict[str, ComputeNetwork]) -> str:
    if kind != "ethernet":
        layers = sorted({one.link_layer for network in networks.values() for one in network.adapters})
        return f"link layer {' and '.join(layers)}" if layers else ""
    some = sorted(name for name, network in networks.items() if network.adapters)
    return f"the hosts differ; RDMA on {named(some)}" if some else "no RDMA adapter is up: TCP sockets"


def _machine(hosts: Sequence[Probed], gpus: Sequence[GpuFacts], is_rack: bool) -> list[str]:
    facts = [one.facts for one in hosts]
    lines = []
    if memory := [size for one in facts if (size := memory_of(one))]:
        limited = any(one.cgroup_memory_bytes == memory_of(one) for one in facts)
        lines.append(spec_line("host_memory", format_gib(min(memory)), "limit of the container" if limited else ""))
    if cores := [one.cpu_cores for one in facts if one.cpu_cores]:
        lines.append(spec_line("cpu_cores", min(cores)))
    if sockets := most_common(sorted(one.sockets for one in facts if one.sockets)):
        lines.append(spec_line("sockets", sockets))
    pcie = min((gpu.pcie_bytes_per_s for gpu in gpus if gpu.pcie_bytes_per_s), default=None)
    # The GPUs of a rack reach their CPU over NVLink, so their PCIe link is a different one.
    if pcie and not is_rack:
        lines.append(
            spec_line("pcie_bandwidth", f"{pcie / 1e9:.3g}GB/s", "each way; generation and width of a GPU's link")
        )
    return lines


def _host_lines(hosts: Sequence[Probed], networks: dict[str, ComputeNetwork]) -> list[str]:
    lines = ["hosts:  # rank 0 first"]
    for one in hosts:
        address = usable_address(one, hosts) or one.host.address
        # A name of the SSH configuration implies user and port; an address that replaces it does not.
        is_own = address == one.host.address
        user, port = (one.host.user, one.host.port) if is_own else (one.user, one.port)
        network = networks[one.name]
        # Ethernet applies to the whole cluster: RDMA that only some hosts have is not used.
        mixed = len({other.kind for other in networks.values()}) > 1
        fields: dict[str, Any] = {
            "address": address,
            "user": user,
            "port": port,
            "workdir": one.host.workdir,
            "venv": one.host.venv,
            "socket_interface": socket_interface(one, hosts)[0] or None,
            "hcas": list(network.hcas) if network.hcas and not mixed else None,
        }
        given = [(key, value) for key, value in fields.items() if value is not None]
        note = "" if is_own else f"  # {one_line(one.name)}, by the address that SSH connected to"
        for index, (key, value) in enumerate(given):
            lines.append(f"{'    ' if index else '  - '}{key}: {scalar(value)}{'' if index else note}")
    return lines


def _slug(name: str) -> str:
    """Return a driver's name in the form of a card or cluster name, such as `nvidia-a40`."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")[:40] or "gpu"
