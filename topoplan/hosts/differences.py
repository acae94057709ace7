"""Differences between hosts that should be alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from topoplan import units
from topoplan.hosts.facts import LIBRARIES, HostFacts
from topoplan.hosts.probe import Probed, network_of, socket_interface
from topoplan.hosts.result import Result, failure, warning
from topoplan.units import format_bit_rate, format_gib

T = TypeVar("T", str, int, float)

_MOST_NAMED = 4


def differences(hosts: Sequence[Probed]) -> tuple[Result, ...]:
    """Return a finding for each property that differs; it concerns all hosts, so its `host` is empty."""
    if len(hosts) < 2:
        return ()

    def of_facts(value: Callable[[HostFacts], str]) -> Callable[[Probed], str]:
        return lambda one: value(one.facts)

    def mtu(one: Probed) -> str:
        name = socket_interface(one, hosts)[0]
        sizes = [face.mtu_bytes for face in one.facts.interfaces or () if face.name == name]
        return str(sizes[0]) if sizes and sizes[0] else ""

    def adapter_mtu(one: Probed) -> str:
        return _each(adapter.active_mtu_bytes or None for adapter in network_of(one, hosts).adapters)

    def rates(one: Probed) -> str:
        rate = network_of(one, hosts).rate_bytes_per_s
        return format_bit_rate(rate) if rate else ""

    asked: list[tuple[str, str, Callable[[Probed], str], str]] = [
        ("gpu-kind", "GPUs", of_facts(gpu_names), "a run needs the same card everywhere: leave the odd hosts out"),
        (
            "gpu-count",
            "number of GPUs",
            of_facts(lambda f: str(len(f.gpus or ()))),
            "see nvidia-smi on the hosts with fewer",
        ),
        ("gpu-memory", "memory of a GPU", of_facts(_gpu_memory), "check ECC and MIG on the odd hosts"),
        ("nvlink", "NVLinks of a GPU", of_facts(_nvlinks), "see nvidia-smi nvlink -s, and the fabric manager"),
        ("pcie", "PCIe link of a GPU", of_facts(_pcie), "reseat the cards, and see the link settings of the BIOS"),
        ("fabric", "network", lambda one: network_of(one, hosts).kind, "see /sys/class/infiniband on the odd hosts"),
        ("adapter-count", "adapters for the GPUs", lambda one: str(len(network_of(one, hosts).adapters)), "see ibstat"),
        ("adapter-rate", "rate of a NIC", rates, "check cables and switch ports of the slower hosts"),
        ("adapter-mtu", "active MTU of the adapters", adapter_mtu, "set the same MTU everywhere"),
        ("mtu", "MTU of the interface between the hosts", mtu, "set the same MTU everywhere: large messages hang else"),
        ("memory", "main memory", of_facts(_memory), "the spec takes the smallest"),
        ("cpu-cores", "CPU cores", of_facts(lambda f: str(f.cpu_cores or "")), "the spec takes the fewest"),
        ("sockets", "CPU sockets", of_facts(lambda f: str(f.sockets or "")), "the spec takes the most common number"),
        ("driver", "driver", partial(_version, "driver"), "install one driver version everywhere"),
        ("peermem", "GPUDirect module", of_facts(_peermem), "modprobe nvidia-peermem where it is missing"),
    ]
    for library in ("python", *LIBRARIES):
        asked.append((f"version-{library}", library, partial(_version, library), "make the environments equal"))
    found = [_compare(hosts, *one) for one in asked]
    return tuple(check for check in found if check is not None) + _same_machine(hosts)


def gpu_names(facts: HostFacts) -> str:
    """Return the names of a host's GPUs according to the driver, each once."""
    return _each(gpu.name for gpu in facts.gpus or ())


def _each(values: Iterable[T | None], words: Callable[[T], str] = str) -> str:
    """Join the known values, each once, in ascending order."""
    return " and ".join(map(words, sorted({value for value in values if value is not None})))


def _compare(
    hosts: Sequence[Probed], name: str, label: str, value: Callable[[Probed], str], remedy: str
) -> Result | None:
    by_value: dict[str, list[str]] = defaultdict(list)
    for one in hosts:
        by_value[value(one)].append(one.name)
    if len(by_value) < 2:
        return None
    # The most common value first; the ones after it are odd.
    groups = sorted(by_value.items(), key=lambda group: (-len(group[1]), group[0]))
    what = "; ".join(f"{shown or 'not known'} on {named(names)}" for shown, names in groups)
    made = failure if name == "gpu-kind" else warning
    return made(f"{label}: {what}", remedy, name=name)


def named(names: Sequence[str]) -> str:
    """Return some of the names, and how many more there are."""
    return units.named(names, _MOST_NAMED)


def _same_machine(hosts: Sequence[Probed]) -> tuple[Result, ...]:
    """Return a failure for each machine with several names, recognized by its boot id and host name."""
    by_machine: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in hosts:
        if one.facts.boot_id:
            by_machine[one.facts.boot_id, one.facts.hostname].append(one.name)
    return tuple(
        failure(f"{named(names)} are one machine, {hostname}", "name each machine once", name="same-machine")
        for (_, hostname), names in by_machine.items()
        if len(names) > 1
    )


def _version(name: str, one: Probed) -> str:
    return one.facts.versions.get(name, "")


def _gpu_memory(facts: HostFacts) -> str:
    return _each((gpu.memory_bytes or None for gpu in facts.gpus or ()), lambda size: f"{size // 2**20}MiB")


def _nvlinks(facts: HostFacts) -> str:
    return _each(gpu.nvlink_count for gpu in facts.gpus or ())


def _pcie(facts: HostFacts) -> str:
    return _each((gpu.pcie_bytes_per_s or None for gpu in facts.gpus or ()), lambda rate: f"{rate / 1e9:.3g}GB/s")


def _memory(facts: HostFacts) -> str:
    """Return the memory size rounded to 2%: firmware and kernels reserve slightly different amounts."""
    size = memory_of(facts)
    if not size:
        return ""
    step = 2 ** max(0, size.bit_length() - 6)
    return format_gib(round(size / step) * step)


def memory_of(facts: HostFacts) -> int | None:
    """Return the memory that a run may use on the host: physical memory, or the limit of the session's container."""
    known = [size for size in (facts.memory_bytes, facts.cgroup_memory_bytes) if size]
    return min(known, default=None)


def _peermem(facts: HostFacts) -> str:
    return "" if facts.peermem is None else "loaded" if facts.peermem else "not loaded"
