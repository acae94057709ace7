"""The search: every legal layout, its memory, and the time of those that fit."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from topoplan.backends.mca import check_job, check_precision
from topoplan.backends.swift import check_model_type
from topoplan.backends.trainers import TRAINER_RULE, backends_of, trainer_refusal, trainers_of
from topoplan.engines.data_parallel.layouts import sharded_families
from topoplan.engines.data_parallel.rules import SHARDED_RULES
from topoplan.engines.data_parallel.step import sharded_time
from topoplan.engines.megatron.layouts import Broken, lighter_modes, offloaded, shapes, steps
from topoplan.engines.megatron.memory import ShapeStates, resident_excess_bytes, shape_states
from topoplan.engines.megatron.rules import MODE_RULES, RULES, STEP_RULES
from topoplan.engines.megatron.step import PipelineWork, StepTerms, pipeline_work, step_terms
from topoplan.errors import InputError, LayoutError, ModelError, SpecError, listed
from topoplan.layout.forms import keys_of
from topoplan.layout.layout import BACKENDS, SHARDED_BACKENDS, USUAL, Layout, Recompute, changed
from topoplan.operators.flops import ends_in_layers
from topoplan.operators.padding import tokens_per_step
from topoplan.planner.case import case_of
from topoplan.planner.crossing import crossings
from topoplan.planner.explain import alternatives, memory_rejection
from topoplan.planner.lengths import data_notes
from topoplan.planner.plan import Counts, Memory, Plan, Plans, Ranking, Rejection
from topoplan.planner.predict import check_backend, memory_of, plan_of
from topoplan.planner.rank import ranked
from topoplan.specs.case import Case
from topoplan.specs.spec import Spec
from topoplan.units import GIB

KEPT_MISSES = 5
"""Layouts over the card's memory that are kept with a fix, when not all are asked for."""

_Degrees = tuple[int | str, ...]
_Fit = tuple[Layout, Memory]
_Miss = tuple[float, int, Layout]
"""What it is sorted by, a running number that keeps the order stable, and the layout."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A layout that fits and is ranked."""

    layout: Layout
    memory: Memory
    step_s: float
    terms: StepTerms | None
    """None where the backend splits data alone."""
    tokens_per_s_per_gpu: float

    @property
    def id(self) -> str:
        """Short, stable name of the layout."""
        return self.layout.id


Progress = Callable[[int, int], bool | None]
"""Called with the shapes searched so far and their number. The search ends with what it has when it returns True."""


def rank(
    spec: Spec,
    *,
    progress: Progress | None = None,
    keep_rejected: bool = False,
) -> Ranking:
    """Search all layouts of a spec: of the backends that it names, or of those of `usual_backends`.

    Ranked is only what some trainer can run as planned, or the spec's where it names one.

    Of layouts that differ only in their pipeline split, in what they recompute or in how much of the optimizer they
    offload, the fastest that fits is ranked: the others would be slower and differ in nothing else.
    `keep_rejected` keeps every layout that breaks a rule or does not fit where no other of its degrees and micro batch
    does either, else only the nearest misses and one example of each broken rule.
    The result may have no plan; its `rejected` then says what would fit.

    Raises LayoutError when no layout is even legal, ModelError or SpecError for a job that none of the trainers can
    run.
    """
    started = time.perf_counter()
    able, unable = _able(spec, spec.backends or usual_backends(spec))
    found = _Search(spec, keep_rejected=keep_rejected)
    families = [family for backend in able for family in _families(spec, backend)]
    searched = len(families)
    for position, (layouts, broken) in enumerate(families):
        if progress is not None and progress(position, len(families)):
            searched = position
            break
        if broken:
            found.refuse(layouts, broken)
        elif layouts[0].is_megatron:
            found.search(layouts)
        else:
            found.choose(layouts)
    else:
        if progress is not None:
            progress(len(families), len(families))
    share = searched / len(families) if families else 1.0
    ranking = found.ranking(time.perf_counter() - started, share, able, unable)
    if ranking.plans or share < 1.0 or spec.backends or "backend" in spec.job.pin:
        return ranking
    return replace(ranking, crossings=tuple(_elsewhere(spec, [*able, *unable])))


