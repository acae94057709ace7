"""Commands that srun, mpirun, pdsh and clush run on several nodes: what has to differ there, and what must not.

What stands in single quotes for a shell behind the wrapper is worked out on each node; everything else once, by the
shell that starts the wrapper.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from topoplan.lint.rules.launch_table import RULES
from topoplan.reading.finding import Finding
from topoplan.reading.launch_facts import (
    certain_count,
    from_outside,
    is_static,
    is_worked_out_there,
    machines_of,
    nodes_of,
    setting_of,
)
from topoplan.reading.mpi import mpi_of
from topoplan.reading.setup import Launch, Setup
from topoplan.reading.slurm import directives, srun_request_of, step_of
from topoplan.reading.wrappers import PARALLEL, SHELLS

_THERE = "expanded by a shell on the node"
_VARIABLE = {
    "srun": f"$SLURM_NODEID, {_THERE}",
    "mpirun": f"$OMPI_COMM_WORLD_RANK, {_THERE}",
    "pdsh": "%n, which pdsh replaces",
    "clush": f"a number in $(hostname), {_THERE}",
}
_OF_MPI = re.compile(r"\$\{?(?:OMPI_COMM_WORLD_\w*RANK|PMIX?_RANK|PMI_LOCAL_RANK|MPI_LOCALRANKID)\}?")
_OWN_HOST = re.compile(r"(?:\$\(\s*hostname\b[^)]*\)|`\s*hostname\b[^`]*`|\$\{?HOSTNAME\}?)")
_DRAWN = re.compile(r"\bRANDOM\b|\bshuf\b")
_NAME = re.compile(r"\$\{?(\w+)")
_LONE_NAME = re.compile(r"\"?\$\{?(\w+)\}?\"?")
_BINDS_NONE = re.compile(r"--(?:gpu|tres)-bind[= ]\S*none")


def findings(setup: Setup) -> Iterator[Finding]:
    """Report what is alike on all nodes and has to differ, or differs and has to be alike."""
    for launch in setup.launches:
        for rule in _RULES:
            yield from rule(setup, launch)


def _wrapper(launch: Launch) -> tuple[str, int] | None:
    """Return the wrapper that runs a command on several nodes, and how many there are."""
    if "srun" in launch.wrappers:
        nodes = step_of(launch).nodes
        return ("srun", nodes) if nodes and nodes > 1 else None
    if at_once := next((one for one in launch.wrappers if one in PARALLEL), ""):
        machines = machines_of(launch)
        return (at_once, machines) if machines and machines > 1 else None
    started = mpi_of(launch)
    if started is None or started.count is None:
        return None
    nodes = started.count // started.per_node if started.per_node else nodes_of(launch)
    return ("mpirun", nodes) if nodes and nodes > 1 and started.count > 1 else None


def _same_rank(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """A rank that is the same on all nodes."""
    everywhere, setting = _wrapper(launch), setting_of(launch, "node_rank")
    if everywhere is None or not _reads_node_rank(launch):
        return
    wrapper, nodes = everywhere
    rank = certain_count(setting)
    if rank is not None and (nodes_of(launch) or 2) > 1:
        said = {"wrapper": wrapper, "nodes": nodes, "rank": rank, "variable": _VARIABLE[wrapper]}
        yield RULES["launch-same-rank-everywhere"].on(launch, setting, **said)
    elif (
        launch.starter == "accelerate" and setting is None and (nodes_of(launch) or 1) > 1 and not from_outside(launch)
    ):
        said = {"wrapper": wrapper, "nodes": nodes, "variable": _VARIABLE[wrapper]}
        yield RULES["launch-same-rank-everywhere.default"].on(launch, **said)


def _reads_node_rank(launch: Launch) -> bool:
    """Whether a launch takes the number of its node from what it is given, and not from a rendezvous."""
    if launch.starts_torchrun:
        return launch.variable("NNODES") is not None and launch.variable("RDZV_ID") is None
    backend = launch.option("rdzv_backend")
    return is_static(launch) or (launch.starter == "accelerate" and (backend is None or backend.value == "static"))


def _rank_of_the_caller(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """A variable that mpirun sets, read before mpirun runs."""
    setting = setting_of(launch, "node_rank")
    if mpi_of(launch) is None or setting is None or launch.variable(setting.value.strip("${}")) is not None:
        return
    found = _OF_MPI.search(setting.value)
    if found is not None and not SHELLS.intersection(launch.wrappers):
        yield RULES["launch-mpirun-rank"].on(launch, setting, variable=found[0])


def _launchers(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """More than one launcher a node."""
    started, nodes = mpi_of(launch), nodes_of(launch)
    if started is None or started.count is None or nodes is None or launch.starter not in ("torchrun", "accelerate"):
        return
    if started.count > nodes:
        called = launch.called or launch.starter
        yield RULES["launch-mpirun-launchers"].on(launch, started=started.count, starter=called, nodes=nodes)


def _variables(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """Megatron-LM's script as the processes of mpirun."""
    started, configuration = mpi_of(launch), launch.configuration
    if started is None or (started.count or 1) < 2 or launch.starter or from_outside(launch):
        return
    if configuration is None or not _reads_rank(launch) or SHELLS.intersection(launch.wrappers):
        return
    if launch.variable("RANK") is None:
        yield RULES["launch-mpirun-variables"].on(launch, program=launch.program, count=started.count)


