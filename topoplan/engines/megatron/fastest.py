"""The fastest layout of a shape that fits, and what the search can leave out without evaluating it.

Of layouts that differ only in their pipeline split, in what they recompute or in how much of the optimizer is in host
memory, one is ranked. Recomputing more is slower and needs less memory; so is offloading more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

from topoplan.engines.engine import Family, Fastest, Limit, Outcome, Refusal, Refused, TooLarge, TooSlow
from topoplan.engines.megatron.layouts import lighter_modes, offloaded, steps
from topoplan.engines.megatron.memory import (
    ShapeStates,
    TransientMemories,
    predict_memory,
    resident_excess_bytes,
    shape_states,
)
from topoplan.engines.megatron.microbatch import MicroBatch, micro_batch
from topoplan.engines.megatron.step import PipelineWork, optimizer_time, pipeline_work, step_terms
from topoplan.engines.prediction import Memory
from topoplan.layout.layout import Layout, Recompute, changed, recomputing
from topoplan.operators.shard import shard_of
from topoplan.specs.case import Case
from topoplan.specs.layout_parts import RECOMPUTE_MODULES

_Fit = tuple[Layout, Memory]
_DIGITS = 9
"""Decimal digits of seconds at which times are compared: sums differ in their last digits between Python versions."""


def outcomes_of_shape(case: Case, family: Family, refusal: Refusal, limit: Limit, *, every: bool) -> Iterator[Outcome]:
    """Yield the outcomes of every micro-batch size and sequence-parallel switch of a shape."""
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
            yield TooSlow((len(layouts) - len(near)) * (1 + len(modes)))
        if near:
            yield search.fastest(near, modes)


def rough_step_s(case: Case, family: Family) -> float:
    """Return a rough estimate of the step's seconds, without considering activations."""
    first = family[0]
    work = pipeline_work(case, first)
    each = case.job.global_batch_size / first.dp + (first.pp - 1) / first.vpp
    step_s = work.stages[work.rank].total_s * each
    if ways := offloaded(case, first):
        least = _least_offloaded(case, (first, *ways), shape_states(case, first))
        step_s += sum(seconds for _, seconds in optimizer_time(case, least))
    return step_s


def _least_offloaded(case: Case, ways: Sequence[Layout], states: ShapeStates) -> Layout:
    """Return the first layout, in order of increasing offload, whose states fit on the card.

    `ways` are a layout with ever more of its optimizer in host memory; whatever fits offloads no less than the result.
    """
    return next((one for one in ways if resident_excess_bytes(case, one, states) <= 0.0), ways[-1])