def usual_backends(spec: Spec) -> tuple[str, ...]:
    """What a search looks at when nobody says: the pinned one, or Megatron for what it trains, else the others.

    Keys that only others have are pinned for these.
    """
    if "backend" in spec.job.pin:
        return (spec.job.pin["backend"],)
    megatron, *others = backends_of(spec.trainer, spec.job.finetuning)
    if not others:
        return (megatron,)
    if foreign := _foreign_pins(spec, megatron):
        return tuple(other for other in others if foreign.keys() <= {*keys_of(other)}) or tuple(others)
    if spec.job.finetuning == "lora":
        # Adapters leave little for a pipeline to split; Megatron is for models that nothing else has room for.
        return tuple(others)
    try:
        _check_backend(spec, megatron)
    except (ModelError, SpecError):
        is_theirs = spec.job.finetuning != "full" or spec.job.pure_bf16 or spec.job.optimizer != "adamw"
        return tuple(others) if is_theirs else (megatron,)
    return (megatron,)


def _able(spec: Spec, backends: Sequence[str]) -> tuple[list[str], dict[str, InputError]]:
    """Those of several backends that can run the job at all, and what is in the way of the others.

    Raises what the first one says if none can.
    """
    able: list[str] = []
    unable: dict[str, InputError] = {}
    for backend in backends:
        try:
            _check_backend(spec, backend)
            able.append(backend)
        except (ModelError, SpecError) as error:
            unable[backend] = error
    if not able:
        raise next(iter(unable.values()))
    return able, unable


def _elsewhere(spec: Spec, searched: Sequence[str]) -> Iterator[str]:
    """What fits under the backends that were not searched, where nothing does under those that were."""
    every = backends_of(spec.trainer, spec.job.finetuning)
    others = tuple(backend for backend in every if backend not in searched)
    if not others:
        return
    try:
        plans = rank(replace(spec, backends=others)).plans
    except (LayoutError, ModelError, SpecError):
        return
    if plans:
        yield (
            f"--backend {plans[0].layout.backend} has plans that do: {plans[0].id} takes"
            f" {plans[0].memory.device_bytes / GIB:.1f} GiB a GPU"
        )


def _check_backend(spec: Spec, backend: str) -> None:
    """Raise ModelError or SpecError for a job that no layout of a backend would help."""
    if not trainers_of(backend, spec.trainer):
        raise SpecError(
            f"{spec.trainer} has no backend {backend}", expected=f"expected {' or '.join(backends_of(spec.trainer))}"
        )
    for key, value in _foreign_pins(spec, backend).items():
        raise SpecError(
            f"pin {key} {str(value).lower()} with backend {backend}",
            where=spec.path or "",
            remedy=f"take backend {listed([one for one in BACKENDS if key in keys_of(one)], 'or')}",
        )
    if backend == "mca":
        check_job(spec)
    else:
        check_backend(spec, backend)
        if backend == "megatron" and spec.job.finetuning == "lora":
            check_model_type(spec.model)
    check_precision(spec)


def _foreign_pins(spec: Spec, backend: str) -> dict[str, Any]:
    """Pins of what layouts of a backend do not have; what tells those that split data alone apart, rules look at."""
    known = {key for one in (SHARDED_BACKENDS if backend in SHARDED_BACKENDS else (backend,)) for key in keys_of(one)}
    return {key: value for key, value in spec.job.pin.items() if key not in known and value != USUAL[key]}


def _families(spec: Spec, backend: str) -> Iterator[tuple[tuple[Layout, ...], Broken | None]]:
    if backend in SHARDED_BACKENDS:
        return sharded_families(spec, backend)
    return shapes(spec, backend, ends_in_layers(spec.model, spec.job))


