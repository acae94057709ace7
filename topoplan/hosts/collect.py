"""Collect the facts about a host in one round: the script that queries everything, and its output as `HostFacts`.

The script is a text for `Connection.run`. It runs in any POSIX shell, only reads, and gives every tool a time limit of
its own. Slow tools run concurrently, so a host takes about as long as its slowest tool.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from topoplan.hosts.facts import LIBRARIES, GpuFacts, HostFacts
from topoplan.hosts.parse_network import (
    parse_adapters,
    parse_default_interface,
    parse_interfaces,
    parse_listening,
    parse_mtus,
    parse_route,
)
from topoplan.hosts.parse_nvidia_smi import (
    parse_driver,
    parse_gpus,
    parse_nvlink,
    parse_processes,
    parse_topology,
    with_nvlink,
)
from topoplan.hosts.parse_system import (
    parse_cgroup_memory,
    parse_cpus,
    parse_df,
    parse_limits,
    parse_meminfo,
    parse_nccl_settings,
    parse_path,
    parse_port_range,
)
from topoplan.hosts.sections import number, pairs, read_sections
from topoplan.remote.connection import program
from topoplan.terminal import plain_values

T = TypeVar("T")

COLLECT_S = 40.0
"""A deadline that the script meets unless the host itself does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectRequest:
    """What to ask a host in addition to what is always asked."""

    paths: tuple[str, ...] = ()
    """Paths whose files matter: the files are counted, and fingerprinted by names and sizes."""
    places: tuple[str, ...] = ()
    """Paths of which only existence, write permission and free space matter."""
    routes: tuple[str, ...] = ()
    """Names or addresses to resolve on the host, and to look up the route to."""
    python: str | None = None
    """The Python to ask for versions; None for the one on PATH."""
    versions: bool = True
    gpus: bool = True


COLLECT = program("hosts", "collect.sh")
VERSIONS = program("hosts", "versions.py").replace("@names@", " ".join(LIBRARIES))
"""`COLLECT` is for `Connection.run`, with `COLLECT_S` and `collect_arguments`; it runs `VERSIONS` with Python."""


def collect_arguments(wanted: CollectRequest) -> tuple[str, ...]:
    """Return the script's arguments."""
    words = ["machine"]
    if wanted.gpus:
        words.append("gpus")
    for address in dict.fromkeys(wanted.routes):
        words += ["route", address]
    for path in dict.fromkeys(wanted.paths):
        words += ["path", path, "files"]
    for path in dict.fromkeys(wanted.places):
        if path not in wanted.paths:
            words += ["path", path, "-"]
    if wanted.versions:
        words += ["versions", wanted.python or "", VERSIONS]
    return tuple(words)


def host_facts(output: bytes) -> HostFacts:
    """Parse the script's output. Never raises: what cannot be read is None, and `missing` gives the reason.

    All text in the result is sanitized, so that it can be shown.
    """
    sections = _Sections(output)
    found = HostFacts(
        **_system(sections),
        **_gpus(sections),
        **_network(sections),
        **_memory(sections),
        **_software(sections),
        paths={path.path: path for text in sections.all("path") if (path := parse_path(text)) is not None},
    )
    if not sections.is_whole:
        sections.missing.setdefault("end", "the host's answer was cut off")
    return plain_values(replace(found, missing=sections.missing))


class _Sections:
    def __init__(self, output: bytes) -> None:
        self._sections = read_sections(output)
        self._by_name = {section.name: section for section in self._sections}
        self.missing: dict[str, str] = {}
        self.is_whole = "end" in self._by_name

    def text(self, name: str, *fields: str, tool: str = "") -> str | None:
        """Return the text of a section, or None if there is none, which is recorded as missing for `fields`."""
        section = self._by_name.get(name)
        why = section.problem if section is not None else "not asked, or its answer was lost"
        if section is None or why:
            self.missing.update(dict.fromkeys(fields, f"{tool}: {why}" if tool else why))
            return None
        return section.text

    def read(self, parse: Callable[[str], T], name: str, field: str, *, tool: str = "") -> T | None:
        """Return the parsed text of a section, or None if there is none."""
        text = self.text(name, field, tool=tool)
        return None if text is None else parse(text)

    def all(self, name: str) -> Iterator[str]:
        """Yield the texts of all sections with a name; they are valid even if later ones took too long."""
        return (section.text for section in self._sections if section.name == name)


