"""What the rules ask about a launch, what they say, and the edits that they make of it."""

from __future__ import annotations

import re

from topoplan.reading.finding import Edit
from topoplan.reading.rules import read_rules
from topoplan.reading.setup import Configuration, Launch, Option, Setup, Variable
from topoplan.reading.words import is_open
from topoplan.reading.wrappers import CONTAINERS, REMOTE
from topoplan.trainers.llamafactory.key_list import TrainerPath, keys_for, plain_keys

RULES = read_rules(__package__, "launch.toml")

LAST_PORT = 65535
NODES = re.compile(r"(?:--nodes[= ]|(?<!\S)-N ?=?)(\d+)(?![\d-])")
"""Of a job of Slurm, or a step."""
_YES = frozenset(["1", "true", "y"])
_SOURCES_FILES = re.compile(r"^\s*(?:source|\.)\s+\S", re.MULTILINE)


def is_llamafactory_cli(launch: Launch) -> bool:
    """`llamafactory-cli train`, which starts torchrun by itself and reads NNODES and the like."""
    return launch.program == "llamafactory-cli" and not launch.starter


def is_swift_cli(launch: Launch) -> bool:
    """`swift sft`, which starts torchrun by itself when NPROC_PER_NODE or NNODES is set."""
    return launch.program in ("swift", "megatron") and not launch.starter


def known(value: Option | Variable | None) -> str | None:
    """A value that is certain: written there, and neither the shell's nor a default."""
    if value is None or value.assumed or is_open(value.value):
        return None
    return value.value.strip()


def count_of(value: Option | Variable | None) -> int | None:
    """A value that is certain, as a number."""
    text = known(value)
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,6}", text) else None


def is_port(text: str) -> bool:
    """Whether a text is a number that a port can have."""
    return text.isascii() and text.isdecimal() and len(text) < 6 and int(text) <= LAST_PORT


def setting_of(launch: Launch, option: str) -> Option | Variable | None:
    """Where a launch says it: torchrun's option, or the variable that the trainers' own commands read instead."""
    if launch.starter:
        return launch.options.get(option)
    return launch.variable(option.upper())


def nodes_of(launch: Launch) -> int | None:
    """How many nodes it says it is for, where that is certain."""
    setting = setting_of(launch, "nnodes")
    if setting is not None and re.fullmatch(r"\$\{?SLURM_(?:NNODES|JOB_NUM_NODES)\}?", setting.value):
        return number_of(NODES, job_options(launch))
    if setting is None and "srun" in launch.wrappers and launch.program.endswith(".py"):
        return number_of(NODES, job_options(launch))  # a task is a process
    return count_of(setting)


def endpoint(launch: Launch) -> tuple[str | None, str | None]:
    """Host and port of torchrun's rendezvous, also from variables, as far as they are certain."""
    option = launch.options.get("rdzv_endpoint")
    host, _, port = option.value.rpartition(":") if option else ("", "", "")
    parts = [known(launch.variable(one.strip("${}"))) if one.startswith("$") else one or None for one in (host, port)]
    return parts[0], parts[1]


def job_options(launch: Launch) -> str:
    """What the #SBATCH lines of its script say."""
    return " ".join(re.findall(r"^#SBATCH[ \t]+([^#\n]*)", launch.part.text, re.MULTILINE))


def number_of(pattern: re.Pattern[str], text: str) -> int | None:
    """The last number of a pattern."""
    found = pattern.findall(text)
    return int(found[-1][:6]) if found else None


def is_static(launch: Launch) -> bool:
    """torchrun's static rendezvous, in which node_rank and master_addr count."""
    if launch.starter != "torchrun" or "standalone" in launch.options:
        return False
    backend = launch.options.get("rdzv_backend")
    return (backend is None or backend.value == "static") and "rdzv_endpoint" not in launch.options


def from_outside(launch: Launch) -> bool:
    """Whether variables may come from a file that the script sources, or torchrun's options from PET_ variables.

    A terminal of tmux or screen has those that were typed into it before.
    """
    sources = _SOURCES_FILES.search(launch.part.text) is not None or bool({"tmux", "screen"} & set(launch.wrappers))
    return sources or any(one.name.startswith("PET_") for one in launch.variables)


def is_remote(launch: Launch) -> bool:
    """Whether it runs on other machines than the script."""
    return bool({"ssh", "pdsh", "clush", "srun", "mpirun", "mpiexec"} & set(launch.wrappers))


def has_exports(launch: Launch) -> bool:
    """Whether it has what the script exports: other machines and containers do not."""
    return not {"mpirun", "mpiexec", *REMOTE, *CONTAINERS} & set(launch.wrappers)


def is_enabled(launch: Launch, name: str) -> bool:
    """Whether a variable is set to yes, as LLaMA-Factory's is_env_enabled reads it."""
    variable = launch.variable(name)
    return variable is not None and variable.value.strip().lower() in _YES


def starts_torchrun_anyway(launch: Launch) -> bool:
    """Whether LLaMA-Factory trains with Megatron, and so starts torchrun on one GPU too."""
    return is_enabled(launch, "USE_MCA") or is_enabled(launch, "USE_MEGATRON_BRIDGE")


def configurations_of(setup: Setup, launch: Launch) -> tuple[Configuration, ...]:
    """What the launch trains by: its file and arguments, or the only configurations of the document around it."""
    if launch.reads is not None:
        return (launch.reads,)
    if launch.configuration is not None and not launch.config_file:
        return (launch.configuration,)
    if not launch.config_file:
        return ()
    return tuple(one for one in setup.of("llamafactory") if not one.from_command and one.part.name == launch.part.name)


def megatron_keys(configuration: Configuration, path: TrainerPath) -> list[str]:
    """The keys that only the trainer of a path knows, which the parser refuses without its variable."""
    own = keys_for(path).keys() - plain_keys().keys()
    return [key for key in configuration.source.data if key in own]


def size_of(configuration: Configuration, key: str) -> int:
    """A parallel size; 1 where it is not given."""
    value = configuration.get(key, 1)
    return value if isinstance(value, int) else 1


def lines_of(launch: Launch) -> list[tuple[int, str]]:
    """The lines of the command, with their numbers."""
    text = launch.part.text.split("\n")
    return [(number, text[number - 1]) for number in range(launch.first_line, min(launch.last_line, len(text)) + 1)]


def replaced(launch: Launch, pattern: re.Pattern[str], new: str) -> tuple[Edit, ...]:
    """The edit that replaces the only place of a pattern in the lines of the command; none when it is not the only."""
    found = [(number, line) for number, line in lines_of(launch) if pattern.search(line)]
    if len(found) != 1 or len(pattern.findall(found[0][1])) != 1:
        return ()
    number, line = found[0]
    return (Edit(first_line=number, last_line=number, text=pattern.sub(new, line)),)


def line_of(launch: Launch, pattern: re.Pattern[str]) -> int | None:
    """The first line of the command in which a pattern is found."""
    return next((number for number, line in lines_of(launch) if pattern.search(line)), None)
