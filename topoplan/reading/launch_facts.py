"""What rules need to know about a launch, and helpers for their edits."""

from __future__ import annotations

import math
import re

from topoplan.reading.finding import Edit
from topoplan.reading.mpi import MPI
from topoplan.reading.setup import Configuration, Launch, Option, Setup, Variable
from topoplan.reading.slurm import NODES_OF_A_JOB, job_of, step_of
from topoplan.reading.words import is_open
from topoplan.reading.wrappers import CONTAINERS, PARALLEL, REMOTE, SHELLS

LAST_PORT = 65535
LOCAL_ADDRESS = re.compile(r"localhost|127(?:\.\d{1,3}){3}|::1|0\.0\.0\.0")
_OF_ACCELERATE = {
    "nnodes": "num_machines",
    "node_rank": "machine_rank",
    "master_addr": "main_process_ip",
    "master_port": "main_process_port",
}
"""torchrun's options, as accelerate names them."""
SOURCES_FILES = re.compile(
    r"^\s*(?:source|\.)\s+(?!\S*(?:activate|conda\.sh|\.bashrc|profile|setvars\.sh|/init/\w+)\b)\S", re.MULTILINE
)
"""Sourced files that may set anything; those that only activate an environment are excluded."""


def certain_text(value: Option | Variable | None) -> str | None:
    """Return a value if it is certain: literal text, neither expanded by the shell nor a default."""
    if value is None or value.assumed or is_open(value.value):
        return None
    return value.value.strip()


def certain_count(value: Option | Variable | None) -> int | None:
    """Return a certain value as a number."""
    text = certain_text(value)
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,6}", text) else None


def is_port(text: str) -> bool:
    """Whether a text is a valid port number."""
    return text.isascii() and text.isdecimal() and len(text) < 6 and int(text) <= LAST_PORT


def setting_of(launch: Launch, option: str) -> Option | Variable | None:
    """Return where a launch sets an option: torchrun's option, or the variable that trainers read instead."""
    if launch.starter:
        of_accelerate = _OF_ACCELERATE.get(option, option) if launch.starter == "accelerate" else option
        return launch.option(of_accelerate)
    return launch.variable(option.upper())


def is_in_file(setting: Option | Variable | None) -> bool:
    """Whether a setting of a launch stands in accelerate's file."""
    return isinstance(setting, Option) and setting.file is not None


def own_rank(launch: Launch) -> Option | Variable | None:
    """Return where a script says which node it is for; accelerate's file, which all scripts may read, does not."""
    setting = setting_of(launch, "node_rank")
    return None if is_in_file(setting) else setting


def nodes_of(launch: Launch) -> int | None:
    """Return the number of nodes that a launch is for, if it is certain."""
    setting = setting_of(launch, "nnodes")
    if setting is not None and NODES_OF_A_JOB.fullmatch(setting.value):
        return job_of(launch).nodes
    if setting is None and "srun" in launch.wrappers and launch.program.endswith(".py"):
        return step_of(launch).nodes  # each Slurm task is one process
    return certain_count(setting)


def endpoint(launch: Launch) -> tuple[str | None, str | None]:
    """Return host and port of torchrun's rendezvous, resolving variables, as far as they are certain."""
    option = launch.options.get("rdzv_endpoint")
    host, _, port = option.value.rpartition(":") if option else ("", "", "")
    parts = [
        certain_text(launch.variable(one.strip("${}"))) if one.startswith("$") else one or None for one in (host, port)
    ]
    return parts[0], parts[1]


def is_static(launch: Launch) -> bool:
    """Whether a launch uses torchrun's static rendezvous, the default, which reads node_rank.

    It takes the address from rdzv_endpoint, or else from master_addr (run.py, get_rdzv_endpoint).
    """
    if launch.starter != "torchrun" or "standalone" in launch.options:
        return False
    backend = launch.options.get("rdzv_backend")
    return backend is None or backend.value == "static"


def from_outside(launch: Launch) -> bool:
    """Whether variables may come from outside: a file that the script sources, or PET_ variables that torchrun reads.

    A tmux or screen terminal also has the variables that were set in it before.
    """
    sources = SOURCES_FILES.search(launch.part.text) is not None or bool({"tmux", "screen"} & set(launch.wrappers))
    return sources or any(one.name.startswith("PET_") for one in launch.variables)


