"""What `deepspeed` makes of its host file: hosts, GPUs of each, and the filters of a command.

Source: DeepSpeed 0.19 `launcher/runner.py` (`_parse_hostfile`, `parse_resource_filter`, `main`).
"""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.lint.rules.launch_table import RULES
from topoplan.reading.finding import Finding
from topoplan.reading.hostfile import Hostfile
from topoplan.reading.launch_facts import certain_count, certain_text, from_outside
from topoplan.reading.mpi import mpi_of
from topoplan.reading.setup import Launch, Option, Setup
from topoplan.reading.slurm import step_of


def findings(setup: Setup) -> Iterator[Finding]:
    """Report host files that DeepSpeed refuses, and commands that do not go with theirs."""
    read_by_deepspeed = [one for one in map(setup.hostfile_of, setup.launches) if one is not None]
    for hosts in read_by_deepspeed:
        for line, text in hosts.unread:
            yield RULES["launch-hostfile"].found(hosts.part, line, text=text)
        for line, host in hosts.twice:
            yield RULES["launch-hostfile.twice"].found(hosts.part, line, host=host)
    for launch in setup.launches:
        if launch.starter == "deepspeed":
            yield from _of_command(setup, launch)


def _of_command(setup: Setup, launch: Launch) -> Iterator[Finding]:
    hosts, nodes = setup.hostfile_of(launch), launch.options.get("num_nodes")
    count = certain_count(nodes)
    if "hostfile" not in launch.options and not from_outside(launch):
        mpi = mpi_of(launch)
        started = step_of(launch).nodes if "srun" in launch.wrappers else mpi.count if mpi else None
        if count is not None and count > 1:
            yield RULES["launch-hostfile-missing"].on(launch, nodes, nodes=count)
        elif started and started > 1 and "node_rank" not in launch.options:
            wrapper = "srun" if "srun" in launch.wrappers else "mpirun"
            yield RULES["launch-hostfile-missing.step"].on(launch, nodes=started, wrapper=wrapper)
    if hosts is None or hosts.unread or not hosts.slots:
        return
    if count is not None and count > len(hosts.slots):
        yield RULES["launch-hostfile-fewer"].on(
            launch, nodes, nodes=count, hosts=len(hosts.slots), file=hosts.part.name
        )
    gpus, (host, slots) = launch.options.get("num_gpus"), min(hosts.slots.items(), key=lambda one: one[1])
    if (certain_count(gpus) or 0) > slots:
        said = {"gpus": certain_count(gpus), "host": host, "slots": slots, "file": hosts.part.name}
        yield RULES["launch-hostfile-gpus"].on(launch, gpus, **said)
    for name in ("include", "exclude"):
        option = launch.options.get(name)
        if option is not None and certain_text(option):
            yield from _filter(launch, option, name, hosts)


def _filter(launch: Launch, option: Option, name: str, hosts: Hostfile) -> Iterator[Finding]:
    for place in option.value.split("@"):
        host, _, slots = place.partition(":")
        if host not in hosts.slots:
            yield RULES["launch-hostfile-filter"].on(launch, option, option=name, host=host, file=hosts.part.name)
            continue
        beyond = [one for one in slots.split(",") if one.isdecimal() and int(one) >= hosts.slots[host]]
        if beyond:
            rule = RULES["launch-hostfile-filter.slot" if name == "exclude" else "launch-hostfile-filter.included"]
            said = {"option": name, "host": host, "slot": beyond[0], "slots": hosts.slots[host]}
            yield rule.on(launch, option, file=hosts.part.name, **said)
