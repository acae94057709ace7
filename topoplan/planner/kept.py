"""A whole search as data, and the ranking that it was: its layouts are kept, and predicted again when asked for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from math import isfinite
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
    """What is kept of a search. All but the first two are attributes of the ranking."""

    question: str
    """Tells what was asked from anything else."""
    layouts: tuple[Layout, ...]
    """Those that fit, best first."""
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
    """The ranking of a whole search, without its spec."""
    same: dict[str, Any] = {name: getattr(ranking, name) for name in _SAME}
    kept = _Kept(question=question, layouts=tuple(ranking.plans.layouts), **same)
    return _form().dump_json(kept, exclude_defaults=True)


def from_json(document: bytes, spec: Spec, question: str) -> Ranking | None:
    """The ranking that was kept for a question about this spec; None for anything else."""
    from pydantic import ValidationError

    try:
        kept = _form().validate_json(document, strict=True)
    except ValidationError:
        return None
    if kept.question != question or not _is_about(spec, kept):
        return None

    cases = {backend: case_of(spec, backend) for backend in {layout.backend for layout in kept.layouts}}

    def plan(place: int) -> Plan:
        layout = kept.layouts[place]
        case = cases[layout.backend]
        return plan_of(spec, case, layout, memory_of(case, layout))

    return Ranking(spec=spec, plans=Plans(kept.layouts, plan), **{name: getattr(kept, name) for name in _SAME})


def _is_about(spec: Spec, kept: _Kept) -> bool:
    """The layouts are of these GPUs and of this batch, and as many as were counted."""
    world, batch = spec.cluster.world_size, spec.job.global_batch_size
    return (
        kept.counts.ranked == len(kept.layouts)
        and isfinite(kept.elapsed_s)
        and (kept.safe is None or 0 <= kept.safe < len(kept.layouts))
        and {layout.backend for layout in kept.layouts} <= {*kept.searched_backends}
        and all(
            layout.world_size == world
            and layout.dp * layout.micro_batch_size * layout.gradient_accumulation_steps == batch
            for layout in kept.layouts
        )
    )
