"""The search: every legal layout, its memory, and the time of those that fit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from topoplan.backends.mca import check_finetuning, check_job, check_precision
from topoplan.errors import LayoutError
from topoplan.layout.enumerate import shapes, steps
from topoplan.layout.layout import Layout
from topoplan.layout.rules import MODE_RULES, RULES, STEP_RULES, Rule
from topoplan.planner.explain import alternatives, memory_rejection
from topoplan.planner.lengths import data_notes
from topoplan.planner.plan import Counts, Plan, Ranking, Rejection
from topoplan.planner.predict import memory_of, plan_of
from topoplan.planner.rank import ranked
from topoplan.specs.spec import Spec

KEPT_MISSES = 5
"""Layouts over the card's memory that are kept with a fix, when not all are asked for."""

_Degrees = tuple[int, ...]
_Miss = tuple[float, int, Layout]
"""What it is sorted by, a running number that keeps the order stable, and the layout."""

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
        check_finetuning(spec)
        check_precision(spec)

    illegal: list[Rejection] = []
    examples: dict[str, Rejection] = {}
    seen_rules: Counter[str] = Counter()
    plans: list[Plan] = []
    over: list[_Miss] = []
    nearest: dict[_Degrees, _Miss] = {}
    simplest: dict[_Degrees, _Miss] = {}
    candidates = out_of_memory = 0

    def refuse(layout: Layout, broken: tuple[Rule, str]) -> None:
        rule, equation = broken
        seen_rules[rule.name] += 1
        rejection = Rejection(layout=layout, rule=rule.name, reason=equation, fix=rule.fix)
        if keep_rejected:
            illegal.append(rejection)
        else:
            example = examples.setdefault(rule.name, rejection)
            if layout.complexity < example.layout.complexity:
                examples[rule.name] = rejection

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
            excess = memory.excess_bytes
            if keep_rejected:
                over.append((excess, out_of_memory, layout))
                continue
            degrees = (layout.tp, layout.pp, layout.cp, layout.ep, layout.etp)
            _keep_least(nearest, degrees, (excess, out_of_memory, layout))
            effort = 100.0 * layout.complexity + layout.micro_batch_size + (not layout.sequence_parallel)
            _keep_least(simplest, degrees, (effort, out_of_memory, layout))

    if not keep_rejected:
        # In the order of the rules: what people try first, a tp beyond the node or a pp that does not divide, leads.
        illegal = [examples[rule.name] for rule in RULES if rule.name in examples]
    legal = len(plans) + out_of_memory
    if not legal:
        raise _nothing_legal(spec, illegal, seen_rules)
    if progress is not None:
        progress(len(all_shapes), len(all_shapes))
    order = ranked(plans)
    if not keep_rejected:
        # With plans to choose from, what people try first is worth a reason; without, what is closest to fitting.
        over = list((simplest if plans else nearest).values())
    over.sort(key=lambda miss: miss[:2])
    kept = over if keep_rejected else over[:KEPT_MISSES]
    rejected = [memory_rejection(spec, layout) for _, _, layout in kept] + illegal
    return Ranking(
        spec=spec,
        plans=tuple(order),
        counts=Counts(
            candidates=candidates, illegal=candidates - legal, out_of_memory=out_of_memory, ranked=len(plans)
        ),
        elapsed_s=time.perf_counter() - started,
        rejected=tuple(rejected),
        notes=tuple(alternatives(order)),
        data_notes=data_notes(spec, order[0]) if order else (),
    )


def _keep_least(misses: dict[_Degrees, _Miss], degrees: _Degrees, miss: _Miss) -> None:
    """Keep one miss for each set of degrees, the one that comes first."""
    if degrees not in misses or miss[:2] < misses[degrees][:2]:
        misses[degrees] = miss


def _nothing_legal(spec: Spec, illegal: list[Rejection], seen: Counter[str]) -> LayoutError:
    """The rule that closes the last door: of the rules met, the one that most candidates got as far as."""
    if not illegal:
        pinned = ", ".join(f"{key} {value}" for key, value in spec.job.pin.items())
        return LayoutError(
            f"no layout of {spec.cluster.world_size} GPUs has {pinned or 'any degrees'}",
            where=spec.path or "",
            remedy="loosen the pin",
        )
    last = {rule.name for rule in STEP_RULES + MODE_RULES}
    name = max(seen, key=lambda rule: (rule in last, seen[rule]))
    example = next(rejection for rejection in illegal if rejection.rule == name)
    return LayoutError(
        f"no layout is legal; the nearest, {example.layout.id}, breaks rule {name}: {example.reason}",
        where=spec.path or "",
        remedy=example.fix,
    )
