"""Machines built from recorded output: as facts, as the collecting script's output, and as a stand-in `nvidia-smi`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from topoplan.hosts.collect import host_facts
from topoplan.hosts.facts import HostFacts
from topoplan.hosts.probe import Probed
from topoplan.specs.cluster import Host

RECORDED = Path(__file__).parent / "recorded"
MACHINES = sorted(path.parent.name for path in RECORDED.glob("*/topology.txt"))
LSCPU = "Architecture:         x86_64\nCPU(s):               224\n  Core(s) per socket: 56\n  Socket(s):          2\n"
_FILES = {
    "gpus": "gpus.csv",
    "gpu-processes": "processes.csv",
    "topology": "topology.txt",
    "nvlink": "nvlink.txt",
    "adapters": "adapters.txt",
    "adapter-mtus": "ibv_devinfo.txt",
    "machine": "machine.txt",
}


def recorded(machine: str, file: str) -> str:
    return (RECORDED / machine / file).read_text()


def frame(sections: Mapping[str, str] | Sequence[tuple[str, str]]) -> bytes:
    """Return sections as the script prints them."""
    pairs = sections.items() if isinstance(sections, Mapping) else sections
    whole = b""
    for name, text in (*pairs, ("end", "")):
        data = text.encode()
        whole += f"@@topoplan {name} 0 {len(data)}\n".encode() + data + b"\n"
    return whole


def answer(
    machine: str,
    *,
    hostname: str = "node0",
    address: str = "10.0.0.10",
    routes: Sequence[tuple[str, str, str]] = (),
    changes: Mapping[str, str] | None = None,
) -> bytes:
    """Return the script's output on a machine; `routes` are (name, address, interface), `changes` other sections."""
    sections = {
        "system": f"hostname\t{hostname}\nkernel\t6.8.0\nboot_id\t{hostname}-boot\n"
        "port_range\t32768\t60999\npeermem\tyes\n",
        "clock": "1790000000.123456789\n",
        "addresses": json.dumps(
            [
                {
                    "ifname": "lo",
                    "flags": ["UP"],
                    "mtu": 65536,
                    "operstate": "UNKNOWN",
                    "addr_info": [{"local": "127.0.0.1"}],
                },
                {"ifname": "bond0", "flags": ["UP"], "mtu": 9000, "operstate": "UP", "addr_info": [{"local": address}]},
            ]
        ),
        "speeds": "bond0\t25000\nlo\t-1\n",
        "default-route": '[{"dst":"default","gateway":"10.0.0.1","dev":"bond0","flags":[]}]',
        "cpus": LSCPU,
        "meminfo": "MemTotal:       2113453272 kB\nMemFree:        2001000000 kB\nMemAvailable:   2090000000 kB\n",
        "shared-memory": "Filesystem 1024-blocks Used Available Capacity Mounted on\n"
        "tmpfs 1056726636 0 1056726636 0% /dev/shm\n",
        "limits": "memlock\tunlimited\nopen_files\t1048576\n",
        "versions": "executable\t/opt/venv/bin/python\npython\t3.11.9\ntorch\t2.6.0+cu124\ncuda\t12.4\nnccl\t2.21.5\n",
        **{name: recorded(machine, file) for name, file in _FILES.items() if (RECORDED / machine / file).exists()},
        **(changes or {}),
    }
    pairs = list(sections.items())
    for name, target, interface in routes:
        found = json.dumps([{"dst": target, "dev": interface, "prefsrc": address}])
        pairs.append(("route", f"asked\t{name}\n{target} STREAM {name}\n@route\n{found}"))
    return frame(pairs)


def facts(machine: str, **how: object) -> HostFacts:
    return host_facts(answer(machine, **how))  # type: ignore[arg-type]


def cluster(
    *machines: str, changes: Mapping[int, Mapping[str, str]] | None = None, interface: str = "bond0"
) -> list[Probed]:
    """Return hosts node0, node1 ... of these kinds on one network; `changes` are sections by host index."""
    names = [f"node{index}" for index in range(len(machines))]
    addresses = {name: f"10.0.0.{10 + index}" for index, name in enumerate(names)}
    return [
        Probed(
            name=name,
            host=Host(address=name),
            hostname=name,
            user="me",
            port=22,
            facts=facts(
                machine,
                hostname=name,
                address=addresses[name],
                routes=[(other, addresses[other], "lo" if other == name else interface) for other in names],
                changes=(changes or {}).get(index),
            ),
        )
        for index, (name, machine) in enumerate(zip(names, machines, strict=True))
    ]


def stand_in(directory: Path, machine: str) -> Path:
    """Create a program `nvidia-smi` that prints the machine's recordings; return the directory for the PATH."""
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "nvidia-smi"
    here = RECORDED / machine
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f"  *--query-gpu=*) cat '{here}/gpus.csv' ;;\n"
        f"  *--query-compute-apps=*) cat '{here}/processes.csv' ;;\n"
        f"  'topo -m') cat '{here}/topology.txt' ;;\n"
        f"  'nvlink -s') cat '{here}/nvlink.txt' ;;\n"
        "  *) echo 'Invalid combination of input arguments.'; exit 2 ;;\n"
        "esac\n"
    )
    script.chmod(0o755)
    return directory
