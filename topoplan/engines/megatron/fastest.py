"""The fastest layout of a shape that fits: what the search can leave out, since something else decides it.

Of layouts that differ in their pipeline split, in what they recompute or in how much of the optimizer is in host memory
alone, one is ranked. Recomputing more is slower and needs less memory; so does offloading more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

from topoplan.engines.engine import Behind, Family, Fastest, Limit, Outcome, Refusal, Refused, TooLarge
from topoplan.engines.megatron.layouts import lighter_modes, offloaded, steps
from topoplan.engines.megatron.memory import PassingOf, ShapeStates, predict_memory, resident_excess_bytes, shape_states
from topoplan.engines.megatron.microbatch import MicroBatch, micro_batch
from topoplan.engines.megatron.step import PipelineWork, optimizer_time, pipeline_work, step_terms
from topoplan.engines.prediction import Memory
from topoplan.layout.layout import Layout, Recompute, changed, recomputing
from topoplan.operators.shard import shard_of
from topoplan.specs.case import Case
from topoplan.specs.layout_parts import RECOMPUTE_MODULES

_Fit = tuple[Layout, Memory]
_DIGITS = 9
"""Of seconds, to which times are compared: sums differ in their last digits from one Python to another."""


def outcomes_of_shape(case: Case, family: Family, refusal: Refusal, limit: Limit, *, every: bool) -> Iterator[Outcome]:
    """What becomes of every micro batch and sequence-parallel switch of a shape, given with its pipeline splits."""
    search = _Shape(case, family)
    if not every and limit() == math.inf and search.is_hopeless:
        yield from search.misses()
        return
    for layouts, modes, broken in steps(case, family):
        if broken := broken or refusal(layouts[0]):
            yield Refused(layouts, broken, times=1 + len(modes))
            continue
        near = search.within(layouts, limit())
        if len(near) < len(layouts):
            yield Behind((len(layouts) - len(near)) * (1 + len(modes)))
        if near:
            yield search.fastest(near, modes)


def promise_of(case: Case, family: Family) -> float:
    """Seconds of a step, roughly and without a look at activations."""
    first = family[0]
    work = pipeline_work(case, first)
    each = case.job.global_batch_size / first.dp + (first.pp - 1) / first.vpp
    promised = work.stages[work.rank].total_s * each
    if ways := offloaded(case, first):
        least = _least_offloaded(case, (first, *ways), shape_states(case, first))
        promised += sum(seconds for _, seconds in optimizer_time(case, least))
    return promised


def _least_offloaded(case: Case, ways: Sequence[Layout], states: ShapeStates) -> Layout:
    """Of a layout with ever more of its optimizer in host memory the first whose states the card holds: what fits has
    no less there."""
    return next((one for one in ways if resident_excess_bytes(case, one, states) <= 0.0), ways[-1])


class _Shape:
    """A shape, with what its layouts share."""

    def __init__(self, case: Case, shape: Family) -> None:
        self.case, self.shape = case, shape
        self._begin(shape[0])

    def _begin(self, layout: Layout) -> None:
        """Start what layouts of a micro batch and sequence-parallel switch share."""
        self._step, self._shard = layout.step, shard_of(self.case, layout)
        self._passing: PassingOf = {}
        self._times: dict[Recompute, MicroBatch] = {}

    def work(self, layout: Layout) -> PipelineWork:
        """What its stages have to do."""
        if layout.step is not self._step:
            self._begin(layout)
        if (times := self._times.get(layout.recompute)) is None:
            times = self._times[layout.recompute] = micro_batch(self.case, layout, self._shard)
        return pipeline_work(self.case, layout, times)

    def memory(self, layout: Layout) -> Memory:
        """What a layout needs; at least that, once it is over the card."""
        if layout.step is not self._step:
            self._begin(layout)
        states = self.states[layout.pipeline_layout]
        return predict_memory(self.case, layout, states=states, shard=self._shard, known=self._passing, until_over=True)

    @cached_property
    def states(self) -> dict[str | None, ShapeStates]:
        """By pipeline split."""
        return {layout.pipeline_layout: shape_states(self.case, layout) for layout in self.shape}

    @cached_property
    def least_offload(self) -> dict[str | None, float]:
        """The share of the optimizer that has to be in host memory at least, by pipeline split."""
        shares = {}
        for layout in self.shape:
            split = layout.pipeline_layout
            least = _least_offloaded(self.case, (layout, *offloaded(self.case, layout)), self.states[split])
            shares[split] = least.optimizer_offload_fraction
        return shares

    @cached_property
    def is_hopeless(self) -> bool:
        """Weights, gradients and optimizer alone are over the card, as much of it as may be offloaded."""
        least = [[layout, *offloaded(self.case, layout)[-1:]][-1] for layout in self.shape]
        return all(resident_excess_bytes(self.case, one, self.states[one.pipeline_layout]) > 0.0 for one in least)

    def within(self, layouts: Family, limit_s: float) -> Family:
        """Those whose step may be as short: with nothing recomputed and least in host memory it is shortest."""
        if limit_s == math.inf:
            return layouts
        shortest = [recomputing(layout, Recompute()) for layout in layouts]
        works = [self.work(one) for one in shortest]
        if all(work.busiest_s > limit_s for work in works) or self.is_hopeless:
            return ()
        return tuple(
            layout
            for layout, one, work in zip(layouts, shortest, works, strict=True)
            if work.busiest_s <= limit_s
            and step_terms(self.case, self._with_least_offload(one), work).step_s <= limit_s
        )

    def _with_least_offload(self, layout: Layout) -> Layout:
        share = self.least_offload[layout.pipeline_layout]
        return changed(layout, optimizer_offload_fraction=share) if share else layout

    def misses(self) -> Iterator[Outcome]:
        """A hopeless shape: the layouts of its first micro batch stand for the others, which need more."""
        splits, named = len(self.shape), False
        for layouts, modes, broken in steps(self.case, self.shape[:1]):
            if broken:
                yield Refused(layouts, broken, times=splits)
            else:
                examples = () if named else _with_modes(layouts[0], modes)
                yield TooLarge(examples, splits * (1 + len(modes)), self.memory)
                named = True

    def fastest(self, layouts: tuple[Layout, ...], modes: tuple[Recompute, ...]) -> Fastest | TooLarge:
        """The fastest of legal layouts that differ in their split alone, each under its own or another mode."""
        count = len(layouts) * (1 + len(modes))
        in_order = sorted((layouts[0].recompute, *modes), key=_order)
        fits = [fit for layout in layouts for fit in self._fits_of_split(layout, in_order)]
        if fits:
            return self._fastest_of(fits, count)
        return TooLarge(tuple(one for layout in layouts for one in _with_modes(layout, modes)), count, self.memory)

    def _fastest_of(self, fits: Sequence[_Fit], count: int) -> Fastest:
        """The fastest; of equally fast ones, the one that needs least.

        The schedule of a layout is worked out only where what its busiest rank has to do does not decide already.
        """
        rivals = [(self.work(layout), layout, memory) for layout, memory in fits]
        rivals.sort(key=lambda rival: rival[0].busiest_s)
        best = self._timed(*rivals[0], count)
        for work, layout, memory in rivals[1:]:
            if round(work.busiest_s, _DIGITS) > round(best.step_s, _DIGITS):
                break
            one = self._timed(work, layout, memory, count)
            slower, than = _slowness(one), _slowness(best)
            if slower < than or (slower == than and one.layout.id < best.layout.id):
                best = one
        return best

    def _timed(self, work: PipelineWork, layout: Layout, memory: Memory, count: int) -> Fastest:
        return Fastest(layout, memory, step_terms(self.case, layout, work).step_s, count)

    def _fits_of_split(self, layout: Layout, in_order: Sequence[Recompute]) -> list[_Fit]:
        """What fits of a layout under recompute modes in their `_order`, without what is sure to be slower.

        Where it fits without recomputation, that is the fastest. A mode that recomputes more needs less, so that where
        one does not fit, none does that recomputes a part of it.
        """
        found: list[_Fit] = []
        too_large: list[frozenset[str]] = []
        enough = math.inf
        for mode in in_order:
            parts = recomputed(mode)
            if any(parts <= more for more in too_large):
                continue
            one = recomputing(layout, mode)
            needed = self.memory(one)
            if needed.fits and not parts:
                return [(one, needed)]
            fitting = self._fitting(one, needed, enough)
            found += fitting
            if parts and not fitting:
                too_large.append(parts)
            elif fitting and not parts:
                enough = fitting[0][0].optimizer_offload_fraction
        return _without_slower(found)

    def _fitting(self, layout: Layout, memory: Memory, enough: float) -> list[_Fit]:
        """The layout if it fits, or what it takes for it to fit; more than one where only their times can tell.

        Of two that recompute as much the one with less of its optimizer in host memory is faster, and of two with as
        much there the one that recomputes fewer layers: a larger share has to pay in fewer layers. From the share
        `enough` on, the layout would fit without recomputation.
        """
        if not memory.fits and memory.excess_without_optimizer_bytes > 0.0:
            return []
        fitting: list[_Fit] = []
        modes = lighter_modes(self.case, layout)
        if memory.fits:
            modes, fit = self._lightest(layout, modes, memory)
            fitting.append(fit)
        if not modes:
            return fitting
        shares = [one for one in offloaded(self.case, layout) if one.optimizer_offload_fraction < enough]
        # The card holds least with the largest share.
        if not shares or self.memory(recomputing(shares[-1], modes[-1])).excess_bytes > 0.0:
            return fitting
        for one in shares:
            needed = self.memory(recomputing(one, modes[-1]))
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
        needs: dict[int, _Fit] = {last: (recomputing(layout, modes[last]), memory)}

        def fits(place: int) -> bool:
            one = recomputing(layout, modes[place])
            needs[place] = one, self.memory(one)
            return needs[place][1].fits

        lightest = bisect_left(range(last), True, key=fits)
        return modes[:lightest], needs[lightest]


def _with_modes(layout: Layout, modes: tuple[Recompute, ...]) -> tuple[Layout, ...]:
    """A layout, and the same one under other recompute modes."""
    return (layout, *(recomputing(layout, mode) for mode in modes))


def _without_slower(fits: Sequence[_Fit]) -> list[_Fit]:
    """Without those that recompute a part more of every layer than another, with no less of the optimizer away."""
    keys = [(recomputed(layout.recompute), layout.optimizer_offload_fraction) for layout, _ in fits]
    return [
        fit
        for fit, (parts, share) in zip(fits, keys, strict=True)
        if fit[0].recompute.method == "block" or not any(less < parts and other <= share for less, other in keys)
    ]


@lru_cache(maxsize=256)
def recomputed(mode: Recompute) -> frozenset[str]:
    """The parts of a layer that a mode recomputes: moe has its activation and the shared experts in it."""
    if mode.granularity == "full":
        return frozenset((*RECOMPUTE_MODULES, "all else"))
    parts = frozenset(mode.modules)
    return parts | {"moe_act", "shared_experts"} if "moe" in parts else parts


def _order(mode: Recompute) -> int:
    """Sorts the mode that recomputes nothing first, then those that recompute most."""
    parts = len(recomputed(mode))
    return -parts if parts else -len(RECOMPUTE_MODULES) - 2


def _slowness(one: Fastest) -> tuple[float, float]:
    """Sorts the fastest first, then the one that needs least."""
    return round(one.step_s, _DIGITS), one.memory.device_bytes
