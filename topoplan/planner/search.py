"""The search: every legal layout of every backend, its memory, and the time of those that fit."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from topoplan.engines.engine import Family, Fastest, Outcome, Refused, TooLarge, TooSlow
from topoplan.engines.registry import ENGINES, engine_of
from topoplan.engines.rule import Broken
from topoplan.errors import LayoutError
from topoplan.layout.layout import BACKENDS, Layout
from topoplan.operators.padding import tokens_per_step
from topoplan.planner.case import cases_of, left_out
from topoplan.planner.explain import alternatives, crossings, memory_rejection
from topoplan.planner.lengths import data_notes
from topoplan.planner.plan import Candidate, Counts, Memory, Plan, Plans, Ranking, Rejection
from topoplan.planner.predict import memory_of, plan_of
from topoplan.planner.rank import TIE, first_safe, has_room, is_safe, on_smaller_card, ranked, with_variant, worth
from topoplan.specs.case import Case
from topoplan.specs.spec import Spec
from topoplan.trainers.refusal import Refusal
from topoplan.trainers.registry import (
    TRAINER_RULE,
    TrainerChoice,
    broken_by,
    caveats_of,
    choose_trainer,
    is_for_others,
    stopped_by,
)
from topoplan.trainers.trainer import Trainer

KEPT_MISSES = 5
"""Number of layouts over the card's memory that are kept with a fix, unless all are asked for."""

_Degrees = tuple[int | str, ...]
_Miss = tuple[float, int, Layout]
"""(sort key, running number that keeps the order stable, layout)."""


Progress = Callable[[int, int], bool | None]
"""Called with the number of families searched so far and their total; the search stops early if it returns True."""


def rank(
    spec: Spec,
    *,
    progress: Progress | None = None,
    keep_rejected: bool = False,
    best_only: bool = False,
    with_room: bool = False,
) -> Ranking:
    """Search all layouts of a spec, for the backends that it names or else for those of `usual_backends`.

    Only layouts that some trainer can run as planned are ranked; if the spec names a trainer, it must be that one.

    Of layouts that differ only in their pipeline split, in what they recompute or in how much of the optimizer they
    offload, the fastest that fits is ranked, since the others are slower and differ in nothing else; one of the others
    is ranked too if it is the fastest of all layouts that leave memory to spare and have no caveat. `keep_rejected`
    keeps every layout that breaks a rule, and every layout that does not fit if nothing else with its degrees and
    micro-batch does; otherwise only the nearest misses and one example of each broken rule are kept. `best_only` skips
    what is certain not to lead: the first plan is unaffected, but other plans, counts and notes are incomplete.
    `with_room` also skips what is certain to be behind the best plan that leaves memory to spare, which is unaffected.
    The result may have no plan; `rejected` then says what would fit.

    Raises LayoutError if no layout is legal, ModelError or SpecError for a job that no trainer can run.
    """
    started = time.perf_counter()
    cases, unable = cases_of(spec)
    found = _Search(spec, cases, keep_rejected=keep_rejected, with_room=with_room)
    limit = found.limit_s if best_only else lambda: math.inf
    families = [
        (backend, *family) for backend, case in cases.items() for family in engine_of(backend).families(case, backend)
    ]
    if best_only:
        families.sort(key=lambda one: 0.0 if one[2] else engine_of(one[0]).search_priority(cases[one[0]], one[1]))
    searched = len(families)
    for position, (backend, layouts, broken) in enumerate(families):
        if progress is not None and progress(position, len(families)):
            searched = position
            break
        if broken:
            found.add(Refused(layouts, broken), layouts)
            continue
        engine, case = engine_of(backend), cases[backend]
        for outcome in engine.outcomes(case, layouts, found.refusal, limit, every=keep_rejected):
            found.add(outcome, layouts)
    else:
        if with_room or not best_only:
            found.add_variant_with_room()
        if progress is not None:
            progress(len(families), len(families))
    share = searched / len(families) if families else 1.0
    ranking = found.ranking(time.perf_counter() - started, share, unable)
    return replace(ranking, searched_backends=(*cases, *unable))