def _system(sections: _Sections) -> dict[str, Any]:
    fields = dict(pairs(sections.text("system", "hostname", "kernel", "boot_id", "port_range", "peermem") or ""))
    sockets, cores = parse_cpus(sections.text("cpus", "sockets", "cpu_cores", tool="lscpu") or "")
    machine = pairs(sections.text("machine", "firmware", "pci", "daemons", tool="/sys") or "")
    container = sections.text("container", "in_container")
    clock = re.match(r"\s*(\d{1,12}(?:\.\d{1,9})?)", sections.text("clock", "clock_s") or "", re.ASCII)
    return {
        "hostname": fields.get("hostname", ""),
        "kernel": fields.get("kernel", ""),
        "boot_id": fields.get("boot_id", ""),
        "port_range": parse_port_range(fields.get("port_range", "")),
        "peermem": None if "peermem" not in fields else fields["peermem"] == "yes",
        "sockets": sockets,
        "cpu_cores": cores,
        "clock_s": float(clock[1]) if clock else None,
        "in_container": None if container is None else bool(container.strip()),
        "firmware": {label: value for label, value in machine if label not in ("pci", "daemon")},
        "pci": tuple(sorted({value for label, value in machine if label == "pci"})),
        "daemons": tuple(value for label, value in machine if label == "daemon"),
    }


def _gpus(sections: _Sections) -> dict[str, Any]:
    gpus = sections.read(parse_gpus, "gpus", "gpus", tool="nvidia-smi")
    topology = sections.read(parse_topology, "topology", "topology", tool="nvidia-smi topo -m")
    processes = sections.read(parse_processes, "gpu-processes", "gpu_processes", tool="nvidia-smi")
    if gpus is not None:
        gpus = with_nvlink(gpus, parse_nvlink(sections.text("nvlink") or ""))
        gpus = _placed(gpus, sections.text("gpu-places") or "", topology[1] if topology else {})
    return {"gpus": gpus, "gpu_processes": processes, "topology": topology[0] if topology else None}


def _network(sections: _Sections) -> dict[str, Any]:
    speeds, mtus = sections.text("speeds") or "", parse_mtus(sections.text("adapter-mtus") or "")
    default_route = sections.text("default-route", "default_interface", tool="ip")
    return {
        "adapters": sections.read(lambda text: parse_adapters(text, mtus), "adapters", "adapters", tool="/sys/class"),
        "interfaces": sections.read(lambda text: parse_interfaces(text, speeds), "addresses", "interfaces", tool="ip"),
        "routes": tuple(route for text in sections.all("route") if (route := parse_route(text)) is not None),
        "default_interface": parse_default_interface(default_route or ""),
        "listening_ports": sections.read(parse_listening, "listening", "listening_ports", tool="/proc/net/tcp"),
    }


def _memory(sections: _Sections) -> dict[str, Any]:
    meminfo = sections.text("meminfo", "memory_bytes", "memory_available_bytes", tool="/proc/meminfo")
    memory = parse_meminfo(meminfo or "")
    shared = sections.text("shared-memory", "shm_bytes", "shm_free_bytes", tool="df /dev/shm")
    shm = parse_df(shared or "", has_type=False)
    memlock, open_files = parse_limits(sections.text("limits", "memlock_bytes", "open_files") or "")
    return {
        "memory_bytes": memory.get("MemTotal"),
        "memory_available_bytes": memory.get("MemAvailable"),
        "shm_bytes": shm.size_bytes if shm else None,
        "shm_free_bytes": shm.free_bytes if shm else None,
        "memlock_bytes": memlock,
        "open_files": open_files,
        "cgroup_memory_bytes": parse_cgroup_memory(sections.text("cgroup") or ""),
    }


def _software(sections: _Sections) -> dict[str, Any]:
    versions = dict(pairs(sections.text("versions", "versions", tool="python") or ""))
    if driver := parse_driver(sections.text("gpus") or ""):
        versions["driver"] = driver
    return {
        "python": versions.pop("executable", ""),
        "versions": dict(sorted(versions.items())),
        "nccl_settings": parse_nccl_settings(sections.text("nccl", "nccl_settings") or ""),
    }


def _placed(gpus: tuple[GpuFacts, ...], places: str, nodes: Mapping[int, int]) -> tuple[GpuFacts, ...]:
    """Return the GPUs with their NUMA nodes from sysfs, or else from the topology matrix."""
    by_bus = {bus: node for bus, value in pairs(places) if (node := number(value)) is not None and node >= 0}
    return tuple(replace(gpu, numa_node=by_bus.get(gpu.pci_bus, nodes.get(gpu.index))) for gpu in gpus)
