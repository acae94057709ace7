"""The account of a prediction: a tree of named terms, each with the place of its formula."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

Unit = Literal["bytes", "s", "elements"]


@dataclass(frozen=True, slots=True)
class Term:
    """A named quantity. Where it has children, it is their sum."""

    name: str
    value: float
    """In `unit`, all of it: of every layer, micro batch and step that the root of the tree is about."""
    unit: Unit
    source: str
    """The place of the formula in the package, and what the formula is taken from: `source_of` writes it."""
    _: KW_ONLY
    what: str = ""
    """In a few words, what it is."""
    times: float = 1.0
    """How many equal pieces the value is made of, such as layers or micro batches."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Inputs and properties that a reader may want: elements, shards, whether a tensor is kept."""
    children: tuple[Term, ...] = ()

    @property
    def each(self) -> float:
        """The value of one piece."""
        return self.value / self.times

    def child(self, name: str) -> Term | None:
        """The child of a name, where there is one."""
        return next((one for one in self.children if one.name == name), None)

    def at(self, *names: str) -> Term:
        """The term at the end of a path of names below this one."""
        found = self
        for name in names:
            child = found.child(name)
            if child is None:
                raise KeyError(f"{name!r} is not among the terms of {found.name!r}")
            found = child
        return found

    def walk(self) -> Iterator[Term]:
        """The term itself and all below it."""
        yield self
        for one in self.children:
            yield from one.walk()

    def leaves(self) -> Iterator[Term]:
        """The terms below it that have no children."""
        return (one for one in self.walk() if not one.children)

    def scaled(self, factor: float, unit: Unit, source: str) -> Term:
        """The tree in another unit, of which each of its own has `factor`; `source` is where the factor comes from."""
        below = tuple(one.scaled(factor, unit, source) for one in self.children)
        return replace(self, value=self.value * factor, unit=unit, source=source, children=below)

    def repeated(self, times: float) -> Term:
        """So many of the same."""
        below = tuple(one.repeated(times) for one in self.children)
        return replace(self, value=self.value * times, times=self.times * times, children=below)


def sum_of(
    name: str, children: Iterable[Term], source: str, unit: Unit, *, with_zeros: bool = False, **other: Any
) -> Term:
    """A term that is the sum of others. Children of no value are left out, unless they are asked for."""
    kept = tuple(one for one in children if one.value or with_zeros)
    return Term(name, sum(one.value for one in kept), unit, source, children=kept, **other)


def source_of(formula: Callable[..., Any], *origins: str) -> str:
    """`engines/megatron/states.py::stage_states; ` and what the formula is taken from: papers, other people's code."""
    function = getattr(formula, "__wrapped__", formula)
    file = function.__module__.removeprefix("topoplan.").replace(".", "/")
    return "; ".join((f"{file}.py::{function.__qualname__}", *origins))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One term of two trees."""

    name: str
    first: float
    second: float

    @property
    def more(self) -> float:
        """What the second has above the first."""
        return self.second - self.first


def differences(first: Iterable[Term], second: Iterable[Term]) -> tuple[Difference, ...]:
    """Terms of two trees by name, the largest difference first; one that a tree lacks is zero there."""
    one, two = ({term.name: term.value for term in terms} for terms in (first, second))
    rows = [Difference(name=name, first=one.get(name, 0.0), second=two.get(name, 0.0)) for name in one | two]
    return tuple(sorted(rows, key=lambda row: (-abs(row.more), row.name)))
