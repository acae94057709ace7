"""How a trainer's files and commands are known: a value that each wing of the trainers fills in."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topoplan.reading.setup import Configuration, Variable

SURE = 1000.0
"""A claim that needs no comparison with those of others."""


def _no_program(_text: str, _module: bool) -> str:
    return ""


def _runs_none(_script: str, _keys: Collection[str], _first: str) -> bool:
    return False


def _one_path(_configuration: Configuration, _variables: Sequence[Variable]) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recogniser:
    """What tells that a configuration or a command is one trainer's."""

    trainer: str
    """Whose keys its configurations hold, as rules and translations name it."""
    package: str = ""
    """As pip lists it, by whose version its files are judged."""
    claim: Callable[[Mapping[str, Any], int], float]
    """How surely a document is its own, of so many keys that are known (`keys`): 2 for each key that tells, below 1 for
    a guess, 0 for none."""
    keys: Callable[[], Collection[str]] = frozenset
    """Keys by which pasted text is known to be a configuration."""
    model_keys: tuple[str, ...] = ()
    """Where the model may be named, `block.key` in a block, the first that is there; a configuration without any is a
    piece of one."""
    names: tuple[str, ...] = ()
    """Of its commands, as they are typed."""
    usual: Callable[[str, bool], str] = _no_program
    """The name by which rules know a program, from how a command calls it and whether that is a module; empty for any
    that is of others."""
    programs: str = ""
    """Programs whose arguments are its keys, by their usual names, as a pattern."""
    command: str = ""
    """The one of them that takes a method first."""
    methods: str = ""
    """The methods with which it trains, as a pattern."""
    file_options: tuple[str, ...] = ()
    """Options that name its file, in one or as directory and name; then no option of a command is a key of its own."""
    has_blocks: bool = False
    """Its commands take their keys as `block.key=value`."""
    runs: Callable[[str, Collection[str], str], bool] = _runs_none
    """Whether any other script of Python trains with it: by its name, the keys among its arguments, and the first."""
    family: str = ""
    """What the programs that train have in their names; empty where it has none of its own."""
    takes_deepspeed: bool = False
    """Its key `deepspeed` names or holds a configuration of DeepSpeed's."""
    unpredicted: tuple[str, str, str] | None = None
    """What is said, why, and what to do, where a prediction of its files was asked for; None where there are any."""
    path: Callable[[Configuration, Sequence[Variable]], str | None] = _one_path
    """Which of its ways to train is meant, where it has several."""


Recognisers = tuple[Recogniser, ...]


def of_program(recognisers: Recognisers, program: str) -> Recogniser | None:
    """Whose keys the arguments of a program are, by its usual name."""
    return next((one for one in recognisers if one.programs and re.fullmatch(one.programs, program)), None)


@cache
def keys_of(recognisers: Recognisers) -> frozenset[str]:
    """All keys by which pasted text is known to be a configuration."""
    return frozenset().union(*(one.keys() for one in recognisers))
