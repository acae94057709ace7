"""Jobs of Slurm: what runs on every node and what on the first alone, and how often.

Sources: sbatch(1), "runs a single copy of the script on the first node in the set of allocated nodes"; srun(1), OUTPUT
ENVIRONMENT VARIABLES: SLURM_NODEID and SLURM_PROCID differ from task to task, and both are 0 in the script itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from topoplan.lint.rules.launch_facts import (
    RULES,
    count_of,
    is_llamafactory_cli,
    is_remote,
    is_swift_cli,
    lines_of,
    setting_of,
)
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Launch, Option, Setup, Variable

_SHELLS = frozenset(["bash", "sh", "zsh", "dash", "ksh"])
_OF_A_TASK = re.compile(r"(?<!\\)\$\{?SLURM_(?:NODEID|PROCID)\b")
_NODES = re.compile(r"(?:--nodes[= ]|(?<!\S)-N ?=?)(\d+)(?![\d-])")
_TASKS_PER_NODE = re.compile(r"--ntasks-per-node[= ](\d+)")
_GPUS_PER_NODE = re.compile(r"(?:--gpus-per-node[= ]|--gres[= ]gpu:)(?:[A-Za-z][\w.-]*:)?(\d+)")
_TASKS = re.compile(r"(?:--ntasks[= ]|(?<!\S)-n ?=?)(\d+)")


def findings(setup: Setup) -> Iterator[Finding]:
    """What is wrong with how Slurm is to start the processes."""
    for launch in setup.launches:
        if _starts_processes(launch):
            for rule in _RULES:
                yield from rule(launch)


def _starts_processes(launch: Launch) -> bool:
    """Whether it starts the processes of a whole node; DeepSpeed's own launcher reaches the others by ssh."""
    return launch.starter in ("torchrun", "accelerate") or is_llamafactory_cli(launch) or is_swift_cli(launch)


def _first_node_alone(launch: Launch) -> Iterator[Finding]:
    """A job of several nodes whose script starts its own part without srun."""
    nodes = _number(_NODES, _job_options(launch))
    setting = _setting(launch, "nnodes", "num_machines")
    if nodes is None or nodes < 2 or setting is None or is_remote(launch):
        return
    count = count_of(setting)
    if count == 1 or (count is None and "SLURM_" not in setting.value):
        return
    yield RULES["launch-slurm-first-node"].on(launch, nodes=nodes)


def _rank_of_the_script(launch: Launch) -> Iterator[Finding]:
    """The number of a node, put in place by the script on the first one."""
    if "srun" not in launch.wrappers:
        return
    setting = _setting(launch, "node_rank", "machine_rank")
    variable = _OF_A_TASK.search(setting.value) if setting else None
    if setting is None or variable is None:
        return
    after = launch.wrappers[launch.wrappers.index("srun") + 1 :]
    if _SHELLS.intersection(after) and launch.first_line <= setting.line <= launch.last_line:
        text = "\n".join(line for _, line in lines_of(launch))
        if not re.search(r"\s-\w*c\s+\"", text) or not _OF_A_TASK.search(text):
            return  # in single quotes, or behind a backslash: for the shell on the node
    yield RULES["launch-slurm-node-rank"].on(launch, setting, variable=variable[0])


def _several_tasks(launch: Launch) -> Iterator[Finding]:
    """More than one task a node, each of which starts all processes of the node."""
    if "srun" not in launch.wrappers:
        return
    own, job = _own_options(launch), _job_options(launch)
    tasks = _number(_TASKS_PER_NODE, own)
    if tasks is None and (count := _number(_TASKS, own)) is not None:
        tasks = count // max(1, _number(_NODES, own) or _number(_NODES, job) or 1)
    elif tasks is None:
        tasks = _number(_TASKS_PER_NODE, job)
    if tasks is None or tasks < 2:
        return
    yield RULES["launch-slurm-tasks"].on(launch, tasks=tasks, starter=launch.called or launch.program)


def _other_nodes(launch: Launch) -> Iterator[Finding]:
    """Nodes of the job beside those that the command counts on."""
    nodes, setting = _number(_NODES, _job_options(launch)), _setting(launch, "nnodes", "num_machines")
    wanted = count_of(setting)
    if nodes is None or setting is None or wanted is None or (nodes > 1 and "srun" not in launch.wrappers):
        return  # not known, or another rule tells
    is_part = _number(_NODES, _own_options(launch)) is not None  # one srun of several
    if wanted > nodes or (wanted < nodes and not is_part):
        yield RULES["launch-slurm-nodes"].on(launch, setting, wanted=wanted, nodes=nodes)


def _other_gpus(launch: Launch) -> Iterator[Finding]:
    """GPUs of the job on a node beside the processes there."""
    gpus = _number(_GPUS_PER_NODE, _own_options(launch)) or _number(_GPUS_PER_NODE, _job_options(launch))
    setting = setting_of(launch, "nproc_per_node")
    wanted = count_of(setting)
    if gpus is None or setting is None or wanted is None or wanted == gpus:
        return
    rule = RULES["launch-slurm-gpus" if wanted > gpus else "launch-slurm-gpus.idle"]
    yield rule.on(launch, setting, wanted=wanted, gpus=gpus, idle=gpus - wanted)


def _setting(launch: Launch, option: str, of_accelerate: str) -> Option | Variable | None:
    return setting_of(launch, of_accelerate if launch.starter == "accelerate" else option)


def _own_options(launch: Launch) -> str:
    """What its srun says."""
    return " ".join(line for _, line in lines_of(launch)).partition("srun")[2]


def _job_options(launch: Launch) -> str:
    """What the #SBATCH lines say."""
    return " ".join(re.findall(r"^#SBATCH[ \t]+([^#\n]*)", launch.part.text, re.MULTILINE))


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.findall(text)
    return int(found[-1][:6]) if found else None


_RULES: tuple[Callable[[Launch], Iterator[Finding]], ...] = (
    _first_node_alone,
    _rank_of_the_script,
    _several_tasks,
    _other_nodes,
    _other_gpus,
)
