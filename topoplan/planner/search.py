"""The search: every legal layout, its memory, and the time of those that fit."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable

from topoplan.backends.mca import check_job, check_precision
from topoplan.errors import LayoutError
from topoplan.layout.enumerate import shapes, steps
from topoplan.layout.layout import Layout
from topoplan.layout.rules import Rule
from topoplan.planner.explain import alternatives, memory_rejection
from topoplan.planner.plan import Counts, Plan, Ranking, Rejection
from topoplan.planner.predict import memory_of, plan_of
from topoplan.planner.rank import ranked
from topoplan.specs.spec import Spec

NEAREST_MISSES = 5
"""Layouts over the card's memory that are kept with a fix, when not all are asked for."""

Progress = Callable[[int, int], None]
"""Called with the shapes searched so far and their number."""


def rank(spec: Spec, *, progress: Progress | None = None, keep_rejected: bool = False) -> Ranking:
    """Search all layouts of a spec.

    `keep_rejected` keeps every layout that is out, else only the nearest misses and one example of each broken rule.
    The result may have no plan; its `rejected` then says what would fit.

    Raises LayoutError when no layout is even legal, ModelError or SpecError for a job that the trainer cannot run.
    """
    started = time.perf_counter()
    backend = spec.job.pin.get("backend", "mca")
    if backend == "mca":
        check_job(spec)
    else:
        check_precision(spec)

    illegal: list[Rejection] = []
    seen_rules: Counter[str] = Counter()
    plans: list[Plan] = []
    over: list[Layout] = []
    misses: list[tuple[float, int, Layout]] = []
    candidates = out_of_memory = 0

    def refuse(layout: Layout, broken: tuple[Rule, str]) -> None:
        rule, equation = broken
        seen_rules[rule.name] += 1
        if keep_rejected or seen_rules[rule.name] == 1:
            illegal.append(Rejection(layout=layout, rule=rule.name, reason=equation, fix=rule.fix))

    all_shapes = list(shapes(spec, backend))
    for position, (shape, broken_shape) in enumerate(all_shapes):
        if progress is not None:
            progress(position, len(all_shapes))
        if broken_shape:
            candidates += 1
            refuse(shape, broken_shape)
            continue
        for layout, broken in steps(spec, shape):
            candidates += 1
            if broken:
                refuse(layout, broken)
                continue
            memory = memory_of(spec, layout)
            if memory.fits:
                plans.append(plan_of(spec, layout, memory))
                continue
            out_of_memory += 1
            if keep_rejected:
                over.append(layout)
            excess = memory.device_bytes + memory.margin_bytes - memory.capacity_bytes
            # A max-heap of the smallest excesses; the running number breaks ties and keeps the order stable.
            item = (-excess, -out_of_memory, layout)
            if len(misses) < NEAREST_MISSES:
                heapq.heappush(misses, item)
            else:
                heapq.heappushpop(misses, item)

    legal = len(plans) + out_of_memory
    if not legal:
        raise _nothing_legal(spec, illegal, seen_rules)
    if progress is not None:
        progress(len(all_shapes), len(all_shapes))
    order = ranked(plans)
    nearest = over if keep_rejected else [layout for _, _, layout in sorted(misses, reverse=True)]
    rejected = [memory_rejection(spec, layout) for layout in nearest] + illegal
    return Ranking(
        spec=spec,
        plans=tuple(order),
        counts=Counts(
            candidates=candidates, illegal=candidates - legal, out_of_memory=out_of_memory, ranked=len(plans)
        ),
        elapsed_s=time.perf_counter() - started,
        rejected=tuple(rejected),
        notes=tuple(alternatives(order)),
    )


def _nothing_legal(spec: Spec, illegal: list[Rejection], seen: Counter[str]) -> LayoutError:
    """The rule that closes the last door: of the rules met, the one that most candidates got as far as."""
    if not illegal:
        pinned = ", ".join(f"{key} {value}" for key, value in spec.job.pin.items())
        return LayoutError(
            f"no layout of {spec.cluster.world_size} GPUs has {pinned or 'any degrees'}",
            where=spec.path or "",
            remedy="loosen the pin",
        )
    last = {"batch", "interleaving", "sequence-parallel", "sequence-length"}
    name = max(seen, key=lambda rule: (rule in last, seen[rule]))
    example = next(rejection for rejection in illegal if rejection.rule == name)
    return LayoutError(
        f"no layout is legal; the nearest, {example.layout.id}, breaks rule {name}: {example.reason}",
        where=spec.path or "",
        remedy=example.fix,
    )


