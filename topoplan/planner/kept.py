"""A complete search as data, from which its ranking is restored: layouts are stored, and predicted again on access."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from topoplan.layout.layout import Layout
from topoplan.planner.plan import Counts, Plan, Plans, Ranking, Rejection
from topoplan.planner.predict import memory_of, plan_of
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What is stored of a search. All fields except the first two are attributes of the ranking."""

    question: str
    """Identifies the question that was asked."""
    layouts: tuple[Layout, ...]
    """Layouts that fit, best first."""
    counts: Counts
    elapsed_s: float
    safe: int | None
    rejected: tuple[Rejection, ...]
    notes: tuple[str, ...]
    crossings: tuple[str, ...]
    data_notes: tuple[str, ...]
    searched_backends: tuple[str, ...]


_SAME = tuple(field.name for field in fields(_Kept))[2:]


@cache
def _form() -> TypeAdapter[_Kept]:
    from pydantic import TypeAdapter

    return TypeAdapter(_Kept)


def to_json(ranking: Ranking, question: str) -> bytes:
    """Return the ranking of a complete search as JSON, without its spec."""
    same: dict[str, Any] = {name: getattr(ranking, name) for name in _SAME}
    kept = _Kept(question=question, layouts=tuple(ranking.plans.layouts), **same)
    return _form().dump_json(kept, exclude_defaults=True)


def from_json(document: bytes, spec: Spec, question: str) -> Ranking | None:
    """Return the ranking stored for a question about this spec, or None for any other document."""
    from pydantic import ValidationError

    try:
        kept = _form().validate_json(document, strict=True)
    except ValidationError:
        return None
    if kept.question != question:
        return None

    cases = {backend: case_of(spec, backend) for backend in {layout.backend for layout in kept.layouts}}

    def plan(place: int) -> Plan:
        layout = kept.layouts[place]
        case = cases[layout.backend]
        return plan_of(spec, case, layout, memory_of(case, layout))

    return Ranking(spec=spec, plans=Plans(kept.layouts, plan), **{name: getattr(kept, name) for name in _SAME})
