"""Nodes and processes that fail to find each other: ranks, addresses, ports, numbers of processes.

Facts from torch 2.13 (distributed/run.py) and what trainers that start torchrun themselves hand on to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from topoplan.errors import nearest
from topoplan.lint.rules.launch_table import RULES
from topoplan.reading.edits import rewritten
from topoplan.reading.finding import Finding
from topoplan.reading.launch_facts import (
    LAST_PORT,
    LOCAL_ADDRESS,
    assignment,
    certain_count,
    certain_text,
    endpoint,
    from_outside,
    is_in_file,
    is_port,
    is_remote,
    is_static,
    nodes_of,
    own_rank,
    setting_of,
)
from topoplan.reading.processes import processes_of
from topoplan.reading.setup import Launch, Option, Setup, Variable

_DEVICE = re.compile(r"\d+|(?:GPU|MIG)-[\w/-]+")
_NO_ADDRESS = re.compile(r"(?=.*(?:^|\.)(?:25[6-9]|2[6-9]\d|[3-9]\d\d|\d{4,}))\d+(?:\.\d+){3}")
_BACKENDS = ("c10d", "etcd", "etcd-v2", "static")
_WITH_MORE = re.compile(r"^\w+://|:\d+$|/.*$")
_NUMBERS = {
    "nnodes": re.compile(r"[1-9]\d*(?::[1-9]\d*)?"),
    "nproc_per_node": re.compile(r"[1-9]\d*|auto|gpu|cpu|xpu|npu"),
    "node_rank": re.compile(r"\d+"),
}
"""Values that torchrun accepts."""
_PLACEHOLDER_ADDRESS = re.compile(
    r"<.*>|\{.*\}|\[[A-Za-z_ ]+\]|.*[^\x00-\x7f].*|[xX]+(?:\.[xX]+){1,3}|(?:\d+\.)+[xX]+(?:\.[xX]+)*|x+"
    r"|(?i:(?:your|master|main|head|node0|first)?[-_ ]?(?:node)?[-_ ]?(?:ip|ip[-_ ]?addr(?:ess)?)(?:[-_ ]?here)?)"
    r"|(?i:your[-_ ].*)|MASTER_ADDR|\.\.\."
)


def findings(setup: Setup) -> Iterator[Finding]:
    """Report why nodes and processes would fail to find each other."""
    for launch in setup.launches:
        for rule in _RULES:
            yield from rule(setup, launch)
    yield from _same_node_rank(setup)
    yield from _same_port(setup)


def _count_missing(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report a node rank without a node count: `launcher.py` and `cli/main.py` then take NNODES to be 1."""
    if not launch.starts_torchrun or from_outside(launch) or launch.variable("RDZV_ID") is not None:
        return
    rank, address = launch.variable("NODE_RANK"), certain_text(launch.variable("MASTER_ADDR"))
    is_of_several = (certain_count(rank) or 0) > 0 or (address and not LOCAL_ADDRESS.fullmatch(address))
    if rank is not None and is_of_several and launch.variable("NNODES") is None:
        yield RULES["launch-missing-node-count"].on(launch, rank, program=launch.program)


def _rank_variables(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report RANK and WORLD_SIZE where the command reads NODE_RANK and NNODES."""
    if not launch.starts_torchrun:
        return
    rank, nodes = launch.variable("RANK"), nodes_of(launch)
    if rank is not None and launch.variable("NODE_RANK") is None and nodes is not None and nodes > 1:
        is_read = rank.part is not launch.part or re.search(r"\$\{?RANK\b", rank.part.text)
        edits = () if is_read else rewritten(rank, assignment(rank), "NODE_RANK=")
        rule = RULES["launch-rank-variable"]
        yield rule.on(launch, rank, rank=rank.value, program=launch.program, edits=edits)
    world = launch.variable("WORLD_SIZE")
    if world is not None and launch.variable("NNODES") is None and rank is not None and not from_outside(launch):
        rule = RULES["launch-rank-variable.world"]
        yield rule.on(launch, world, world=world.value, rank=rank.value, program=launch.program)


def _missing_node_settings(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report launches of several nodes that lack a setting the nodes need to find each other."""
    nodes = nodes_of(launch)
    if nodes is None or nodes < 2 or from_outside(launch):
        return
    if is_static(launch):
        yield from _missing_torchrun_options(launch, nodes)
    elif launch.starts_torchrun:
        yield from _missing_variables(launch, nodes)


def _missing_torchrun_options(launch: Launch, nodes: int) -> Iterator[Finding]:
    has_endpoint = "rdzv_endpoint" in launch.options
    if "node_rank" not in launch.options:
        yield RULES[f"launch-missing-node-rank{'.static' if has_endpoint else ''}"].on(launch, nodes=nodes)
    if "master_addr" not in launch.options and not has_endpoint:
        yield RULES["launch-missing-master-address"].on(launch, nodes=nodes)


def _missing_variables(launch: Launch, nodes: int) -> Iterator[Finding]:
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if launch.variable(name) is None]
    if "NODE_RANK" in missing and launch.variable("RANK") is None:  # otherwise launch-rank-variable reports it
        yield RULES["launch-missing-node-rank.variable"].on(launch, nodes=nodes)
    if "MASTER_ADDR" in missing:
        yield RULES["launch-missing-master-address.variable"].on(launch, nodes=nodes)


