"""One round to a host: the script that asks everything, and its output as `HostFacts`.

The script is a text for `Connection.run`. It runs in any POSIX shell, only reads, and gives every tool a time limit of
its own; all tools run at the same time, so that a host takes as long as its slowest one, some 25 s at the worst.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files

from topoplan.hosts.facts import GpuFacts, HostFacts, PathFacts
from topoplan.hosts.parse_infiniband import parse_adapters, parse_mtus
from topoplan.hosts.parse_ip import parse_default_interface, parse_interfaces, parse_listening, parse_route
from topoplan.hosts.parse_lscpu import parse_cpus
from topoplan.hosts.parse_nvidia_smi import parse_driver, parse_gpus, parse_nvlink, parse_processes, with_nvlink
from topoplan.hosts.parse_system import (
    parse_cgroup_memory,
    parse_df,
    parse_limits,
    parse_meminfo,
    parse_nccl_settings,
    parse_path,
    parse_port_range,
)
from topoplan.hosts.parse_topology import parse_topology
from topoplan.hosts.sections import Section, number, pairs, read_sections
from topoplan.terminal import plain_values

COLLECT_S = 40.0
"""A deadline for the script that it keeps unless the host itself does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to ask a host, beside what is always asked."""

    paths: tuple[str, ...] = ()
    """Paths whose files matter: they are counted, and fingerprinted by names and sizes."""
    places: tuple[str, ...] = ()
    """Paths that are only looked at from outside: whether they are there, writable and on a disk with room."""
    routes: tuple[str, ...] = ()
    """Names or addresses: what they mean on the host, and which interface leads there."""
    python: str | None = None
    """The Python to ask for versions; None is the one on the PATH."""
    versions: bool = True
    gpus: bool = True


def collect_script(wanted: Wanted) -> str:
    """The script that asks a host, for `Connection.run` with `COLLECT_S`."""
    always = [
        "section system 3 system",
        "section addresses 8 addresses",
        "section speeds 3 speeds",
        "section default-route 8 default_route",
        "section cpus 8 cpus",
        'file meminfo "$proc/meminfo"',
        "section shared-memory 4 shared_memory",
        "section limits 3 limits",
        "section cgroup 3 cgroup_memory",
        "section container 3 container",
        "section machine 4 machine",
        "section nccl 5 nccl_settings",
        "section listening 6 listening",
    ]
    groups = [always, ["section adapters 10 adapters"], ["section adapter-mtus 6 adapter_mtus"]]
    if wanted.gpus:
        groups += [
            ["section gpu-places 3 gpu_places", "section gpus 30 gpus"],
            ["section gpu-processes 25 gpu_processes"],
            ["section topology 22 nvidia_smi topo -m"],
            ["section nvlink 22 nvidia_smi nvlink -s"],
        ]
    groups += [[f"section route 14 route {shlex.quote(address)}"] for address in dict.fromkeys(wanted.routes)]
    groups += [[f"section path 22 path {shlex.quote(path)} files"] for path in dict.fromkeys(wanted.paths)]
    groups += [
        [f"section path 22 path {shlex.quote(path)} -"]
        for path in dict.fromkeys(wanted.places)
        if path not in wanted.paths
    ]
    if wanted.versions:
        program = shlex.quote(_text("versions.py"))
        groups.append([f"section versions 18 versions {shlex.quote(wanted.python or '')} {program}"])
    # Each group writes what it found and then what the one before it hands on, so they all run at the same time and
    # nothing is written by two at once.
    first, *others = ["\n".join(group) for group in reversed(groups)]
    stages = [f"{{\n{first}\n}}", *(f"{{\n{group}\ncat\n}}" for group in others)]
    clock = 'printf \'@@topoplan clock 0 %s\\n%s\\n\' "${#clock}" "$clock"'
    return "\n".join(
        [
            _text("collect.sh"),
            "clock=$(date +%s.%N)",
            clock,
            " |\n".join(stages),
            "printf '@@topoplan end 0 0\\n\\n'",
            "",
        ]
    )


@lru_cache(maxsize=8)
def _text(name: str) -> str:
    return files("topoplan").joinpath("hosts", "scripts", name).read_text(encoding="utf-8")


def host_facts(output: bytes) -> HostFacts:
    """What the script's output says. Never raises: what cannot be read is None, and `missing` says why.

    All text in it is plain, so that it can be shown.
    """
    sections = read_sections(output)
    by_name = {section.name: section for section in sections}
    missing: dict[str, str] = {}

    def text(name: str, *fields: str, tool: str = "") -> str | None:
        """What a section says; None where there is nothing to read, which is noted for the fields."""
        section = by_name.get(name)
        why = _why_not(section)
        if section is None or why:
            missing.update(dict.fromkeys(fields, f"{tool}: {why}" if tool else why))
            return None
        return section.text

    system = dict(pairs(text("system", "hostname", "kernel", "boot_id", "port_range", "peermem") or ""))
    peermem = system.get("peermem")
    cpus = parse_cpus(text("cpus", "sockets", "cpu_cores", tool="lscpu") or "")
    memory = parse_meminfo(text("meminfo", "memory_bytes", "memory_available_bytes", tool="/proc/meminfo") or "")
    shm = parse_df(text("shared-memory", "shm_bytes", "shm_free_bytes", tool="df /dev/shm") or "", has_type=False)
    memlock, open_files = parse_limits(text("limits", "memlock_bytes", "open_files") or "")
    gpus_text = text("gpus", "gpus", tool="nvidia-smi")
    matrix = text("topology", "topology", tool="nvidia-smi topo -m")
    topology = parse_topology(matrix) if matrix is not None else None
    nvlink = text("nvlink")
    interfaces = text("addresses", "interfaces", tool="ip")
    default_route = text("default-route", "default_interface", tool="ip")
    adapters = text("adapters", "adapters", tool="/sys/class")
    processes = text("gpu-processes", "gpu_processes", tool="nvidia-smi")
    listening = text("listening", "listening_ports", tool="ss")
    container = text("container", "in_container")
    machine = pairs(text("machine", "firmware", "pci", "daemons", tool="/sys") or "")
    said = dict(pairs(text("versions", "versions", tool="python") or ""))
    gpus = None
    if gpus_text is not None:
        gpus = with_nvlink(parse_gpus(gpus_text), parse_nvlink(nvlink or ""))
        gpus = _placed(gpus, text("gpu-places") or "", topology.numa_nodes if topology else {})
        if driver := parse_driver(gpus_text):
            said["driver"] = driver
    found = HostFacts(
        hostname=system.get("hostname", ""),
        gpus=gpus,
        gpu_processes=None if processes is None else parse_processes(processes),
        topology=topology.links if topology else None,
        adapters=None if adapters is None else parse_adapters(adapters, parse_mtus(text("adapter-mtus") or "")),
        interfaces=None if interfaces is None else parse_interfaces(interfaces, text("speeds") or ""),
        routes=tuple(route for one in sections if one.name == "route" and (route := parse_route(one.text)) is not None),
        default_interface=parse_default_interface(default_route or ""),
        sockets=cpus.sockets,
        cpu_cores=cpus.cores,
        memory_bytes=memory.get("MemTotal"),
        memory_available_bytes=memory.get("MemAvailable"),
        shm_bytes=shm.size_bytes if shm else None,
        shm_free_bytes=shm.free_bytes if shm else None,
        memlock_bytes=memlock,
        open_files=open_files,
        port_range=parse_port_range(system.get("port_range", "")),
        listening_ports=None if listening is None else parse_listening(listening),
        peermem=None if peermem is None else peermem == "yes",
        kernel=system.get("kernel", ""),
        boot_id=system.get("boot_id", ""),
        clock_s=_clock(text("clock", "clock_s") or ""),
        paths={path.path: path for one in sections if one.name == "path" and (path := _path(one)) is not None},
        python=said.pop("executable", ""),
        versions=dict(sorted(said.items())),
        nccl_settings=parse_nccl_settings(text("nccl", "nccl_settings") or ""),
        cgroup_memory_bytes=parse_cgroup_memory(text("cgroup") or ""),
        in_container=None if container is None else bool(container.strip()),
        firmware={label: value for label, value in machine if label not in ("pci", "daemon")},
        pci=tuple(sorted({value for label, value in machine if label == "pci"})),
        daemons=tuple(value for label, value in machine if label == "daemon"),
    )
    if "end" not in by_name:
        missing.setdefault("end", "the host's answer was cut off")
    return plain_values(replace(found, missing=missing))


def _why_not(section: Section | None) -> str:
    if section is None:
        return "not asked, or its answer was lost"
    return section.problem or ("" if section.is_whole else "its answer was cut off")


def _path(section: Section) -> PathFacts | None:
    """A path's quick facts are good even where the rest of them took too long."""
    return parse_path(section.text)


def _placed(gpus: tuple[GpuFacts, ...], places: str, nodes: Mapping[int, int]) -> tuple[GpuFacts, ...]:
    """The cards with their NUMA nodes: sysfs's, else those of the matrix."""
    by_bus = {bus: node for bus, value in pairs(places) if (node := number(value)) is not None and node >= 0}
    return tuple(replace(gpu, numa_node=by_bus.get(gpu.pci_bus, nodes.get(gpu.index))) for gpu in gpus)


def _clock(text: str) -> float | None:
    match = re.match(r"\s*(\d{1,12}(?:\.\d{1,9})?)", text, re.ASCII)
    return float(match[1]) if match else None
