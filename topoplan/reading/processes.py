"""The number of nodes and GPUs that a launch command uses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from topoplan.reading.arithmetic import worked_out
from topoplan.reading.recognizer import of_program
from topoplan.reading.slurm import NODES_OF_A_JOB, job_of, step_of

if TYPE_CHECKING:
    from topoplan.reading.setup import Configuration, Launch, Setup

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The nodes of a launch and its processes per node, one per GPU."""

    launch: Launch
    nodes: int | None
    """None if the command leaves it open."""
    gpus_per_node: int | None
    """None if the command uses all GPUs that it sees."""

    @property
    def line(self) -> int:
        """The line of the option that sets the number, or else of the command."""
        for name in ("nproc_per_node", "num_gpus", "num_processes", "nnodes"):
            if option := self.launch.options.get(name):
                return option.line
        return self.launch.first_line

    @property
    def words(self) -> str:
        """The size in the form that cluster specs are named: `4 x 8 GPUs`."""
        gpus = "all" if self.gpus_per_node is None else self.gpus_per_node
        return f"{'some nodes' if self.nodes is None else self.nodes} x {gpus} GPUs"


def processes_for(setup: Setup, configuration: Configuration) -> Processes | None:
    """Return what the launch of a configuration starts, or None if no command for it was found."""
    launch = launch_of(setup, configuration)
    return None if launch is None else processes_of(launch)


def launch_of(setup: Setup, configuration: Configuration) -> Launch | None:
    """Return the command that starts a configuration: with its keys as arguments, its file, or at least its trainer."""
    file = PurePath(configuration.part.file or configuration.part.name).name
    recognizer = setup.recognizer(configuration.trainer)
    family = recognizer.program_substring if recognizer else ""
    of_trainer = [one for one in setup.launches if family in one.program]
    by_nearness = (
        [one for one in setup.launches if one.configuration is configuration],
        [one for one in setup.launches if one.file_configuration is configuration],
        [one for one in setup.launches if file in {PurePath(argument).name for argument in one.arguments}],
        [one for one in of_trainer if one.part.name == configuration.part.name],
        of_trainer,
    )
    # The keys among a command's arguments belong to that command only.
    found = by_nearness[0] if configuration.from_command else next(filter(None, by_nearness), [])
    return found[0] if found else None


def processes_of(launch: Launch) -> Processes:
    """Return the nodes and processes of one command.

    Defaults: torchrun uses one machine and one process; LLaMA-Factory's `launcher.py` reads NNODES and NPROC_PER_NODE
    and otherwise uses every GPU that it sees; ms-swift's `cli/main.py` starts one process without NPROC_PER_NODE (if a
    platform sets NNODES in the environment, it also sets NPROC_PER_NODE); `deepspeed` uses every GPU of its hosts. If
    srun starts the script itself, each task is one process.
    """
    options = {name: option.value for name, option in launch.options.items()}
    visible = visible_gpus(launch)
    nodes: int | None
    gpus: int | None
    if launch.starter == "torchrun":
        nodes = _number(launch, options.get("nnodes", "1").rpartition(":")[2])
        per_node = options.get("nproc_per_node", "1")
        gpus = visible if per_node in ("auto", "gpu") else _number(launch, per_node)
    elif launch.starter == "deepspeed":
        nodes = _number(launch, options.get("num_nodes", "")) or (None if "hostfile" in options else 1)
        gpus = _number(launch, options.get("num_gpus", "")) or _included(options.get("include", "")) or visible
    elif launch.starter == "accelerate":
        # The file has what the command lacks (commands/launch.py, _validate_launch_command), and num_processes counts
        # those of all machines (utils/launch.py, prepare_multi_gpu_env).
        machines, processes = (launch.option(name) for name in ("num_machines", "num_processes"))
        is_open = launch.starter_file is None and "config_file" in options
        nodes = _number(launch, machines.value) if machines else None if is_open else 1
        total = _number(launch, processes.value) if processes else None
        gpus = total // nodes or None if total and nodes else None
    elif "srun" in launch.wrappers and launch.program.endswith(".py"):
        step = step_of(launch)
        nodes, gpus = step.nodes, step.tasks_per_node
    else:
        nodes = _of_variable(launch, "NNODES", 1)
        trainer = of_program((launch.trains,), launch.program) if launch.trains else None
        takes_all = nodes is None or (trainer is not None and trainer.takes_all_gpus)
        gpus = _of_variable(launch, "NPROC_PER_NODE", visible if takes_all else 1)
    return Processes(launch=launch, nodes=nodes, gpus_per_node=gpus)


def _of_variable(launch: Launch, name: str, default: int | None) -> int | None:
    found = launch.variable(name)
    return default if found is None else _number(launch, found.value)


def visible_gpus(launch: Launch) -> int | None:
    """Return the number of GPUs that CUDA_VISIBLE_DEVICES lists; None if it is unset or empty."""
    found = launch.variable("CUDA_VISIBLE_DEVICES")
    return None if found is None else len([one for one in found.value.split(",") if one.strip()]) or None


def _included(text: str) -> int | None:
    """Return the number of GPUs in deepspeed's `--include localhost:0,1,2`."""
    _, colon, places = text.partition(":")
    return len(places.split(",")) if colon and "@" not in places else None


def _number(launch: Launch, text: str, depth: int = 4) -> int | None:
    """Return a whole number above zero, resolving variables that the script or Slurm sets; None for anything else."""
    text = text.strip().strip("\"'")
    if NODES_OF_A_JOB.fullmatch(text):
        return job_of(launch).nodes
    if not depth:
        return None
    if (result := worked_out(text, lambda name: str(_number(launch, f"${name}", depth - 1) or ""))) is not None:
        return _number(launch, result, depth - 1)
    if match := _VARIABLE.fullmatch(text):
        found = launch.variable(match[1] or match[3])
        return _number(launch, found.value if found else match[2] or "", depth - 1)
    return int(text) if text.isdecimal() and 0 < int(text) < 10**6 else None