def _address(setup: Setup, launch: Launch) -> Iterator[Finding]:
    nodes, setting = nodes_of(launch), setting_of(launch, "master_addr")
    address = certain_text(setting)
    if setting is None and (setting := launch.options.get("rdzv_endpoint")) is not None:
        address, _ = endpoint(launch)
        if address is None or not LOCAL_ADDRESS.fullmatch(address):
            return
    if setting is None or address is None or nodes is None or nodes < 2:
        return
    if LOCAL_ADDRESS.fullmatch(address):
        if certain_count(setting_of(launch, "node_rank")) == 0:
            return  # node 0 can reach itself under a local address
        yield RULES["launch-local-master-address"].on(launch, setting, nodes=nodes, address=address)
    elif (match := _WITH_MORE.search(address)) and address.count(":") < 2 and not is_in_file(setting):
        yield RULES["launch-address"].on(launch, setting, address=address, more=match[0])
    elif _NO_ADDRESS.fullmatch(address):
        yield RULES["launch-address.range"].on(launch, setting, address=address)
    elif not address or _PLACEHOLDER_ADDRESS.fullmatch(address):
        yield RULES["launch-placeholder-address"].on(launch, setting, address=f"{address!r} " if address else "")


def _node_rank_too_high(setup: Setup, launch: Launch) -> Iterator[Finding]:
    nodes, setting = nodes_of(launch), setting_of(launch, "node_rank")
    rank = certain_count(setting)
    if setting is None or rank is None or nodes is None or rank < nodes or launch.starter == "accelerate":
        return  # of accelerate's, another rule tells
    counted = "1 node" if nodes == 1 else f"{nodes} nodes"
    yield RULES["launch-node-rank-too-high"].on(launch, setting, rank=rank, nodes=counted, last=nodes - 1)