class _Search:
    """What a search has met so far."""

    def __init__(self, spec: Spec, *, keep_rejected: bool) -> None:
        self.spec, self.keep_rejected = spec, keep_rejected
        self.cases: dict[str, Case] = {}
        self.plans: list[_Found] = []
        self.tokens_per_gpu = tokens_per_step(spec.job) / spec.cluster.world_size
        self.illegal: list[Rejection] = []
        self.examples: dict[str, Rejection] = {}
        self.seen_rules: Counter[str] = Counter()
        self.refused: dict[str, Rejection] = {}
        """The simplest layout of each backend that breaks a rule."""
        self.legal: set[str] = set()
        """Backends of which a legal layout was met."""
        self.over: list[_Miss] = []
        self.nearest: dict[_Degrees, _Miss] = {}
        self.simplest: dict[_Degrees, _Miss] = {}
        self.out_of_memory = self.dominated = self.misses = 0
        self.states: dict[str | None, ShapeStates] = {}
        """Of the shape at hand, by pipeline split."""

    def refuse(self, layouts: Sequence[Layout], broken: Broken, times: int = 1) -> None:
        """Layouts that break one and the same rule, each of which stands for `times` layouts."""
        rule, equation = broken
        self.seen_rules[rule.name] += len(layouts) * times
        for layout in layouts if self.keep_rejected else layouts[:1]:
            rejection = Rejection(layout=layout, rule=rule.name, reason=equation, fix=rule.fix)
            simplest = self.refused.setdefault(layout.backend, rejection)
            if layout.complexity < simplest.layout.complexity:
                self.refused[layout.backend] = rejection
            if self.keep_rejected:
                self.illegal.append(rejection)
            else:
                example = self.examples.setdefault(rule.name, rejection)
                if layout.complexity < example.layout.complexity:
                    self.examples[rule.name] = rejection

    def search(self, shape: tuple[Layout, ...]) -> None:
        """All layouts of a legal shape, given with each of its pipeline splits."""
        self.states = {layout.pipeline_layout: shape_states(self._case(layout), layout) for layout in shape}
        if not self.keep_rejected and all(self._is_hopeless(layout) for layout in shape):
            self._count_misses(shape)
            return
        for layouts, modes, broken in steps(self.spec, shape):
            if broken:
                self.refuse(layouts, broken)
            else:
                self._choose(layouts, modes)

    def _case(self, layout: Layout) -> Case:
        if layout.backend not in self.cases:
            self.cases[layout.backend] = case_of(self.spec, layout.backend)
        return self.cases[layout.backend]

    def _memory(self, layout: Layout) -> Memory:
        return memory_of(self._case(layout), layout, states=self.states[layout.pipeline_layout], until_over=True)

    def _is_hopeless(self, layout: Layout) -> bool:
        """Weights, gradients and optimizer alone are over the card, as much of it as may be offloaded."""
        least = [layout, *offloaded(self.spec, layout)[-1:]][-1]
        return resident_excess_bytes(self._case(least), least, self.states[layout.pipeline_layout]) > 0.0

    def _count_misses(self, shape: tuple[Layout, ...]) -> None:
        """A hopeless shape: its simplest layouts stand for the others, which need more."""
        first = True
        for (layout,), modes, broken in steps(self.spec, shape[:1]):
            if broken:
                self.refuse([layout], broken, times=len(shape))
                continue
            self.out_of_memory += len(shape) * (1 + len(modes))
            for one in (layout, *(changed(layout, recompute=mode) for mode in modes)) if first else ():
                self._miss(one, self._memory(one))
            first = False

    def _choose(self, layouts: tuple[Layout, ...], modes: tuple[Recompute, ...]) -> None:
        """Keep the fastest of some legal layouts that differ in pipeline split and recompute mode alone.

        Where a split fits without recomputation, other modes are of use only with less offload.
        """
        number = len(layouts) * (1 + len(modes))
        if broken := trainer_refusal(self.spec, layouts[0]):
            self.refuse(layouts, broken, times=1 + len(modes))
            return
        found: list[_Fit] = []
        missed: list[_Fit] = []
        for layout in layouts:
            memory = self._memory(layout)
            if memory.fits and layout.recompute.granularity == "none":
                found.append((layout, memory))
                continue
            enough = math.inf
            for one in (layout, *(changed(layout, recompute=mode) for mode in modes)):
                needed = memory if one is layout else self._memory(one)
                fitting = self._fitting(one, needed, enough)
                found += fitting
                if not fitting:
                    missed.append((one, needed))
                elif one.recompute.granularity == "none":
                    enough = fitting[0][0].optimizer_offload_fraction
        if found:
            self.dominated += number - 1
            self.plans.append(self._fastest(found))
        else:
            self.out_of_memory += number
            for miss in missed:
                self._miss(*miss)

    def _fastest(self, fits: list[_Fit]) -> _Found:
        """The fastest; of equally fast ones, the one that needs least.

        The schedule of a layout is worked out only where what its busiest rank has to do does not decide already.
        """
        rivals = [(pipeline_work(self._case(layout), layout), layout, memory) for layout, memory in fits]
        rivals.sort(key=lambda rival: rival[0].busiest_s)
        best = self._found(*rivals[0])
        for work, layout, memory in rivals[1:]:
            if work.busiest_s > best.step_s:
                break
            best = min(best, self._found(work, layout, memory), key=_slowness)
        return best

    def _found(self, work: PipelineWork, layout: Layout, memory: Memory) -> _Found:
        terms = step_terms(self._case(layout), layout, work)
        return _Found(layout, memory, terms.step_s, terms, self.tokens_per_gpu / terms.step_s)

    def choose(self, family: tuple[Layout, ...]) -> None:
        """Keep the fastest that fits of legal layouts that differ in checkpointing, offload and the allocator alone."""
        runnable = []
        for layout in family:
            if broken := trainer_refusal(self.spec, layout):
                self.refuse([layout], broken)
            else:
                runnable.append(layout)
        timed = [
            (sharded_time(self._case(layout), layout).step_s, place, layout) for place, layout in enumerate(runnable)
        ]
        missed: list[_Fit] = []
        for step_s, _, layout in sorted(timed, key=lambda one: one[:2]):
            memory = memory_of(self._case(layout), layout)
            if memory.fits:
                self.dominated += len(runnable) - 1
                self.plans.append(_Found(layout, memory, step_s, None, self.tokens_per_gpu / step_s))
                return
            missed.append((layout, memory))
        self.out_of_memory += len(runnable)
        for miss in missed:
            self._miss(*miss)

    def _fitting(self, layout: Layout, memory: Memory, enough: float) -> list[_Fit]:
        """The layout if it fits, or what it takes for it to fit; more than one where only their times can tell.

        Of two that recompute as much the one with less of its optimizer in host memory is faster, and of two with as
        much there the one that recomputes fewer layers: a larger share has to pay in fewer layers. From the share
        `enough` on, the layout would fit without recomputation.
        """
        if not memory.fits and memory.excess_without_optimizer_bytes > 0.0:
            return []
        fitting: list[_Fit] = []
        modes = lighter_modes(self.spec, layout)
        if memory.fits:
            modes, fit = self._lightest(layout, modes, memory)
            fitting.append(fit)
        shares = [one for one in offloaded(self.spec, layout) if one.optimizer_offload_fraction < enough]
        # The card holds least with the largest share.
        if not modes or not shares or self._memory(changed(shares[-1], recompute=modes[-1])).excess_bytes > 0.0:
            return fitting
        for one in shares:
            needed = self._memory(changed(one, recompute=modes[-1]))
            if needed.fits:
                modes, fit = self._lightest(one, modes, needed)
                fitting.append(fit)
                if not modes:
                    break
        return fitting

    def _lightest(
        self, layout: Layout, modes: tuple[Recompute, ...], memory: Memory
    ) -> tuple[tuple[Recompute, ...], _Fit]:
        """A layout under the first of its `lighter_modes` with which it fits, behind the modes with which it does not.

        It fits with the last one, in `memory`. All behind one that fits do so too: what they keep shrinks, and what the
        backward of a recomputed layer needs on top is at its most when all are.
        """
        last = len(modes) - 1
        needs: dict[int, _Fit] = {last: (changed(layout, recompute=modes[last]), memory)}

        def fits(place: int) -> bool:
            one = changed(layout, recompute=modes[place])
            needs[place] = one, self._memory(one)
            return needs[place][1].fits

        lightest = bisect_left(range(last), True, key=fits)
        return modes[:lightest], needs[lightest]

    def _miss(self, layout: Layout, memory: Memory) -> None:
        """A legal layout that does not fit, nor does any other of its pipeline split and recompute mode alone."""
        self.misses += 1
        self.legal.add(layout.backend)
        excess = max(0.0, memory.excess_bytes) + memory.host_excess_bytes / self.spec.cluster.gpus_per_node
        if self.keep_rejected:
            self.over.append((excess, self.misses, layout))
            return
        degrees = (
            layout.backend,
            layout.tp,
            layout.pp,
            layout.cp,
            layout.ep,
            layout.etp,
            layout.zero_stage,
            layout.ulysses,
        )
        _keep_least(self.nearest, degrees, (excess, self.misses, layout))
        effort = 100.0 * layout.complexity + layout.micro_batch_size + (not layout.sequence_parallel)
        _keep_least(self.simplest, degrees, (effort, self.misses, layout))

    def ranking(
        self, elapsed_s: float, searched: float, backends: Sequence[str], unable: Mapping[str, InputError]
    ) -> Ranking:
        """What was found, sorted. Raises LayoutError when nothing legal was met in a search that was not stopped."""
        plans, illegal, over = self.plans, self.illegal, self.over
        if not self.keep_rejected:
            # In the order of the rules: what people try first, a tp beyond the node or an odd pp, leads.
            rules = (*RULES, *SHARDED_RULES, TRAINER_RULE)
            illegal = [self.examples[rule.name] for rule in rules if rule.name in self.examples]
            # With plans to choose from, what people try first is worth a reason; without, what nearly fits.
            over = list((self.simplest if plans else self.nearest).values())
        refused = self.seen_rules.total()
        legal = len(plans) + self.dominated + self.out_of_memory
        if not legal and searched == 1.0:
            raise _nothing_legal(self.spec, illegal, self.seen_rules)
        over.sort(key=lambda miss: miss[:2])
        kept = over if self.keep_rejected else over[:KEPT_MISSES]
        order = ranked(plans)

        def plan(place: int) -> Plan:
            one = order[place]
            return plan_of(self.spec, self._case(one.layout), one.layout, one.memory, one.terms)

        in_order = Plans(len(order), plan)
        illegal_backends = {backend: why for backend, why in self.refused.items() if backend not in self.legal}
        return Ranking(
            spec=self.spec,
            plans=in_order,
            counts=Counts(
                candidates=refused + legal,
                illegal=refused,
                out_of_memory=self.out_of_memory,
                dominated=self.dominated,
                ranked=len(plans),
            ),
            elapsed_s=elapsed_s,
            searched=searched,
            rejected=tuple([memory_rejection(self.spec, layout) for _, _, layout in kept] + illegal),
            notes=tuple(alternatives(order)),
            crossings=tuple(crossings(self.spec, order, in_order, backends, illegal_backends, unable)),
            data_notes=data_notes(self.spec, in_order[0]) if order else (),
        )


def _slowness(one: _Found) -> tuple[float, float, str]:
    """Sorts the fastest first, then the one that needs least."""
    return one.step_s, one.memory.device_bytes, one.id


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
    name = max(seen, key=lambda rule: (rule == TRAINER_RULE.name, rule in last, seen[rule]))
    example = next(rejection for rejection in illegal if rejection.rule == name)
    return LayoutError(
        f"no layout is legal; the nearest, {example.layout.id}, breaks rule {name}: {example.reason}",
        where=spec.path or "",
        remedy=example.fix,
    )
