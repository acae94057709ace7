"""Nodes and processes that do not find each other: ranks, addresses, ports, numbers of processes.

Facts from torch 2.13 (distributed/run.py) and LLaMA-Factory 0.9.5 (launcher.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from topoplan.lint.rules.environment import line_text
from topoplan.lint.rules.launch_facts import (
    count_of,
    finding_about,
    from_outside,
    is_llamafactory_cli,
    is_remote,
    is_static,
    is_swift_cli,
    known,
    nodes_of,
    setting_of,
)
from topoplan.reading.finding import Edit, Finding
from topoplan.reading.setup import Launch, Option, Setup, Variable

_LOCAL_ADDRESS = re.compile(r"localhost|127(?:\.\d{1,3}){3}|::1|0\.0\.0\.0")
_PLACEHOLDER_ADDRESS = re.compile(
    r"<.*>|\{.*\}|\[[A-Za-z_ ]+\]|.*[^\x00-\x7f].*|[xX]+(?:\.[xX]+){1,3}|(?:\d+\.)+[xX]+(?:\.[xX]+)*|x+"
    r"|(?i:(?:your|master|main|head|node0|first)?[-_ ]?(?:node)?[-_ ]?(?:ip|ip[-_ ]?addr(?:ess)?)(?:[-_ ]?here)?)"
    r"|(?i:your[-_ ].*)|MASTER_ADDR|\.\.\."
)


def findings(setup: Setup) -> Iterator[Finding]:
    """What is wrong with how nodes and processes are to find each other."""
    for launch in setup.launches:
        for rule in _RULES:
            yield from rule(setup, launch)
    yield from _same_node_rank(setup)
    yield from _same_port(setup)


def _rank_variables(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """RANK where the command reads NODE_RANK."""
    if not (is_llamafactory_cli(launch) or is_swift_cli(launch)):
        return
    rank, nodes = launch.variable("RANK"), nodes_of(launch)
    if rank is not None and launch.variable("NODE_RANK") is None and nodes is not None and nodes > 1:
        yield finding_about(
            launch,
            "launch-rank-variable",
            "error",
            f"RANK={rank.value} is not read: every node starts as node 0",
            why=f"{launch.program} reads NODE_RANK, 0 when it is not set; RANK is what torchrun gives each process",
            remedy=f"write NODE_RANK={rank.value}",
            line=rank.line if rank.part is launch.part else None,
            edits=_renamed(rank, "NODE_RANK") if rank.part is launch.part else (),
        )
    world = launch.variable("WORLD_SIZE")
    if world is not None and launch.variable("NNODES") is None and rank is not None and not from_outside(launch):
        yield finding_about(
            launch,
            "launch-rank-variable",
            "error",
            f"WORLD_SIZE={world.value} and RANK={rank.value} are not read: each node trains for itself",
            why=f"{launch.program} reads NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT",
            remedy="set NNODES to the number of nodes and NODE_RANK to the number of this one, from 0",
            line=world.line if world.part is launch.part else None,
        )


def _renamed(variable: Variable, name: str) -> tuple[Edit, ...]:
    line = line_text(variable)
    pattern = rf"(?<![\w$]){re.escape(variable.name)}="
    if len(re.findall(pattern, line)) != 1:
        return ()
    text = re.sub(pattern, f"{name}=", line)
    return (Edit(first_line=variable.line, last_line=variable.line, text=text),)


def _missing_node_settings(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """More than one node, and something that they need to find each other is not said."""
    nodes = nodes_of(launch)
    if nodes is None or nodes < 2 or from_outside(launch):
        return
    if is_static(launch):
        yield from _missing_torchrun_options(launch, nodes)
    elif is_llamafactory_cli(launch) or is_swift_cli(launch):
        yield from _missing_variables(launch, nodes)


def _missing_torchrun_options(launch: Launch, nodes: int) -> Iterator[Finding]:
    if "node_rank" not in launch.options:
        yield finding_about(
            launch,
            "launch-missing-node-rank",
            "error",
            f"--node_rank is not given, and is 0 then on each of the {nodes} nodes",
            why="all of them wait for the others as node 0",
            remedy="give --node_rank 0, 1, ... one to each node",
        )
    if "master_addr" not in launch.options:
        yield finding_about(
            launch,
            "launch-missing-master-address",
            "error",
            f"--master_addr is not given for {nodes} nodes, and is 127.0.0.1 then",
            why="torchrun does not read MASTER_ADDR; each node waits for the others at itself",
            remedy="give --master_addr with the address of node 0",
        )


def _missing_variables(launch: Launch, nodes: int) -> Iterator[Finding]:
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if launch.variable(name) is None]
    if "NODE_RANK" in missing and launch.variable("RANK") is not None:
        missing.remove("NODE_RANK")  # said by launch-rank-variable
    defaults = {"NODE_RANK": "0: every node starts as node 0", "MASTER_ADDR": "127.0.0.1: each node waits at itself"}
    for name in missing:
        rule = "launch-missing-node-rank" if name == "NODE_RANK" else "launch-missing-master-address"
        yield finding_about(
            launch,
            rule,
            "warning",
            f"{name} is not set here for {nodes} nodes; unless the environment has it, it is {defaults[name]}",
            remedy=f"set {name} in front of the command",
        )
    if launch.program == "llamafactory-cli" and launch.variable("MASTER_PORT") is None:
        where = launch.variable("NNODES")
        edits: tuple[Edit, ...] = ()
        if where is not None and where.part is launch.part:
            edits = _inserted(where, "MASTER_PORT=29500 ")
        yield finding_about(
            launch,
            "launch-missing-master-port",
            "warning" if missing else "error",
            f"MASTER_PORT is not set for {nodes} nodes: each of them takes a random port, and they never meet",
            why="launcher.py looks for a free port on its own node when MASTER_PORT is not in the environment",
            remedy="set the same MASTER_PORT on every node, such as MASTER_PORT=29500",
            line=where.line if edits and where is not None else None,
            edits=edits,
        )


def _inserted(variable: Variable, text: str) -> tuple[Edit, ...]:
    """The edit that sets another variable in front of this one."""
    line = line_text(variable)
    pattern = rf"(?<![\w$]){re.escape(variable.name)}="
    if len(re.findall(pattern, line)) != 1:
        return ()
    changed = re.sub(pattern, lambda match: text + match.group(), line)
    return (Edit(first_line=variable.line, last_line=variable.line, text=changed),)


def _address(setup: Setup, launch: Launch) -> Iterator[Finding]:
    nodes, setting = nodes_of(launch), setting_of(launch, "master_addr")
    address = known(setting)
    if setting is None or address is None or nodes is None or nodes < 2:
        return
    line = setting.line if isinstance(setting, Option) or setting.part is launch.part else None
    if _LOCAL_ADDRESS.fullmatch(address):
        if count_of(setting_of(launch, "node_rank")) == 0:
            return  # node 0 reaches itself
        yield finding_about(
            launch,
            "launch-local-master-address",
            "error",
            f"the master address of {nodes} nodes is {address}, which is each node itself",
            remedy="give the address of node 0, as the other nodes reach it",
            line=line,
        )
    elif not address or _PLACEHOLDER_ADDRESS.fullmatch(address):
        yield finding_about(
            launch,
            "launch-placeholder-address",
            "warning",
            f"the master address {f'{address!r} ' if address else ''}is still to be filled in",
            remedy="give the address of node 0, as the other nodes reach it, the same on every node",
            line=line,
        )


def _node_rank_too_high(setup: Setup, launch: Launch) -> Iterator[Finding]:
    nodes, setting = nodes_of(launch), setting_of(launch, "node_rank")
    rank = count_of(setting)
    if setting is None or rank is None or nodes is None or rank < nodes:
        return
    yield finding_about(
        launch,
        "launch-node-rank-too-high",
        "error",
        f"node rank {rank} of {nodes} {'node' if nodes == 1 else 'nodes'}: ranks go from 0 to {nodes - 1}",
        remedy="count the nodes from 0",
        line=setting.line if isinstance(setting, Option) or setting.part is launch.part else None,
    )


def _rendezvous(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """c10d orders the nodes by itself."""
    backend = launch.options.get("rdzv_backend")
    rank = launch.options.get("node_rank")
    if launch.starter == "torchrun" and backend is not None and backend.value == "c10d" and rank is not None:
        yield finding_about(
            launch,
            "launch-node-rank-ignored",
            "warning",
            "--node_rank is ignored with --rdzv_backend c10d",
            why="c10d numbers the nodes by itself, so rank 0 may be on any of them",
            remedy="leave --rdzv_backend out for a fixed list of nodes: the static rendezvous keeps the ranks",
            line=rank.line,
        )
    identity = launch.variable("RDZV_ID")
    if is_llamafactory_cli(launch) and identity is not None and launch.variable("NODE_RANK") is not None:
        yield finding_about(
            launch,
            "launch-node-rank-ignored",
            "warning",
            "NODE_RANK is ignored when RDZV_ID is set",
            why="launcher.py then starts torchrun with --rdzv-backend c10d, which numbers the nodes by itself",
            remedy="unset RDZV_ID for a fixed list of nodes",
            line=identity.line if identity.part is launch.part else None,
        )


def _processes(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """As many processes as GPUs that they see."""
    if launch.starter not in ("torchrun", ""):
        return
    setting = setting_of(launch, "nproc_per_node")
    visible = known(launch.variable("CUDA_VISIBLE_DEVICES"))
    count = count_of(setting)
    if setting is None or count is None or visible is None or not re.fullmatch(r"\d+(?:,\d+)*", visible):
        return
    devices = len(visible.split(","))
    name = "--nproc_per_node" if launch.starter else "NPROC_PER_NODE"
    line = setting.line if isinstance(setting, Option) or setting.part is launch.part else None
    if count > devices:
        yield finding_about(
            launch,
            "launch-process-count",
            "error",
            f"{name} is {count}, and CUDA_VISIBLE_DEVICES shows {devices} GPU{'s' if devices > 1 else ''}",
            why="a process without a GPU stops with `invalid device ordinal`",
            remedy=f"write {name} {devices}, or show {count} GPUs",
            line=line,
        )
    elif count < devices and launch.program not in ("swift", "megatron"):  # device_map gives each process several
        yield finding_about(
            launch,
            "launch-process-count",
            "warning",
            f"{name} is {count}, and CUDA_VISIBLE_DEVICES shows {devices} GPUs: {devices - count} stay idle",
            remedy=f"write {name} {devices}, or show {count} only",
            line=line,
        )


def _same_node_rank(setup: Setup) -> Iterator[Finding]:
    """Two commands for the same node of one job."""
    seen: dict[tuple[object, ...], Launch] = {}
    for launch in setup.launches:
        rank, nodes = count_of(setting_of(launch, "node_rank")), nodes_of(launch)
        if rank is None or nodes is None or nodes < 2:
            continue
        setting = setting_of(launch, "node_rank")
        port, address = setting_of(launch, "master_port"), setting_of(launch, "master_addr")
        job = (
            *(launch.part.name, launch.starter, launch.program, launch.arguments, nodes, rank),
            *(port.value if port else "", address.value if address else ""),
        )
        first = seen.setdefault(job, launch)
        if first is not launch:
            yield finding_about(
                launch,
                "launch-same-node-rank",
                "warning",
                f"a second command for node {rank} of the same job; the first is on line "
                f"{first.part.file_line(first.first_line)}",
                why="two nodes with one rank wait for each other, or for the missing one, for ever",
                remedy="give each node a rank of its own, from 0",
                line=setting.line if isinstance(setting, Option) else None,
            )


def _same_port(setup: Setup) -> Iterator[Finding]:
    """Two jobs at the same time on one machine."""
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
        yield finding_about(
            second,
            "launch-same-port",
            "error",
            f"it starts beside the command on line {first.part.file_line(first.first_line)}, with its port {ports[0]}",
            why="the first one still holds the port: address already in use",
            remedy="give each of them a --master_port of its own, or --standalone, which takes a free one",
            line=option.line if option else None,
        )


def _own_port(launch: Launch) -> str | None:
    """The port that a launch opens on this machine; None where it finds a free one, or is not known."""
    nodes = setting_of(launch, "nnodes")
    if nodes is not None and count_of(nodes) != 1:
        return None
    if launch.starter == "torchrun" and is_static(launch):
        option = launch.options.get("master_port")
        return "29500" if option is None else known(option)
    return None


_RULES: tuple[Callable[[Setup, Launch], Iterator[Finding]], ...] = (
    _rank_variables,
    _missing_node_settings,
    _node_rank_too_high,
    _address,
    _rendezvous,
    _processes,
)