def _port(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report invalid port numbers; of those in accelerate's file, its own rule tells."""
    setting = setting_of(launch, "master_port")
    port = certain_text(setting)
    if setting is None:
        setting, (_, port) = launch.options.get("rdzv_endpoint"), endpoint(launch)
    if port is not None and not is_port(port) and not is_in_file(setting):
        yield RULES["launch-port"].on(launch, setting, port=port or "empty", last=LAST_PORT)


def _numbers(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report counts and ranks that are not numbers."""
    if launch.starter not in ("torchrun", ""):
        return
    for name, pattern in _NUMBERS.items():
        setting = setting_of(launch, name)
        value = certain_text(setting)
        if value is not None and not pattern.fullmatch(value) and not ("pdsh" in launch.wrappers and "%n" in value):
            written = f"--{name}" if launch.starter else name.upper()
            yield RULES["launch-no-number"].on(launch, setting, name=written, value=value or "empty")


def _rendezvous(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report rendezvous settings that c10d ignores or lacks.

    c10d ranks the nodes by itself and reads neither master_addr nor master_port (run.py, get_rdzv_endpoint).
    """
    backend = launch.options.get("rdzv_backend")
    if (name := certain_text(backend)) is not None and (close := nearest(name, _BACKENDS)) and name not in _BACKENDS:
        yield RULES["launch-rendezvous-backend"].on(launch, backend, name=name, close=close)
    rank, nodes = launch.options.get("node_rank"), nodes_of(launch) or 0
    is_c10d = launch.starter == "torchrun" and certain_text(backend) == "c10d"
    if launch.starter == "torchrun" and nodes > 1 and (alone := launch.options.get("standalone")) is not None:
        yield RULES["launch-no-rendezvous.standalone"].on(launch, alone, nodes=nodes)
    elif is_c10d and nodes > 1 and "rdzv_endpoint" not in launch.options and not from_outside(launch):
        yield RULES["launch-no-rendezvous"].on(launch, backend, nodes=nodes)
    if is_c10d and rank is not None:
        yield RULES["launch-node-rank-ignored"].on(launch, rank)


def _processes(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report a number of processes that differs from the number of visible GPUs."""
    setting: Option | Variable | None = setting_of(launch, "nproc_per_node")
    visible = certain_text(launch.variable("CUDA_VISIBLE_DEVICES"))
    count, name = certain_count(setting), "--nproc_per_node" if launch.starter else "NPROC_PER_NODE"
    if launch.starter == "accelerate":
        setting, name = launch.option("num_processes"), "num_processes on each machine"
        count = processes_of(launch).gpus_per_node
    if launch.starter == "deepspeed" or count is None or visible is None or not re.fullmatch(r"\d+(?:,\d+)*", visible):
        return
    devices = len(visible.split(","))
    said = {"name": name, "count": count, "devices": devices}
    if count > devices:
        gpus = "1 GPU" if devices == 1 else f"{devices} GPUs"
        yield RULES["launch-process-count"].on(launch, setting, gpus=gpus, **said)
    elif count < devices and not (launch.trains and launch.trains.spreads_models and launch.is_command):
        yield RULES["launch-process-count.idle"].on(launch, setting, idle=devices - count, **said)


def _visible(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Report GPUs that are hidden from the processes or listed twice."""
    variable = launch.variable("CUDA_VISIBLE_DEVICES")
    shown = certain_text(variable)
    if variable is None or shown is None or "--use_cpu" in launch.arguments or from_outside(launch):
        return
    devices = [one.strip() for one in shown.split(",")]
    twice = next((one for one in devices if devices.count(one) > 1), None)
    if devices[0] in ("", "-1", "NoDevFiles", "none"):
        yield RULES["launch-no-gpu"].on(launch, variable, value=variable.value)
    elif wrong := next((one for one in devices if not _DEVICE.fullmatch(one)), None):
        yield RULES["launch-gpu-name"].on(launch, variable, value=variable.value, wrong=wrong)
    elif twice is not None:
        yield RULES["launch-gpu-twice"].on(launch, variable, value=variable.value, twice=twice)


def _same_node_rank(setup: Setup) -> Iterator[Finding]:
    """Report two commands with the same node rank in one job."""
    seen: dict[tuple[object, ...], Launch] = {}
    for launch in setup.launches:
        setting, nodes = own_rank(launch), nodes_of(launch)
        rank = certain_count(setting)
        if rank is None or nodes is None or nodes < 2:
            continue
        port, address = setting_of(launch, "master_port"), setting_of(launch, "master_addr")
        job = (
            *(launch.part.name, launch.starter, launch.program, launch.arguments, nodes, rank),
            *(port.value if port else "", address.value if address else ""),
        )
        first = seen.setdefault(job, launch)
        if first is not launch:
            line = setting.line if isinstance(setting, Option) else None
            first_line = first.part.file_line(first.first_line)
            yield RULES["launch-same-node-rank"].on(launch, line, rank=rank, first=first_line)


def _same_port(setup: Setup) -> Iterator[Finding]:
    """Report two simultaneous jobs on one machine that use the same port."""
    for first, second in pairwise(setup.launches):
        if first.part is not second.part or not first.background or is_remote(first) or is_remote(second):
            continue
        ports = [_own_port(first), _own_port(second)]
        if None in ports or ports[0] != ports[1]:
            continue
        between = first.part.text.split("\n")[first.last_line - 1 : second.first_line - 1]
        if any(re.search(r"\bwait\b", line) for line in between):
            continue
        option = second.options.get("master_port")
        first_line = first.part.file_line(first.first_line)
        yield RULES["launch-same-port"].on(second, option, first=first_line, port=ports[0])


def _own_port(launch: Launch) -> str | None:
    """Return the port that a launch opens on this machine; None if it picks a free one or the port is unknown."""
    nodes = setting_of(launch, "nnodes")
    if nodes is not None and certain_count(nodes) != 1:
        return None
    if is_static(launch) and "rdzv_endpoint" not in launch.options:
        option = launch.options.get("master_port")
        return "29500" if option is None else certain_text(option)
    return None


_RULES: tuple[Callable[[Setup, Launch], Iterator[Finding]], ...] = (
    _count_missing,
    _rank_variables,
    _missing_node_settings,
    _node_rank_too_high,
    _address,
    _port,
    _numbers,
    _rendezvous,
    _processes,
    _visible,
)
