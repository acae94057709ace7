"""The nodes, tasks and GPUs that Slurm gives a job and its steps, from the #SBATCH lines and the options of srun.

Source: sbatch(1) and srun(1) of Slurm 25.05. With a range of nodes (`-N 2-4`), the number of nodes is unknown.
Without a number of tasks, there is one task per node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from topoplan.reading.words import is_open

if TYPE_CHECKING:
    from topoplan.reading.setup import Launch

_OPTIONS = {
    **dict.fromkeys(("--nodes", "-N"), "nodes"),
    **dict.fromkeys(("--ntasks", "-n"), "tasks"),
    **dict.fromkeys(("--ntasks-per-node", "--tasks-per-node"), "tasks_per_node"),
    **dict.fromkeys(("--gpus-per-node", "--gres"), "gpus_per_node"),
    "--gpus-per-task": "gpus_per_task",
    **dict.fromkeys(("--gpus", "-G"), "gpus"),
}
_TASKS_BY_OTHERS = frozenset(["--ntasks-per-gpu", "--ntasks-per-socket", "--ntasks-per-core"])
_SHORT = re.compile(r"(-[NnG])=?(\S+)")
_COUNTS = {
    "nodes": re.compile(r"(\d+)(?:-\1)?"),
    "gpus_per_node": re.compile(r"(?:gres/)?(?:gpu:)?(?:[A-Za-z][\w.-]*:)?(\d+)"),
    **dict.fromkeys(("gpus_per_task", "gpus"), re.compile(r"(?:[A-Za-z][\w.-]*:)?(\d+)")),
}
_COUNT = re.compile(r"(\d+)")
_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+([^#\n]*)", re.MULTILINE)
_MEMORY = re.compile(r"#SBATCH\s.*?--(mem|mem-per-gpu)[= ](\d+)(?:([KMGTkmgt])B?)?(?=\s|$)")
NODES_OF_A_JOB = re.compile(r"\$\{?SLURM_(?:NNODES|JOB_NUM_NODES)\}?")
"""Matches the variables with a job's number of nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest:
    """Numbers of nodes, tasks and GPUs; None for a number that is not given or not known."""

    nodes: int | None = None
    tasks: int | None = None
    """Tasks on all nodes together."""
    tasks_per_node: int | None = None
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    gpus: int | None = None
    """GPUs on all nodes together."""
    is_asked: bool = False
    """True if any options are given to Slurm here."""


def directives(text: str) -> str:
    """Return the options on the #SBATCH lines of a script."""
    return " ".join(_DIRECTIVE.findall(text))


def request_of(words: Sequence[str]) -> SlurmRequest:
    """Return what options of sbatch request."""
    return _given(_numbers(words), is_asked=bool(words))


def job_of(launch: Launch) -> SlurmRequest:
    """Return what a launch's script requests for its job."""
    return request_of(directives(launch.part.text).split())


def srun_request_of(launch: Launch) -> SlurmRequest:
    """Return what a launch's own srun requests."""
    words = launch.words_of("srun")
    return _given(_numbers(words or ()), is_asked=words is not None)


def step_of(launch: Launch) -> SlurmRequest:
    """Return what a launch's srun starts; options that srun does not set are the job's."""
    job, own = _numbers(directives(launch.part.text).split()), _numbers(launch.words_of("srun") or ())
    if "tasks" in own and "tasks_per_node" not in own:
        job.pop("tasks_per_node", None)
    if "tasks_per_node" in own:
        job.pop("tasks", None)
    said = {**job, **own}
    nodes = said.get("nodes")
    if nodes and said.keys().isdisjoint(("tasks", "tasks_per_node")):
        said["tasks_per_node"] = 1
    elif nodes and said.get("tasks") and "tasks_per_node" not in said:
        each, rest = divmod(said["tasks"] or 0, nodes)
        said["tasks_per_node"] = None if rest else each
    if any(is_open(word) and not word.startswith("-") for word in _bare(launch.words_of("srun") or ())):
        said = {}  # an unknown expansion, as in `srun $OPTIONS`
    return _given(said, is_asked="srun" in launch.wrappers)


def seconds_of(time: str) -> int | None:
    """Return the seconds of `--time`: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS (sbatch(1), --time)."""
    days, dash, rest = time.rpartition("-")
    parts = [int(one[:9]) for one in rest.split(":") if one.isdecimal()]
    if len(parts) != rest.count(":") + 1 or len(parts) > 3 or (dash and not days.isdecimal()):
        return None
    units = (86400, 3600, 60, 1)
    first = 1 if dash or len(parts) == 3 else 2
    own = sum(part * unit for part, unit in zip(parts, units[first:], strict=False))
    return own + (int(days[:9]) * units[0] if dash else 0)


def memory_of_node(launch: Launch) -> tuple[int, int] | None:
    """Return the bytes of host memory that a job asks for on a node, and the line; None if it asks for all or none."""
    for number, line in enumerate(launch.part.text.split("\n"), start=1):
        match = _MEMORY.match(line)
        if match is None:
            continue
        name, count, unit = match.groups()
        each = int(count[:12]) << 10 * ("KMGT".index((unit or "M").upper()) + 1)
        gpus = step_of(launch).gpus_per_node if name == "mem-per-gpu" else 1
        return (each * gpus, number) if each and gpus else None
    return None


def _given(said: Mapping[str, int | None], *, is_asked: bool) -> SlurmRequest:
    nodes, gpus = said.get("nodes"), said.get("gpus")
    if nodes and gpus and "gpus_per_node" not in said and gpus % nodes == 0:
        said = {**said, "gpus_per_node": gpus // nodes}
    return SlurmRequest(**said, is_asked=is_asked)


def _bare(words: Sequence[str]) -> Iterator[str]:
    """Yield the words that are neither options nor possibly the value of one."""
    before = "="
    for word in words:
        if not word.startswith("-") and ("=" in before or not before.startswith("-")):
            yield word
        before = word


def _numbers(words: Sequence[str]) -> dict[str, int | None]:
    """Return the last value of each option; None for one that is given but not a literal number."""
    said: dict[str, int | None] = {}
    for at, word in enumerate(words):
        short = _SHORT.fullmatch(word)
        option, equals, value = (short[1], "=", short[2]) if short else word.partition("=")
        if option in _TASKS_BY_OTHERS:
            said["tasks_per_node"] = None
        if (name := _OPTIONS.get(option)) is None:
            continue
        value = value if equals else "".join(words[at + 1 : at + 2])
        if option == "--gres":
            value = next((one for one in value.split(",") if one.removeprefix("gres/").startswith("gpu")), "")
            if not value:
                continue
        found = _COUNTS.get(name, _COUNT).fullmatch(value.strip("\"'"))
        said[name] = int(found[1][:6]) if found else None
    return said