class _Search:
    def __init__(self, spec: Spec, cases: Mapping[str, Case], *, keep_rejected: bool, with_room: bool) -> None:
        self.spec, self.cases, self.keep_rejected, self.with_room = spec, cases, keep_rejected, with_room
        self.plans: list[Candidate] = []
        self.families: list[Family] = []
        """The family of each plan."""
        self.variant: Candidate | None = None
        """A slower variant of a plan that is ranked too, because it leaves memory to spare."""
        self.illegal: list[Rejection] = []
        self.examples: dict[str, Rejection] = {}
        """The simplest layout that breaks each rule."""
        self.seen_rules: Counter[str] = Counter()
        self.refused: dict[str, Rejection] = {}
        """The simplest layout of each backend that breaks a rule."""
        self.legal: set[str] = set()
        """Backends with a legal layout that does not fit."""
        self.over: list[_Miss] = []
        self.nearest: dict[_Degrees, _Miss] = {}
        self.simplest: dict[_Degrees, _Miss] = {}
        self.verdicts: dict[Layout, TrainerChoice] = {}
        self.smaller: dict[str, Case] = {}
        """The cases on a smaller card, as far as they are needed."""
        self.out_of_memory = self.dominated = self.misses = 0
        self.tokens_per_gpu = tokens_per_step(spec.job) / spec.cluster.world_size
        """Tokens per GPU in a step."""
        self.fastest = 0.0
        """Tokens/s per GPU of the best plan so far by `worth`; with `with_room`, of the best one with memory to
        spare."""

    def refusal(self, layout: Layout) -> Broken | None:
        """Return why no trainer can run a layout, or the fault that it has to avoid; otherwise None."""
        is_others = is_for_others(self.spec, layout.backend)
        broken = None if is_others else broken_by(self.spec, layout, self.verdict(layout))
        if broken is None and self.spec.avoids_faults:
            return stopped_by(self.spec, layout, self.verdict(layout).name)
        return broken

    def limit_s(self) -> float:
        """Return the step time in seconds above which a layout is behind the best one, whatever else speaks for it."""
        return self.tokens_per_gpu / (self.fastest * (1.0 - TIE)) if self.fastest else math.inf

    def verdict(self, layout: Layout) -> TrainerChoice:
        """Return the trainers' verdict on a layout, which is computed once."""
        known = self.verdicts.get(layout)
        if known is None:
            known = self.verdicts[layout] = choose_trainer(self.spec, layout, self.spec.trainer)
        return known

    def trainer_of(self, layout: Layout) -> Trainer | None:
        """Return the trainer that runs a layout, or None."""
        return self.verdict(layout).trainer

    def add(self, outcome: Outcome, family: Family) -> None:
        """Count an outcome's candidates, and keep those that are ranked or worth naming."""
        match outcome:
            case Refused():
                self._refuse(outcome)
            case Fastest():
                self.dominated += outcome.candidates - 1
                self.plans.append(plan := self._candidate(outcome))
                self.families.append(family)
                if not self.with_room or has_room(plan):
                    self.fastest = max(self.fastest, worth(plan))
            case TooSlow():
                self.dominated += outcome.candidates
            case TooLarge():
                self.out_of_memory += outcome.candidates
                for layout in outcome.layouts:
                    self._miss(layout, outcome.memory)

    def _candidate(self, fastest: Fastest) -> Candidate:
        caveats = caveats_of(self.spec, fastest.layout, self.trainer_of(fastest.layout))
        return Candidate(fastest.layout, fastest.memory, self.tokens_per_gpu / fastest.step_s, caveats)

    def add_variant_with_room(self) -> None:
        """Find the fastest layout that leaves memory to spare, if it is a slower variant of a plan.

        Families are searched again on a smaller card, the fastest first, until no plan of the next one is faster than
        the fastest safe plan. If only layouts with a caveat leave room, and no plan does, it is the fastest of them.
        """
        safe = known = max(filter(is_safe, self.plans), key=_speed, default=None)
        fallback: Candidate | None = None
        searched: set[int] = set()
        is_missing = not any(map(has_room, self.plans))
        for plan, family in sorted(zip(self.plans, self.families, strict=True), key=lambda pair: -_speed(pair[0])):
            if safe is not None and _speed(plan) <= _speed(safe):
                break
            if has_room(plan) or id(family) in searched:
                continue
            searched.add(id(family))
            for one in self._with_room(family, math.inf if safe is None else self.tokens_per_gpu / _speed(safe)):
                if one.caveats:
                    fallback = max(fallback or one, one, key=_speed)
                else:
                    safe = max(safe or one, one, key=_speed)
        best = safe or (fallback if is_missing else None)
        if best is not None and best is not known:
            self.variant = best._replace(memory=memory_of(self.cases[best.layout.backend], best.layout))
            self.dominated -= 1

    def _with_room(self, family: Family, limit_s: float) -> Iterator[Candidate]:
        """Yield the fastest layouts of a family that leave memory to spare; their memory is that on a smaller card."""
        backend = family[0].backend
        case = self.smaller[backend] = self.smaller.get(backend) or on_smaller_card(self.cases[backend])
        for outcome in engine_of(backend).outcomes(case, family, self.refusal, lambda: limit_s, every=False):
            if isinstance(outcome, Fastest):
                yield self._candidate(outcome)

    def _refuse(self, refused: Refused) -> None:
        """Count layouts that break the same rule, and keep examples."""
        rule, equation, fix = refused.broken
        self.seen_rules[rule] += len(refused.layouts) * refused.times
        for layout in refused.layouts if self.keep_rejected else refused.layouts[:1]:
            rejection = Rejection(layout=layout, rule=rule, reason=equation, fix=fix)
            _keep_simplest(self.refused, layout.backend, rejection)
            if self.keep_rejected:
                self.illegal.append(rejection)
            else:
                _keep_simplest(self.examples, rule, rejection)

    def _miss(self, layout: Layout, memory_of: Callable[[Layout], Memory]) -> None:
        """Record a legal layout that does not fit, like all of its family; beside plans, only the simplest are kept."""
        self.misses += 1
        self.legal.add(layout.backend)
        degrees = (layout.backend, *(getattr(layout, key) for key in engine_of(layout.backend).miss_keys))
        effort = 100.0 * layout.complexity + layout.micro_batch_size + (not layout.sequence_parallel)
        _keep_least(self.simplest, degrees, (effort, self.misses, layout))
        if self.plans and not self.keep_rejected:
            return
        memory = memory_of(layout)
        excess = max(0.0, memory.excess_bytes) + memory.host_excess_bytes / self.spec.cluster.gpus_per_node
        if self.keep_rejected:
            self.over.append((excess, self.misses, layout))
        else:
            _keep_least(self.nearest, degrees, (excess, self.misses, layout))

    def ranking(self, elapsed_s: float, searched: float, unable: Mapping[str, Refusal]) -> Ranking:
        """Return what was found, sorted. Raises LayoutError if a complete search met nothing legal."""
        plans, illegal, over = self.plans, self.illegal, self.over
        if not self.keep_rejected:
            # In the order of the rules, so that what people try first comes first: a tp beyond the node or an odd pp.
            engines = dict.fromkeys(engine_of(backend) for backend in BACKENDS if backend in self.cases)
            rules = [rule.name for engine in engines for rule in engine.search_rules]
            illegal = [self.examples[rule] for rule in dict.fromkeys((*rules, TRAINER_RULE)) if rule in self.examples]
            # With plans to choose from, explain the layouts that people try first; without any, those that nearly fit.
            over = list((self.simplest if plans else self.nearest).values())
        order = ranked(plans) if self.variant is None else with_variant(ranked(plans), self.variant)
        counts = Counts(
            candidates=self.seen_rules.total() + len(order) + self.dominated + self.out_of_memory,
            illegal=self.seen_rules.total(),
            out_of_memory=self.out_of_memory,
            dominated=self.dominated,
            ranked=len(order),
        )
        if counts.candidates == counts.illegal and searched == 1.0:
            raise _nothing_legal(self.spec, illegal, self.seen_rules, {**left_out(self.spec), **unable})
        over.sort(key=lambda miss: miss[:2])
        kept = over if self.keep_rejected else over[:KEPT_MISSES]

        def plan(place: int) -> Plan:
            one = order[place]
            case = self.cases[one.layout.backend]
            return plan_of(self.spec, case, one.layout, one.memory, self.verdict(one.layout))

        in_order = Plans([one.layout for one in order], plan)
        illegal_backends = {backend: why for backend, why in self.refused.items() if backend not in self.legal}
        return Ranking(
            spec=self.spec,
            plans=in_order,
            counts=counts,
            elapsed_s=elapsed_s,
            safe=first_safe(order),
            searched=searched,
            rejected=tuple([memory_rejection(self.spec, layout) for _, _, layout in kept] + illegal),
            notes=tuple(alternatives(order, self.trainer_of)),
            crossings=tuple(
                crossings(order, in_order, list(self.cases), illegal_backends, unable, self.trainer_of),
            ),
            data_notes=data_notes(self.spec, in_order[0]) if order else (),
        )


