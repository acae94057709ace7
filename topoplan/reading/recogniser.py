"""How a trainer's files and commands are known: a value that each wing of the trainers fills in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topoplan.reading.setup import Configuration, Variable

SURE = 1000.0
"""A claim that needs no comparison with those of others."""


def _none(_data: Mapping[str, Any]) -> str:
    return ""


def _one_path(_configuration: Configuration, _variables: Sequence[Variable]) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recogniser:
    """What tells that a configuration or a command is one trainer's."""

    trainer: str
    """Whose keys its configurations hold, as rules and translations name it."""
    claim: Callable[[Mapping[str, Any], int], float]
    """How surely a document is its own, of so many keys that are known (`keys`): 2 for each key that tells, below 1 for
    a guess, 0 for none."""
    stranger: Callable[[Mapping[str, Any]], str] = _none
    """What a document looks like that is of the same people, and is not read; empty for any other."""
    keys: Callable[[], Collection[str]] = frozenset
    """Keys by which pasted text is known to be a configuration."""
    model_key: str = ""
    """Key that names the model; a configuration without it is a piece of one."""
    programs: str = ""
    """Programs whose arguments are its keys, as a pattern."""
    family: str = ""
    """What the programs that train have in their names; empty where it has none of its own."""
    takes_deepspeed: bool = False
    """Its key `deepspeed` names or holds a configuration of DeepSpeed's."""
    unpredicted: tuple[str, str, str] | None = None
    """What is said, why, and what to do, where a prediction of its files was asked for; None where there are any."""
    path: Callable[[Configuration, Sequence[Variable]], str | None] = _one_path
    """Which of its ways to train is meant, where it has several."""


Recognisers = tuple[Recogniser, ...]


@cache
def keys_of(recognisers: Recognisers) -> frozenset[str]:
    """All keys by which pasted text is known to be a configuration."""
    return frozenset().union(*(one.keys() for one in recognisers))
