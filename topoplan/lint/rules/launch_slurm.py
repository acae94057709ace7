"""Slurm jobs: what runs on every node, what runs only on the first, and how many times.

Sources: sbatch(1), "runs a single copy of the script on the first node in the set of allocated nodes"; srun(1), OUTPUT
ENVIRONMENT VARIABLES: SLURM_NODEID and SLURM_PROCID differ between tasks, and both are 0 in the script itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any

from topoplan.lint.rules.launch_table import RULES
from topoplan.reading.finding import Finding, Severity
from topoplan.reading.launch_facts import certain_count, is_remote, lines_of, nodes_of, setting_of
from topoplan.reading.processes import processes_of
from topoplan.reading.session import Script
from topoplan.reading.setup import Launch, Option, Setup, Variable
from topoplan.reading.slurm import directives, job_of, seconds_of, srun_request_of, step_of
from topoplan.reading.words import is_open
from topoplan.reading.wrappers import SHELLS
from topoplan.specs.passed_on import unknown_option

_IN_SINGLE_QUOTES = re.compile(r"'[^']*(?:'|$)")
_OF_A_TASK = re.compile(r"(?<!\\)\$\{?SLURM_(?:NODEID|PROCID|LOCALID)\b")
_RANK = re.compile(rf"(?i:rank|rdzv[_-]id)[= ]\"?({_OF_A_TASK.pattern})")
_COUNT = re.compile(r"\d+[kKmM]?")
_TIME = re.compile(r"#SBATCH\s.*?(?:--time[= ]|-t\s*)(\d[\d:-]*)(?=\s|$)")
_LEAST_TIME_S = 300
"""Below this, no training is worth its queue."""
_LIKE_HOURS = 72
"""Numbers of minutes that are more likely meant as hours."""
_LOCAL_ID = re.compile(r"\$\{?SLURM_LOCALID\}?")
_BINDS_NONE = re.compile(r"--(?:gpu|tres)-bind[= ]\S*none")
_GPUS = re.compile(r"(?:(?!gpus?:)[A-Za-z][\w.-]*:)?\d+")
_TAKES = {
    "time": re.compile(r"\d+(?::\d+){0,2}|\d+-\d+(?::\d+){0,2}|(?i:infinite|unlimited)|-1"),
    "nodes": re.compile(r"\d[\d\-,:kKmM]*"),
    "gres": re.compile(r"(?!gpus\b)[A-Za-z](?:.*[\w)])?"),
    "exclusive": re.compile(r"user|mcs|topo"),
    "mem": re.compile(r"\d+(?i:[KMGT]B?)?"),
    **dict.fromkeys(("ntasks", "ntasks-per-node", "cpus-per-task", "cpus-per-gpu"), _COUNT),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task"), _GPUS),
}
"""Option -> pattern of the values that sbatch accepts."""
_TAKE_A_VALUE = {
    *_TAKES,
    "mem-per-gpu",
    "mem-per-cpu",
    "job-name",
    "output",
    "error",
    "partition",
    "account",
    "qos",
} - {"exclusive"}
_MISSPELT = 0.85
"""Minimum similarity of a misspelt option; it is high because plugins of a cluster add options of their own."""
_LAST = re.compile(r"\bhostnames?\b[^|]*\|\s*tail\s+-(?:n\s*)?1\b")
_NODE_LIST = re.compile(r"\$\{?SLURM_(?:JOB_|STEP_)?NODELIST\}?")
_NEARLY_READ = re.compile(r"#[ \t]+SBATCH[ \t]+-[^\n#]*|#(?i:sbatch)(?<!#SBATCH)[ \t]+-[^\n#]*")


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults in how Slurm starts the processes."""
    starts = {launch.part for launch in setup.launches}
    for script in setup.scripts:
        yield from _directives(script)
        if script.part in starts:
            yield from _short_time(script)
    for launch in setup.launches:
        yield from _no_gpus(launch)
        yield from _node_list(launch)
        yield from _last_node(launch)
        yield from _rank_of_the_script(launch)
        yield from _local_id_as_device(launch)
        if _starts_processes(launch):
            for rule in _RULES:
                yield from rule(launch)


def _directives(script: Script) -> Iterator[Finding]:
    """Report directives that sbatch does not read, and faults of those that it does."""
    lines = list(enumerate(script.part.text.split("\n"), start=1))
    read = [number for number, line in lines if line.startswith("#SBATCH")]
    first = next((number for number, line in lines if line.strip() and not line.startswith("#")), len(lines) + 1)
    late = next((number for number in read if number > first), None)
    if late is not None and "<<" not in script.part.text:  # otherwise the line may belong to an embedded script
        yield RULES["launch-slurm-directive.late"].found(script.part, late, first=script.part.file_line(first))
    for number, line in lines:
        if line.startswith("#SBATCH") and number < first:
            yield from _of_sbatch(script, number, line.partition(" #")[0])
    for number, line in lines if read else ():
        if number < first and (match := _NEARLY_READ.match(line)):
            yield RULES["launch-slurm-directive"].found(script.part, number, written=match[0].strip())