def is_remote(launch: Launch) -> bool:
    """Whether a launch runs on other machines than its script."""
    return bool({"srun", *REMOTE, *MPI} & set(launch.wrappers))


def machines_of(launch: Launch) -> int | None:
    """Return the number of machines on which pdsh or clush runs a command, as in `-w node[0-3],node7`."""
    words = launch.words_of(*PARALLEL) or ()
    lists = (
        value if word == "-w" else word[2:]
        for word, value in zip(words, (*words[1:], ""), strict=True)
        if re.match(r"-w(?!\w*=)", word)
    )
    text = next(lists, "")
    if not text or is_open(text) or text.startswith(("^", "/", "@")):
        return None
    names = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    return sum(math.prod(map(_count_in, re.findall(r"\[([^\]]*)\]", name))) for name in names)


def _count_in(brackets: str) -> int:
    """Return how many numbers `0-3,7` stands for."""
    ranges = [one.split("-") for one in brackets.split(",")]
    return sum(int(one[-1]) - int(one[0]) + 1 if all(map(str.isdecimal, one)) else 1 for one in ranges)


def has_exports(launch: Launch) -> bool:
    """Whether a launch sees what the script exports, unlike commands on other machines and in containers."""
    return not (MPI | REMOTE | CONTAINERS) & set(launch.wrappers)


def is_worked_out_there(launch: Launch, setting: Option | Variable, pattern: re.Pattern[str]) -> bool:
    """Whether a value has a pattern that the shell on a node works out, and not the one that starts srun or mpirun."""
    if not pattern.search(setting.value) or line_of(launch, pattern) is None:
        return False  # or it is the value of a variable that was set before
    names = [at for at, name in enumerate(launch.wrappers) if name in ("srun", *MPI)]
    if not names or not SHELLS.intersection(launch.wrappers[names[0] + 1 :]):
        return False
    return launch.first_line <= setting.line <= launch.last_line and not is_in_double_quotes(launch)


def is_in_double_quotes(launch: Launch) -> bool:
    """Whether the text that a launch gives a shell to run is in double quotes, so that this shell expands it."""
    return re.search(r"\s-\w*c\s+\"", "\n".join(line for _, line in lines_of(launch))) is not None


def configurations_of(setup: Setup, launch: Launch) -> tuple[Configuration, ...]:
    """Return the configurations that a launch uses: its file, its arguments, or those in the same document."""
    if launch.file_configuration is not None:
        return (launch.file_configuration,)
    if launch.configuration is not None and not launch.config_file:
        return (launch.configuration,)
    if not launch.config_file or launch.trains is None:
        return ()
    beside = (one for one in setup.of(launch.trains.trainer) if one.part.name == launch.part.name)
    return tuple(one for one in beside if not one.from_command)


def size_of(configuration: Configuration, key: str) -> int:
    """Return a parallel size; 1 if the key is absent."""
    value = configuration.get(key, 1)
    return value if isinstance(value, int) else 1


def assignment(variable: Variable) -> str:
    """Return a pattern for a variable's assignment."""
    return rf"(?<![\w$]){re.escape(variable.name)}="


def lines_of(launch: Launch) -> list[tuple[int, str]]:
    """Return the lines of the command with their numbers."""
    text = launch.part.text.split("\n")
    return [(number, text[number - 1]) for number in range(launch.first_line, min(launch.last_line, len(text)) + 1)]


def replaced(launch: Launch, pattern: re.Pattern[str], new: str) -> tuple[Edit, ...]:
    """Return an edit that replaces a pattern in the command; nothing unless the pattern occurs exactly once."""
    found = [(number, line) for number, line in lines_of(launch) if pattern.search(line)]
    if len(found) != 1 or len(pattern.findall(found[0][1])) != 1:
        return ()
    number, line = found[0]
    return (Edit(first_line=number, last_line=number, text=pattern.sub(new, line)),)


def line_of(launch: Launch, pattern: re.Pattern[str]) -> int | None:
    """Return the first line of the command in which a pattern is found."""
    return next((number for number, line in lines_of(launch) if pattern.search(line)), None)
