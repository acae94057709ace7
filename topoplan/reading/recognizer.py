"""How a trainer's files and commands are recognized: a value that each trainer's subpackage fills in."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from topoplan.errors import misspelt

if TYPE_CHECKING:
    from topoplan.reading.setup import Configuration, Launch, Variable

SURE = 1000.0
"""A claim so certain that it need not be compared with the claims of other trainers."""


def _no_program(_text: str, _module: bool) -> str:
    return ""


def _no_default(_key: str) -> None:
    return None


def _sets_nothing(_launch: Launch) -> bool:
    return False


def _runs_none(_script: str, _keys: Collection[str], _first: str) -> bool:
    return False


def _one_path(_configuration: Configuration, _variables: Sequence[Variable]) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognizer:
    """How to tell that a configuration or a command belongs to one trainer."""

    trainer: str
    """Name of the trainer, as rules and translations use it."""
    package: str = ""
    """Name of the trainer's pip package, whose version selects the rules that apply."""
    claim: Callable[[Mapping[str, Any], int], float]
    """Score a document, given how many of `keys` it has: 2 per distinctive key, below 1 for a guess, 0 for no match."""
    keys: Callable[[], Collection[str]] = frozenset
    """Keys by which pasted text is recognized as a configuration."""
    accepts: Callable[[], Collection[str]] = frozenset
    """All keys of a trainer that refuses a file with any other; empty for one that does not."""
    abbreviates: bool = False
    """True if a command may shorten one of these keys to a beginning that no other has, as argparse allows."""
    model_keys: tuple[str, ...] = ()
    """Keys that may name the model (`block.key` for one inside a block); the first one present counts. A configuration
    with none of them is an excerpt."""
    names: tuple[str, ...] = ()
    """The trainer's commands, as typed."""
    rule_name_of: Callable[[str, bool], str] = _no_program
    """Map a program's spelling, and whether it is a module, to its name in rules; empty for a foreign program."""
    programs: str = ""
    """Pattern of the programs, by the names that `rule_name_of` gives, that take the trainer's keys as arguments."""
    command: str = ""
    """The program among them that takes a subcommand first."""
    methods: str = ""
    """Pattern of the subcommands that train."""
    subcommands: tuple[str, ...] = ()
    """All subcommands of `names`; empty if they are not known."""
    starts_torchrun: bool = False
    """True if `command` starts torchrun itself, and reads NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR for it."""
    takes_all_gpus: bool = False
    """True if the trainer's programs use every visible GPU unless NPROC_PER_NODE is set."""
    spreads_models: bool = False
    """True if a process that `command` starts may use several GPUs, as with device_map."""
    sets_allocator: Callable[[Launch], bool] = _sets_nothing
    """Whether a launch of the trainer replaces PYTORCH_CUDA_ALLOC_CONF."""
    reads_rank: bool = False
    """True if each process finds its rank in RANK, and no launcher is needed where something else sets it."""
    file_options: tuple[str, ...] = ()
    """Options that name the configuration file (one path, or directory and name); then no other option is a key."""
    has_blocks: bool = False
    """True if the trainer's commands take keys as `block.key=value`."""
    is_training_script: Callable[[str, Collection[str], str], bool] = _runs_none
    """Whether a Python script uses the trainer, given its name, its argument keys, and the first argument."""
    program_substring: str = ""
    """Text that occurs in the names of all programs that train with the trainer; empty if there is no such text."""
    takes_deepspeed: bool = False
    """True if the trainer's key `deepspeed` names or contains a DeepSpeed configuration."""
    default_of: Callable[[str], Any] = _no_default
    """Return the trainer's default of a key that `deepspeed` must agree with; None if it is not known."""
    text_keys: tuple[str, ...] = ()
    """Keys whose value is a text or the path of a `.txt` file that contains it."""
    unpredicted: tuple[str, str, str] | None = None
    """Message, reason and remedy if a prediction is asked for but the files are not predicted; None if they are."""
    path: Callable[[Configuration, Sequence[Variable]], str | None] = _one_path
    """Return the training path that a configuration takes, for trainers with several."""


Recognizers = tuple[Recognizer, ...]


def of_program(recognizers: Recognizers, program: str) -> Recognizer | None:
    """Return the recognizer of the trainer whose keys a program takes as arguments, by the program's usual name."""
    return next((one for one in recognizers if one.programs and re.fullmatch(one.programs, program)), None)


def misspelt_keys(
    recognizer: Recognizer | None, keys: Collection[str], *, from_command: bool = False
) -> Mapping[str, str]:
    """Return the misspelt keys that a trainer refuses, and the shortened ones of a command that it takes -> the keys
    that were meant, if these are not given too."""
    accepted = recognizer.accepts() if recognizer else ()
    shortens = from_command and recognizer is not None and recognizer.abbreviates
    found = {
        key: (_lengthened(key, accepted) if shortens else "") or misspelt(key, accepted)
        for key in keys
        if key not in accepted
    }
    meant = list(found.values())
    return {key: name for key, name in found.items() if name and name not in keys and meant.count(name) == 1}


def _lengthened(key: str, known: Collection[str]) -> str:
    """Return the only known key that begins with `key`; empty if there is none, or several."""
    found = [name for name in known if name.startswith(key)]
    return found[0] if len(found) == 1 else ""


@cache
def keys_of(recognizers: Recognizers) -> frozenset[str]:
    """Return all keys by which pasted text is recognized as a configuration."""
    return frozenset().union(*(one.keys() for one in recognizers))
