"""Wrappers in front of the actual command: `srun`, `nohup`, `ssh host '...'`, `bash -c '...'`, `docker run`.

Wrappers have many options, which differ between systems, so the wrapped command is found by its name: the first word
that is a program that starts training, another wrapper, or a shell.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from topoplan.reading.mpi import MPI
from topoplan.reading.parts import Part
from topoplan.reading.session import Command, Environment, read_inner
from topoplan.reading.setup import Variable
from topoplan.reading.starters import PYTHON, base_name
from topoplan.reading.words import Word, is_open, join

SHELLS = frozenset(["bash", "sh", "zsh", "dash", "ksh"])
PARALLEL = frozenset(["pdsh", "clush"])
"""Wrappers that run a command on several machines at once."""
REMOTE = frozenset(["ssh", "sshpass", *PARALLEL])
CONTAINERS = frozenset(["docker", "podman", "nerdctl", "singularity", "apptainer", "enroot", "kubectl"])
_TERMINALS = frozenset(["tmux", "screen"])
"""Terminals that type quoted text or start a shell with it: `tmux send-keys -t a "torchrun ..." C-m`."""
_LOCAL = frozenset(
    [
        *("exec", "nohup", "sudo", "time", "command", "builtin", "setsid", "stdbuf", "nice", "ionice", "numactl"),
        *("taskset", "timeout", "srun", *MPI, "env", "uv", "uvx", "conda", "mamba", "poetry", "pipenv"),
        *("pixi", "proxychains", "proxychains4", "script", "nsys", "nsight-sys", "py-spy", "screen", "tmux", "xargs"),
        *("doas", "unbuffer", "catchsegv"),
    ]
)
_WRAPPERS = _LOCAL | REMOTE | CONTAINERS
_STARTERS = frozenset(["torchrun", "deepspeed", "accelerate", "accelerate-launch"])
_ASSIGNMENT = re.compile(r"([A-Z_][A-Z0-9_]*)=(.*)", re.DOTALL)  # in `env`, `docker run -e`, `mpirun -x`
_MOST_WRAPPERS = 8
_MOST_NESTED_SHELLS = 3


def unwrapped(
    part: Part, commands: Sequence[Command], trainers: Collection[str]
) -> tuple[tuple[Command, ...], tuple[Variable, ...]]:
    """Replace each command by what it finally runs: itself, the command that it wraps, or those given to another shell.

    Also return the variables that are set on the way. `trainers` are names of programs that train.
    """
    unwrapping = _Unwrapping(part, trainers)
    for command in commands:
        unwrapping.take(command, depth=0)
    return tuple(unwrapping.found), tuple(unwrapping.variables)


class _Unwrapping:
    def __init__(self, part: Part, trainers: Collection[str]) -> None:
        self.part = part
        self.trainers = trainers
        self.found: list[Command] = []
        self.variables: list[Variable] = []

    def take(self, command: Command, *, depth: int) -> None:
        for _ in range(_MOST_WRAPPERS):
            if not command.words:
                return
            name = base_name(command.words[0].text)
            wrapped = replace(command, wrappers=(*command.wrappers, name), wrapper_words=(*command.wrapper_words, ()))
            if name in SHELLS:
                if (text := _text_of_shell(command.words)) is not None:
                    self._inner(text, wrapped, depth, background=command.background)
                return
            if name not in _WRAPPERS:
                break
            behind = self._behind(name, wrapped)
            if behind is None:
                return
            command, text = behind
            if text is not None:
                self._inner(text, command, depth, background=command.background)
                return
        self.found.append(command)

    def _inner(self, text: Word, outer: Command, depth: int, *, background: bool = False) -> None:
        """Take the commands that another shell is told to run."""
        if depth >= _MOST_NESTED_SHELLS:
            return
        script = read_inner(self.part, text, outer.environment)
        self.variables += script.variables
        for inner in script.commands:
            inner = replace(
                inner,
                wrappers=outer.wrappers,
                wrapper_words=outer.wrapper_words,
                background=background or inner.background,
            )
            if not outer.first_line <= inner.first_line <= inner.last_line <= outer.last_line:
                # Words from variables carry the lines where the variables were set.
                inner = replace(inner, first_line=outer.first_line, last_line=outer.last_line)
            self.take(inner, depth=depth + 1)

    def _behind(self, name: str, command: Command) -> tuple[Command, Word | None] | None:
        """Return the command behind one wrapper, with the text of it that another shell reads, if one does."""
        environment = None if name in REMOTE | CONTAINERS else command.environment
        words = command.words
        for at, word in enumerate(words[1:], start=1):
            is_text = word.quoted and re.search(r"\s", word.text)
            told = (*command.wrapper_words[:-1], tuple(one.text for one in words[1:at]))
            behind = replace(command, words=words[at:], environment=environment, wrapper_words=told)
            if name in REMOTE and is_text:
                return behind, join(words[at:])
            if match := _ASSIGNMENT.fullmatch(word.text.removeprefix("--env=")):
                key, value = match.groups()
                variable = Variable(name=key, value=value, part=self.part, line=word.line, assumed=word.assumed)
                self.variables.append(variable)
                environment = Environment(variable, variable.name, environment)
                continue
            if name in _TERMINALS and is_text:
                return behind, word
            if base_name(word.text) in self.trainers or is_command(word, words[at + 1 :]):
                return behind, None
        return None


def _text_of_shell(words: Sequence[Word]) -> Word | None:
    """Return the text that `bash -c` is to run; None if the shell runs a file."""
    for at, word in enumerate(words[1:-1], start=1):
        if not word.text.startswith("-"):
            return None
        if not word.text.startswith("--") and word.text.endswith("c"):
            return words[at + 1]
    return None


def is_command(word: Word, rest: Sequence[Word]) -> bool:
    """Whether a word names a launcher, wrapper, shell, Python interpreter or Python script."""
    name = base_name(word.text)
    if name in _STARTERS or name in _WRAPPERS or name in SHELLS or PYTHON.fullmatch(name) or name.endswith(".py"):
        return True
    return is_open(word.text) and bool(rest) and rest[0].text in ("-m", "-u")