def _short_time(script: Script) -> Iterator[Finding]:
    """Report a limit of a few minutes, which may have been meant as hours."""
    for number, line in enumerate(script.part.text.split("\n"), start=1):
        match = _TIME.match(line)
        seconds = seconds_of(match[1]) if match else None
        if match is None or seconds is None:
            continue
        said: dict[str, Any] = {"value": match[1], "minutes": seconds // 60, "seconds": seconds}
        if 0 < seconds < _LEAST_TIME_S:
            yield RULES["launch-slurm-time"].found(script.part, number, **said)
        elif match[1].isdecimal() and 0 < seconds <= _LIKE_HOURS * 60:
            yield RULES["launch-slurm-time.minutes"].found(script.part, number, **said)


def _of_sbatch(script: Script, number: int, line: str) -> Iterator[Finding]:
    """Report options that sbatch does not have, and values that it does not accept."""
    if (match := re.search(r"(?<=\s)-([a-z][a-z-]{2,})(?=[= ]|$)", line)) and not unknown_option(match[1]):
        wrong = f"-{match[1]} has one dash: sbatch reads -{match[1][0]} with the value {match[1][1:]}..."
        yield RULES["launch-slurm-option"].found(script.part, number, wrong=wrong)
    for match in re.finditer(r"(?<=\s)--([a-z][\w-]*)(?:[= ]([^\s#-]\S*))?", line):
        option, value = match[1], match[2] or ""
        wrong = unknown_option(option)
        meant = re.findall(r"[\w-]+", wrong.partition("did you mean")[2])
        takes = _TAKES.get(option)
        if get_close_matches(option, meant, cutoff=_MISSPELT):
            yield RULES["launch-slurm-option"].found(script.part, number, wrong=wrong)
        elif not value and option in _TAKE_A_VALUE and match.end() == len(line.rstrip()):
            wrong = f"--{option} has no value"
            yield RULES["launch-slurm-option"].found(script.part, number, wrong=wrong)
        elif takes is not None and value and not is_open(value) and not takes.fullmatch(value):
            yield RULES["launch-slurm-option.value"].found(script.part, number, option=option, value=value)


def _node_list(launch: Launch) -> Iterator[Finding]:
    """Report the list of all nodes used as the address of one."""
    written = (setting_of(launch, "master_addr"), launch.variable("MASTER_ADDR"))
    for setting in written:
        if setting is not None and _NODE_LIST.fullmatch(setting.value):
            yield RULES["launch-slurm-node-list"].on(launch, setting, value=setting.value)
            return


def _last_node(launch: Launch) -> Iterator[Finding]:
    """Report the address of the last node for ranks that begin at the first."""
    address, rank = setting_of(launch, "master_addr"), setting_of(launch, "node_rank")
    if address is not None and rank is not None and _LAST.search(address.value) and _OF_A_TASK.search(rank.value):
        yield RULES["launch-slurm-last-node"].on(launch, launch.variable("MASTER_ADDR") or address)


def _starts_processes(launch: Launch) -> bool:
    """Whether a launch starts all processes of a node; DeepSpeed's launcher reaches other nodes over SSH instead."""
    return launch.starter in ("torchrun", "accelerate") or launch.starts_torchrun


def _first_node_alone(launch: Launch) -> Iterator[Finding]:
    """Report a job of several nodes whose script starts the launcher without srun, and so on the first node only."""
    nodes, setting = job_of(launch).nodes, setting_of(launch, "nnodes")
    if nodes is None or nodes < 2 or setting is None or is_remote(launch):
        return
    count = certain_count(setting)
    if count == 1 or (count is None and "SLURM_" not in setting.value):
        return
    yield RULES["launch-slurm-first-node"].on(launch, nodes=nodes)


def _rank_of_the_script(launch: Launch) -> Iterator[Finding]:
    """Report a node rank that the script on the first node expands, instead of each task."""
    backend = launch.option("rdzv_backend")
    if "srun" not in launch.wrappers or (backend is not None and backend.value != "static"):
        return  # c10d assigns the node ranks itself
    setting = setting_of(launch, "node_rank")
    if setting is not None and "SLURM_LOCALID" in setting.value:
        yield RULES["launch-slurm-node-rank.local"].on(launch, setting)
        return
    if setting is None:
        for number, line in lines_of(launch):
            if found := _RANK.search(_IN_SINGLE_QUOTES.sub("", line)):
                yield RULES["launch-slurm-node-rank"].on(launch, number, variable=found[1])
        return
    variable = _OF_A_TASK.search(setting.value)
    if variable is None:
        return
    after = launch.wrappers[launch.wrappers.index("srun") + 1 :]
    if SHELLS.intersection(after) and launch.first_line <= setting.line <= launch.last_line:
        text = "\n".join(line for _, line in lines_of(launch))
        if not re.search(r"\s-\w*c\s+\"", text) or not _OF_A_TASK.search(text):
            return  # single-quoted or escaped: the shell on the node expands it
    elif SHELLS.intersection(after) and _is_escaped(launch, setting):
        return
    yield RULES["launch-slurm-node-rank"].on(launch, setting, variable=variable[0])


def _is_escaped(launch: Launch, setting: Option | Variable) -> bool:
    """Whether a value set in an earlier variable is written for a later shell: `LAUNCHER="... \\$SLURM_PROCID"`."""
    lines = launch.part.text.split("\n")[setting.line - 1 : setting.line]
    return any(re.search(r"\\\$\{?SLURM_", line) for line in lines)


def _local_id_as_device(launch: Launch) -> Iterator[Finding]:
    """Report SLURM_LOCALID as the only GPU of several processes.

    srun sets CUDA_VISIBLE_DEVICES again for its tasks where the cluster manages GPUs as generic resources.
    """
    visible, count = launch.variable("CUDA_VISIBLE_DEVICES"), processes_of(launch).gpus_per_node
    if visible is None or not _LOCAL_ID.fullmatch(visible.value) or visible.part is not launch.part:
        return
    is_of_script = visible.line < launch.first_line
    if count is not None and count > 1 and (is_of_script or _starts_processes(launch)):
        level: Severity = "warning" if is_of_script and "srun" in launch.wrappers else "error"
        yield RULES["launch-slurm-local-gpu"].on(launch, visible, value=visible.value, count=count, level=level)


def _several_tasks(launch: Launch) -> Iterator[Finding]:
    """Report more than one task per node when each task starts all processes of the node."""
    if "srun" not in launch.wrappers:
        return
    step, own = step_of(launch), srun_request_of(launch).tasks
    count = own if own is not None or nodes_of(launch) == 1 else step.tasks
    if count is not None and step.nodes is not None and count < step.nodes:
        yield RULES["launch-slurm-tasks.few"].on(launch, count=count, nodes=step.nodes)
    if step.tasks_per_node is not None and step.tasks_per_node > 1:
        starter = launch.called or launch.program
        yield RULES["launch-slurm-tasks"].on(launch, tasks=step.tasks_per_node, starter=starter)


def _other_nodes(launch: Launch) -> Iterator[Finding]:
    """Report a job whose number of nodes differs from that of the command."""
    nodes, setting = job_of(launch).nodes, setting_of(launch, "nnodes")
    wanted, tasks = certain_count(setting), job_of(launch).tasks_per_node
    if nodes and tasks and setting is not None and "SLURM_NTASKS_PER_NODE" in setting.value and tasks != nodes:
        yield RULES["launch-slurm-nodes.tasks"].on(launch, setting, value=setting.value, tasks=tasks, nodes=nodes)
    if nodes is None or setting is None or wanted is None or (nodes > 1 and "srun" not in launch.wrappers):
        return  # not known, or reported by another rule
    is_part = srun_request_of(launch).nodes is not None  # one of several srun steps
    if wanted > nodes or (wanted < nodes and not is_part):
        yield RULES["launch-slurm-nodes"].on(launch, setting, wanted=wanted, nodes=nodes)


def _no_gpus(launch: Launch) -> Iterator[Finding]:
    """Report a job that requests no GPUs; a job with exclusive nodes has all GPUs on them."""
    job = directives(launch.part.text)
    asked = " ".join([job, *(launch.words_of("srun") or ())])
    if job and not re.search(r"gpu|--gres|--tres|(?<!\S)-G|--exclusive(?!=)|--constraint|(?<!\S)-C", asked):
        yield RULES["launch-slurm-no-gpus"].on(launch)


def _other_gpus(launch: Launch) -> Iterator[Finding]:
    """Report a job whose number of GPUs per node differs from the number of processes."""
    step = step_of(launch)
    setting, gpus = setting_of(launch, "nproc_per_node"), step.gpus_per_node
    wanted, bound = certain_count(setting), step.gpus_per_task
    asked = " ".join([directives(launch.part.text), *(launch.words_of("srun") or ())])
    if bound and wanted and wanted > bound and step.tasks_per_node == 1 and not _BINDS_NONE.search(asked):
        yield RULES["launch-slurm-gpus.task"].on(launch, setting, wanted=wanted, gpus=bound)
        return
    if gpus is None or setting is None or wanted is None or wanted == gpus:
        return
    rule = RULES["launch-slurm-gpus" if wanted > gpus else "launch-slurm-gpus.idle"]
    yield rule.on(launch, setting, wanted=wanted, gpus=gpus, idle=gpus - wanted)


_RULES: tuple[Callable[[Launch], Iterator[Finding]], ...] = (
    _first_node_alone,
    _several_tasks,
    _other_nodes,
    _other_gpus,
)
