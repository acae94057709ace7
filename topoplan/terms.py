"""The account of a prediction: a tree of named terms, each with the source of its formula."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

Unit = Literal["bytes", "s", "elements"]


@dataclass(frozen=True, slots=True)
class Term:
    """A named quantity. If it has children, it is their sum."""

    name: str
    value: float
    """In `unit`, the total over every layer, micro-batch and step that the root of the tree covers."""
    unit: Unit
    source: str
    """The function in this package that holds the formula, and the formula's origin; `source_of` composes it."""
    _: KW_ONLY
    what: str = ""
    """Short description."""
    times: float = 1.0
    """The number of equal pieces that make up the value, such as layers or micro-batches."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Inputs and properties worth showing: element counts, shards, whether a tensor is kept."""
    children: tuple[Term, ...] = ()

    @property
    def each(self) -> float:
        """The value of one of the equal pieces."""
        return self.value / self.times

    def child(self, name: str) -> Term | None:
        """Return the child with a given name, or None."""
        return next((one for one in self.children if one.name == name), None)

    def at(self, *names: str) -> Term:
        """Return the descendant at the end of a path of names. Raises KeyError if a name is missing."""
        found = self
        for name in names:
            child = found.child(name)
            if child is None:
                raise KeyError(f"{name!r} is not among the terms of {found.name!r}")
            found = child
        return found

    def walk(self) -> Iterator[Term]:
        """Yield this term and all its descendants."""
        yield self
        for one in self.children:
            yield from one.walk()

    def leaves(self) -> Iterator[Term]:
        """Iterate over the terms of this tree that have no children."""
        return (one for one in self.walk() if not one.children)

    def scaled(self, factor: float, unit: Unit, source: str) -> Term:
        """Return the tree with values multiplied by `factor`, in `unit`; `source` says where the factor comes from."""
        below = tuple(one.scaled(factor, unit, source) for one in self.children)
        return replace(self, value=self.value * factor, unit=unit, source=source, children=below)

    def repeated(self, times: float) -> Term:
        """Return the tree with every value, and every number of pieces, multiplied by `times`."""
        below = tuple(one.repeated(times) for one in self.children)
        return replace(self, value=self.value * times, times=self.times * times, children=below)


def sum_of(
    name: str, children: Iterable[Term], source: str, unit: Unit, *, with_zeros: bool = False, **other: Any
) -> Term:
    """Return a term that is the sum of `children`; zero-valued children are dropped unless `with_zeros`."""
    kept = tuple(one for one in children if one.value or with_zeros)
    return Term(name, sum(one.value for one in kept), unit, source, children=kept, **other)


def source_of(formula: Callable[..., Any], *origins: str) -> str:
    """Return a term's source: `engines/megatron/states.py::stage_states`, then the papers or code it is based on."""
    function = getattr(formula, "__wrapped__", formula)
    file = function.__module__.removeprefix("topoplan.").replace(".", "/")
    return "; ".join((f"{file}.py::{function.__qualname__}", *origins))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The values of the term of one name in two trees."""

    name: str
    first: float
    second: float

    @property
    def more(self) -> float:
        """How much larger the second value is."""
        return self.second - self.first


def differences(first: Iterable[Term], second: Iterable[Term]) -> tuple[Difference, ...]:
    """Compare the terms of two trees by name, the largest difference first; a term that one tree lacks counts as 0."""
    one, two = ({term.name: term.value for term in terms} for terms in (first, second))
    rows = [Difference(name=name, first=one.get(name, 0.0), second=two.get(name, 0.0)) for name in one | two]
    return tuple(sorted(rows, key=lambda row: (-abs(row.more), row.name)))