def _reads_rank(launch: Launch) -> bool:
    return launch.trains is not None and launch.trains.reads_rank


def _address(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """An address or a port that each node works out for itself."""
    everywhere = _wrapper(launch)
    if everywhere is None:
        return
    _, nodes = everywhere
    host = setting_of(launch, "master_addr") or launch.options.get("rdzv_endpoint")
    if host is not None and is_worked_out_there(launch, host, _OWN_HOST):
        yield RULES["launch-own-address"].on(launch, host, value=host.value.partition(":")[0], nodes=nodes)
    written = (launch.variable("MASTER_PORT"), *map(launch.options.get, ("master_port", "rdzv_endpoint")))
    port = next((one for one in written if one is not None and is_worked_out_there(launch, one, _DRAWN)), None)
    if port is not None:
        yield RULES["launch-own-address.port"].on(launch, port, value=port.value, nodes=nodes)


def _run_id(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """An id that each node draws for itself, or that is empty as nothing sets it."""
    option, everywhere = launch.options.get("rdzv_id"), _wrapper(launch)
    if option is None:
        return
    nodes = everywhere[1] if everywhere else nodes_of(launch) or 0
    is_drawn = is_worked_out_there(launch, option, _DRAWN) if everywhere else _DRAWN.search(option.value)
    if nodes > 1 and is_drawn:
        yield RULES["launch-run-id"].on(launch, option, value=option.value, nodes=nodes)
    own = _LONE_NAME.fullmatch(option.value)
    others = {name for other in launch.options.values() for name in _NAME.findall(other.value)} - {
        own[1] if own else ""
    }
    if own and everywhere and not _is_set(launch, own[1]) and others and all(_is_set(launch, one) for one in others):
        yield RULES["launch-run-id.empty"].on(launch, option, name=own[1])


def _is_set(launch: Launch, name: str) -> bool:
    return (
        name == "RANDOM"
        or name.startswith("SLURM_")
        or re.search(rf"\b{name}\b(?:=|:?[-=])", launch.part.text) is not None
    )


def _gpu_of_a_task(setup: Setup, launch: Launch) -> Iterator[Finding]:
    """One GPU bound to each task, and a device counted as if a task saw all of them."""
    step, rank = step_of(launch), launch.variable("LOCAL_RANK")
    if launch.starter or step.gpus_per_task != 1 or rank is None or "SLURM_LOCALID" not in rank.value:
        return
    asked = " ".join([directives(launch.part.text), *(launch.words_of("srun") or ())])
    is_several = step.tasks_per_node is not None and step.tasks_per_node > 1
    if is_several and _reads_rank(launch) and srun_request_of(launch).is_asked and not _BINDS_NONE.search(asked):
        yield RULES["launch-gpu-of-a-task"].on(launch, rank, gpus=1)


_RULES: tuple[Callable[[Setup, Launch], Iterator[Finding]], ...] = (
    _same_rank,
    _rank_of_the_caller,
    _launchers,
    _variables,
    _address,
    _run_id,
    _gpu_of_a_task,
)
