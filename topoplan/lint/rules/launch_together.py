"""Comparison of the scripts of one job, one per node: what must be the same in all of them.

Two directories are two jobs. Scripts in one directory are two jobs if they have different names for the same node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import PurePath

from topoplan.lint.rules.launch_table import RULES
from topoplan.reading.finding import Finding
from topoplan.reading.launch_facts import (
    LOCAL_ADDRESS,
    certain_count,
    certain_text,
    configurations_of,
    nodes_of,
    own_rank,
    setting_of,
)
from topoplan.reading.processes import processes_of
from topoplan.reading.setup import Launch, Option, Setup, Variable
from topoplan.units import shown

_SWITCHES = frozenset(["USE_MCA", "USE_MEGATRON_BRIDGE", "FORCE_TORCHRUN", "CUDA_DEVICE_MAX_CONNECTIONS"])
_DEFAULTS = {"nnodes": "1", "nproc_per_node": "1", "master_port": "29500"}
"""torchrun's defaults."""
_OF_A_NODE = re.compile(r"NCCL_(?:SOCKET_IFNAME|IB_HCA|IB_GID_INDEX|TOPO_FILE|DEBUG\w*)")
"""NCCL variables that may differ between nodes."""


def findings(setup: Setup) -> Iterator[Finding]:
    """Report how the scripts of the other nodes differ from that of the first."""
    for launches in _jobs(setup):
        first, *others = launches
        ranks: dict[int | None, Launch] = {}
        for launch in launches:
            rank = own_rank(launch)
            same = ranks.setdefault(certain_count(rank), launch)
            if same is not launch:
                yield RULES["launch-nodes-disagree.rank"].on(
                    launch, rank, rank=certain_count(rank), file=same.part.name
                )
        for launch in others:
            yield from _settings(first, launch)
            yield from _processes(first, launch)
            yield from _variables(first, launch)
            yield from _keys(setup, first, launch)


def _jobs(setup: Setup) -> Iterator[list[Launch]]:
    """Yield the launches of each multi-node job that has one script per node, ordered by rank."""
    scripts = [one for one in setup.launches if not one.part.label and _is_of_a_node(setup, one)]
    for _, of_job in groupby(sorted(scripts, key=_job), key=_job):
        launches = sorted(of_job, key=lambda one: (certain_count(own_rank(one)) or 0, one.part.name))
        alike = len({re.sub(r"\d+", "", one.part.name) for one in launches}) == 1
        ranks = {certain_count(own_rank(one)) for one in launches}
        several = any((_nodes(one) or 1) > 1 for one in launches)
        if several and len(launches) > 1 and (alike or len(ranks) == len(launches)):
            yield launches


def _is_of_a_node(setup: Setup, launch: Launch) -> bool:
    """Whether a launch is the only command of its file and says which node it is for."""
    is_alone = sum(one.part.name == launch.part.name for one in setup.launches) == 1
    rank, nodes = certain_count(own_rank(launch)), _nodes(launch)
    return is_alone and rank is not None and nodes is not None


def _nodes(launch: Launch) -> int | None:
    return processes_of(launch).nodes if launch.starter == "accelerate" else nodes_of(launch)


def _job(launch: Launch) -> tuple[str, str, str]:
    return str(PurePath(launch.part.name).parent), launch.starter, launch.program


def _settings(first: Launch, launch: Launch) -> Iterator[Finding]:
    """Report differing numbers of nodes and processes, addresses and ports, if both values are certain."""
    for option in ("nnodes", "nproc_per_node", "master_addr", "master_port"):
        one, other = (_said(each, option) for each in (first, launch))
        of_itself = option == "master_addr" and one is not None and LOCAL_ADDRESS.fullmatch(one)
        if one is not None and other is not None and one != other and not of_itself:
            name, where = f"--{option}" if launch.starter else option.upper(), setting_of(launch, option)
            yield _differs("launch-nodes-disagree", launch, where, first, name, one, other)


def _processes(first: Launch, launch: Launch) -> Iterator[Finding]:
    """Report differing numbers of processes where one of them follows from the GPUs that are visible."""
    one, other = (processes_of(each).gpus_per_node for each in (first, launch))
    is_said = all(setting_of(each, "nproc_per_node") for each in (first, launch))
    takes_all = launch.starts_torchrun and launch.trains is not None and launch.trains.takes_all_gpus
    if takes_all and not is_said and one and other and one != other:
        where = setting_of(launch, "nproc_per_node") or launch.variable("CUDA_VISIBLE_DEVICES")
        yield _differs("launch-nodes-disagree.processes", launch, where, first, "", str(one), str(other))


def _said(launch: Launch, option: str) -> str | None:
    setting = setting_of(launch, option)
    return certain_text(setting) if setting or launch.starter != "torchrun" else _DEFAULTS.get(option)


def _variables(first: Launch, launch: Launch) -> Iterator[Finding]:
    """Report differing variables that NCCL and the trainer need to be the same on every node."""
    for name in sorted({one.name for each in (first, launch) for one in each.variables}):
        if name not in _SWITCHES and (not name.startswith("NCCL_") or _OF_A_NODE.fullmatch(name)):
            continue
        here = launch.variable(name)
        one, other = ("not set" if each is None else certain_text(each) for each in (first.variable(name), here))
        if one is not None and other is not None and one != other:
            yield _differs("launch-nodes-disagree.environment", launch, here, first, name, one, other)


def _keys(setup: Setup, first: Launch, launch: Launch) -> Iterator[Finding]:
    """Report differing keys of the trainer: layout, batch, model, data."""
    ours, theirs = configurations_of(setup, first), configurations_of(setup, launch)
    if len(ours) != 1 or len(theirs) != 1 or ours[0].source.data == theirs[0].source.data:
        return
    one, other = ours[0].source.data, theirs[0].source.data
    for key in sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key)):
        line = theirs[0].line(key) if theirs[0].part is launch.part else None
        values = (_value(one.get(key)), _value(other.get(key)))
        yield _differs("launch-nodes-disagree.keys", launch, line, first, key, *values)


def _differs(
    rule: str, launch: Launch, where: Option | Variable | int | None, first: Launch, name: str, one: str, other: str
) -> Finding:
    return RULES[rule].on(launch, where, name=name, value=other, other=one, file=first.part.name)


def _value(value: object) -> str:
    return "not set" if value is None else shown(value)