def _speed(plan: Candidate) -> float:
    return plan.tokens_per_s_per_gpu


def _keep_simplest(kept: dict[str, Rejection], key: str, rejection: Rejection) -> None:
    other = kept.setdefault(key, rejection)
    if rejection.layout.complexity < other.layout.complexity:
        kept[key] = rejection


def _keep_least(misses: dict[_Degrees, _Miss], degrees: _Degrees, miss: _Miss) -> None:
    """Keep one miss for each set of degrees, the one that sorts first."""
    if degrees not in misses or miss[:2] < misses[degrees][:2]:
        misses[degrees] = miss


def _nothing_legal(
    spec: Spec, illegal: list[Rejection], seen: Counter[str], unable: Mapping[str, Refusal]
) -> LayoutError:
    """Return the error that names the decisive rule: of the rules met, the one that most candidates got as far as."""
    if not illegal:
        pinned = ", ".join(f"{key} {value}" for key, value in spec.job.pin.items())
        return LayoutError(
            f"no layout of {spec.cluster.world_size} GPUs has {pinned or 'any degrees'}",
            where=spec.path or "",
            remedy="loosen the pin",
        )
    last = {rule for engine in ENGINES for rule in engine.last_rules}
    name = max(seen, key=lambda rule: (rule == TRAINER_RULE, rule in last, seen[rule]))
    example = next(rejection for rejection in illegal if rejection.rule == name)
    return LayoutError(
        f"no layout is legal; the nearest, {example.layout.id}, breaks rule {name}: {example.reason}",
        where=spec.path or "",
        remedy="; ".join((example.fix, *(f"{backend} is ruled out: {why.what}" for backend, why in unable.items()))),
    )