class _Shape:
    """A shape, with what its layouts share."""

    def __init__(self, case: Case, shape: Family) -> None:
        self.case, self.shape = case, shape
        self._begin(shape[0])

    def _begin(self, layout: Layout) -> None:
        """Reset what layouts with the same micro-batch size and sequence-parallel switch share."""
        self._step, self._shard = layout.step, shard_of(self.case, layout)
        self._transient: TransientMemories = {}
        self._times: dict[Recompute, MicroBatch] = {}

    def work(self, layout: Layout) -> PipelineWork:
        """Return the work of the layout's stages."""
        if layout.step is not self._step:
            self._begin(layout)
        if (times := self._times.get(layout.recompute)) is None:
            times = self._times[layout.recompute] = micro_batch(self.case, layout, self._shard)
        return pipeline_work(self.case, layout, times)

    def memory(self, layout: Layout) -> Memory:
        """Return the memory of a layout, or a lower bound of it once it exceeds the card."""
        if layout.step is not self._step:
            self._begin(layout)
        states = self.states[layout.pipeline_layout]
        return predict_memory(
            self.case, layout, states=states, shard=self._shard, known=self._transient, until_over=True
        )

    @cached_property
    def states(self) -> dict[str | None, ShapeStates]:
        """States by pipeline split."""
        return {layout.pipeline_layout: shape_states(self.case, layout) for layout in self.shape}

    @cached_property
    def least_offload(self) -> dict[str | None, float]:
        """The smallest fraction of the optimizer that must be in host memory, by pipeline split."""
        shares = {}
        for layout in self.shape:
            split = layout.pipeline_layout
            least = _least_offloaded(self.case, (layout, *offloaded(self.case, layout)), self.states[split])
            shares[split] = least.optimizer_offload_fraction
        return shares

    @cached_property
    def is_hopeless(self) -> bool:
        """Whether weights, gradients and optimizer alone exceed the card, even with the largest offload."""
        least = [[layout, *offloaded(self.case, layout)[-1:]][-1] for layout in self.shape]
        return all(resident_excess_bytes(self.case, one, self.states[one.pipeline_layout]) > 0.0 for one in least)

    def within(self, layouts: Family, limit_s: float) -> Family:
        """Return the layouts whose step may be within the limit.

        A layout is fastest with nothing recomputed and the least optimizer in host memory.
        """
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
        """Yield the outcomes of a hopeless shape, one that does not fit even without activations.

        Layouts of its first micro-batch size stand for the others, which need more.
        """
        splits, named = len(self.shape), False
        for layouts, modes, broken in steps(self.case, self.shape[:1]):
            if broken:
                yield Refused(layouts, broken, times=splits)
            else:
                examples = () if named else _with_modes(layouts[0], modes)
                yield TooLarge(examples, splits * (1 + len(modes)), self.memory)
                named = True

    def fastest(self, layouts: tuple[Layout, ...], modes: tuple[Recompute, ...]) -> Fastest | TooLarge:
        """Return the fastest of legal layouts that differ only in their split, each under its own or another mode."""
        count = len(layouts) * (1 + len(modes))
        in_order = sorted((layouts[0].recompute, *modes), key=_order)
        fits = [fit for layout in layouts for fit in self._fits_of_split(layout, in_order)]
        if fits:
            return self._fastest_of(fits, count)
        return TooLarge(tuple(one for layout in layouts for one in _with_modes(layout, modes)), count, self.memory)

    def _fastest_of(self, fits: Sequence[_Fit], count: int) -> Fastest:
        """Return the fastest fit; among equally fast ones, the one that needs the least memory.

        A layout's schedule is computed only if the work of its busiest rank does not already decide.
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
        """Return what fits of a layout under recompute modes given in `_order`, without what is certain to be slower.

        If the layout fits without recomputation, that is the fastest. A mode that recomputes more needs less memory, so
        if one mode does not fit, no mode fits that recomputes a subset of it.
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
        """Return the layout if it fits, or variants of it that fit; several if only their times can decide.

        Of two variants that recompute equally much, the one with less of its optimizer in host memory is faster; of two
        that offload equally much, the one that recomputes fewer layers. So a larger offload is only worthwhile with
        fewer recomputed layers. From the offload fraction `enough` on, the layout would fit without recomputation.
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
        # The card holds the least with the largest offloaded fraction.
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
        """Return (the `lighter_modes` that do not fit, the layout under the first mode that fits).

        The layout fits with the last mode, as `memory` says. All modes after one that fits do so too: what they keep
        shrinks, and what the backward of a recomputed layer needs on top is largest when all layers are recomputed.
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
    """Return a layout under its own and under other recompute modes."""
    return (layout, *(recomputing(layout, mode) for mode in modes))


def _without_slower(fits: Sequence[_Fit]) -> list[_Fit]:
    """Return the fits without those that recompute strictly more of every layer than another with no less offload."""
    keys = [(recomputed(layout.recompute), layout.optimizer_offload_fraction) for layout, _ in fits]
    return [
        fit
        for fit, (parts, share) in zip(fits, keys, strict=True)
        if fit[0].recompute.method == "block" or not any(less < parts and other <= share for less, other in keys)
    ]


@lru_cache(maxsize=256)
def recomputed(mode: Recompute) -> frozenset[str]:
    """Return the parts of a layer that a mode recomputes; moe includes its activation and the shared experts."""
    if mode.granularity == "full":
        return frozenset((*RECOMPUTE_MODULES, "all else"))
    parts = frozenset(mode.modules)
    return parts | {"moe_act", "shared_experts"} if "moe" in parts else parts


def _order(mode: Recompute) -> int:
    """Sort key: the mode that recomputes nothing first, then those that recompute the most."""
    parts = len(recomputed(mode))
    return -parts if parts else -len(RECOMPUTE_MODULES) - 2


def _slowness(one: Fastest) -> tuple[float, float]:
    """Sort key: the fastest first, then the one that needs the least memory."""
    return round(one.step_s, _DIGITS), one.memory.device_bytes
