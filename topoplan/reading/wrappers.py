"""What stands in front of the command that is meant: `srun`, `nohup`, `ssh host '...'`, `bash -c '...'`, `docker run`.

Their own options are many and differ from system to system, so the command behind them is found by its name: the first
word that is a program which starts training (or another wrapper, or a shell).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from topoplan.reading.setup import Variable
from topoplan.reading.shell import Command, Environment, Script, nested_commands
from topoplan.reading.starters import PYTHON, base_name
from topoplan.reading.words import Word, is_open, join

_SHELLS = frozenset(["bash", "sh", "zsh", "dash", "ksh"])
REMOTE = frozenset(["ssh", "pdsh", "clush", "sshpass"])
CONTAINERS = frozenset(["docker", "podman", "nerdctl", "singularity", "apptainer", "enroot", "kubectl"])
_TERMINALS = frozenset(["tmux", "screen"])
"""They type what stands in quotes, or start a shell with it: `tmux send-keys -t a "torchrun ..." C-m`."""
_LOCAL = frozenset(
    [
        *("exec", "nohup", "sudo", "time", "command", "builtin", "setsid", "stdbuf", "nice", "ionice", "numactl"),
        *("taskset", "timeout", "srun", "mpirun", "mpiexec", "env", "uv", "uvx", "conda", "mamba", "poetry", "pipenv"),
        *("pixi", "proxychains", "proxychains4", "script", "nsys", "nsight-sys", "py-spy", "screen", "tmux", "xargs"),
        *("doas", "unbuffer", "catchsegv"),
    ]
)
_WRAPPERS = _LOCAL | REMOTE | CONTAINERS
_STARTS = frozenset(
    ["torchrun", "deepspeed", "accelerate", "accelerate-launch", "llamafactory-cli", "lmf", "swift", "megatron"]
)
_ASSIGNMENT = re.compile(r"([A-Z_][A-Z0-9_]*)=(.*)", re.DOTALL)  # of `env`, `docker run -e`, `mpirun -x`
_MOST_WRAPPERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwrapped:
    """The command that is meant."""

    words: tuple[Word, ...]
    variables: tuple[Variable, ...]
    """What it sees."""
    wrappers: tuple[str, ...]
    first_line: int
    last_line: int
    background: bool


@dataclass(frozen=True, slots=True)
class _Left:
    """A command with some wrappers taken off."""

    words: Sequence[Word]
    environment: Environment | None
    wrappers: tuple[str, ...]


def unwrapped(script: Script, command: Command) -> Iterator[Unwrapped]:
    """The commands that a command comes to: itself, the one it wraps, or those that another shell is told to run."""
    yield from _unwrap(script, command, _Left(command.words, command.environment, ()), depth=0)


def _unwrap(script: Script, command: Command, left: _Left, *, depth: int) -> Iterator[Unwrapped]:
    for _ in range(_MOST_WRAPPERS):
        if not left.words:
            return
        name = base_name(left.words[0].text)
        if name in _SHELLS:
            text = _text_of_shell(left.words)
            if text is not None:
                wrappers = (*left.wrappers, name)
                for inner in nested_commands(script, text, left.environment, depth=depth + 1):
                    inner = replace(inner, background=command.background or inner.background)
                    inner_left = _Left(inner.words, inner.environment, wrappers)
                    yield from _unwrap(script, inner, inner_left, depth=depth + 1)
            return
        if name not in _WRAPPERS:
            break
        taken = _take_off(script, name, left)
        if isinstance(taken, Word):
            wrappers = (*left.wrappers, name)
            environment = None if name in REMOTE | CONTAINERS else left.environment
            for inner in nested_commands(script, taken, environment, depth=depth + 1):
                inner_left = _Left(inner.words, inner.environment, wrappers)
                yield from _unwrap(script, inner, inner_left, depth=depth + 1)
            return
        if taken is None:
            return
        left = taken
    yield Unwrapped(
        words=tuple(left.words),
        variables=left.environment.variables() if left.environment else (),
        wrappers=left.wrappers,
        first_line=command.first_line,
        last_line=command.last_line,
        background=command.background,
    )


def _text_of_shell(words: Sequence[Word]) -> Word | None:
    """What `bash -c` is told to run; None where it is a file."""
    for at, word in enumerate(words[1:-1], start=1):
        if not word.text.startswith("-"):
            return None
        if not word.text.startswith("--") and word.text.endswith("c"):
            return words[at + 1]
    return None


def _take_off(script: Script, name: str, left: _Left) -> _Left | Word | None:
    """The command behind one wrapper; a Word where a shell is to read it."""
    environment = None if name in REMOTE | CONTAINERS else left.environment
    words = left.words
    for at in range(1, len(words)):
        word = words[at]
        if match := _ASSIGNMENT.fullmatch(word.text.removeprefix("--env=")):
            variable = Variable(
                name=match.group(1), value=match.group(2), part=script.part, line=word.line, assumed=word.assumed
            )
            script.variables.append(variable)
            environment = Environment(variable, variable.name, environment)
            continue
        if name in REMOTE and word.quoted and re.search(r"\s", word.text):
            return join(words[at:])
        if name in _TERMINALS and word.quoted and re.search(r"\s", word.text):
            return word
        if is_command(word, words[at + 1 :]):
            return _Left(words[at:], environment, (*left.wrappers, name))
    return None


def is_command(word: Word, rest: Sequence[Word]) -> bool:
    """Whether a word is the name of a program that starts training, or of a wrapper or shell."""
    name = base_name(word.text)
    if name in _STARTS or name in _WRAPPERS or name in _SHELLS or PYTHON.fullmatch(name):
        return True
    return is_open(word.text) and bool(rest) and rest[0].text in ("-m", "-u")
