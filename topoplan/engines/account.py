"""What every engine's account is made of: the trees of memory and time, and what stands beside them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal

from topoplan.engines.prediction import Memory, Moment
from topoplan.network.collectives import all_gather_s, all_reduce_s, all_to_all_s, point_to_point_s
from topoplan.network.communicators import Communicator
from topoplan.network.placement import span
from topoplan.operators.machine import Kernel
from topoplan.operators.op import Collective
from topoplan.specs.case import Case
from topoplan.specs.gpu_profile import profile_of
from topoplan.terms import Term, source_of, sum_of

BANDS = "the bands of catalog/profiles.json"
NCCL = "NCCL init.cc, channel.cc, p2p.cc, net.cc, nvls.cc"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAccount:
    """Memory of the GPU that needs most."""

    device: Term
    """What the card shows, down to single tensors."""
    margin: Term
    host: Term | None
    """Pinned host memory of a node, where there is any."""
    worst: int
    """The pipeline stage that `device` and what follows are of; 0 without a pipeline."""
    stages: tuple[Term, ...]
    """Allocated memory of each stage by part; stages that follow each other and need the same are one."""
    moments: tuple[Term, ...]
    """All that may be the peak, the largest first, each with what is alive then beyond all that stays."""
    layers: tuple[Term, ...]
    """Each kind of layer: what it saves for one micro batch, tensor by tensor, kept by this plan or not."""
    parameters: Term
    """Elements on a rank, weight by weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAccount:
    """Time of a step."""

    step: Term
    """By part, then by layer and operator."""
    microbatches: int
    slowest: int
    """The pipeline stage whose work the step is said in; 0 without a pipeline."""
    stages: tuple[Term, ...]
    """One micro batch on each pipeline stage; those that follow each other and take the same are one."""
    layers: tuple[Term, ...]
    """Each kind of layer by operator: the terms of `step`, cut the other way."""
    sent: tuple[Sent, ...]
    copied_s: float = 0.0
    """All copies over PCIe of a step, hidden or not."""


SentAt = Literal["forward", "backward", "last", "after", "layers", "stages"]
"""In every forward, in every backward, in the last backward, behind the step, within layers, between stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What the ranks of a group send each other at one moment of a step."""

    name: str
    moment: SentAt
    times: int
    """How often a step has this moment, or how many micro batches."""
    number: float
    """Collectives at one such moment, or of one micro batch; those of other sizes are counted by their bytes."""
    call: Collective
    """One of them; all-gather is told from reduce-scatter."""
    gpus_per_node: int

    @property
    def calls(self) -> int:
        """Collectives at one moment."""
        return round(self.number)

    @property
    def nodes(self) -> int:
        """That the worst placed group touches."""
        return span(self.call.group, self.gpus_per_node).domains

    @property
    def moment_bytes(self) -> float:
        """Of all calls of one moment."""
        return self.number * self.call.sent_bytes

    @property
    def moment_s(self) -> float:
        """All calls of one moment, hidden or not."""
        return self.number * self.call.call_s

    @property
    def step_s(self) -> float:
        """All calls of a step, hidden or not."""
        return self.times * self.moment_s

    @property
    def bytes_per_s(self) -> float:
        """The algorithm bandwidth of nccl-tests, latency included."""
        return self.call.sent_bytes / self.call.call_s if self.call.call_s else 0.0

    @property
    def source(self) -> str:
        """The place of the formula of a call."""
        return source_of(_COLLECTIVES[self.call.kind], "Thakur et al. 2005, section 4; nccl-tests PERFORMANCE.md")


_COLLECTIVES: Mapping[str, Callable[..., float]] = {
    "all-gather": all_gather_s,
    "reduce-scatter": all_gather_s,
    "all-reduce": all_reduce_s,
    "all-to-all": all_to_all_s,
    "send": point_to_point_s,
}


def sent_in_layers(
    runs: Iterable[tuple[Kernel, float, float]], microbatches: int, gpus_per_node: int
) -> Iterator[Sent]:
    """What the operators of layers send: of (operator, forwards, backwards of such layers in a micro batch)."""
    calls: dict[tuple[str, Collective], float] = {}
    for operator, forwards, backwards in runs:
        if (call := operator.collective) is not None and call.group.size > 1:
            number = forwards * call.forward_calls + backwards * call.backward_calls
            calls[operator.name, call] = calls.get((operator.name, call), 0.0) + number
    for (name, call), number in calls.items():
        yield Sent(
            name=name, moment="layers", times=microbatches, number=number, call=call, gpus_per_node=gpus_per_node
        )


def merged_stages(stages: Iterable[Term], sameness: Callable[[Term], Hashable]) -> tuple[Term, ...]:
    """Stages that follow each other and are the same in what counts, as one; `stages` of its facts lists them."""
    found = []
    for _, run in groupby(stages, key=sameness):
        same = list(run)
        numbers = tuple(number for one in same for number in one.facts["stages"])
        found.append(replace(same[0], facts={**same[0].facts, "stages": numbers}))
    return tuple(found)


def moment_terms(
    moments: Iterable[Moment], source: str, what: Mapping[str, str] = MappingProxyType({})
) -> tuple[Term, ...]:
    """Moments that may be the peak, the largest first; `what` says what some of their terms are, by name."""
    found = [
        sum_of(
            moment.name,
            [Term(name, size, "bytes", source, what=what.get(name, "")) for name, size in moment.terms_bytes],
            source,
            "bytes",
        )
        for moment in moments
    ]
    return tuple(sorted(found, key=lambda one: -one.value))


def allocated_term(parts: Iterable[Term], peak: Term, source: str) -> Term:
    """All that torch's tensors take: what stays, and the largest moment."""
    largest = sorted((one for one in peak.children if one.value > 0), key=lambda one: -one.value)[:2]
    what = f"{peak.name}: {', '.join(one.name for one in largest)}" if largest else peak.name
    last = replace(peak, name="peak", what=what, facts={"moment": peak.name})
    words = "torch's peak of live tensors"
    return sum_of("allocated", (*parts, last), source, "bytes", with_zeros=True, what=words)


def state_term(name: str, elements: int, element_bytes: float, shards: int, source: str, *, processes: int = 1) -> Term:
    """Bytes that a rank keeps of some parameters, or that so many processes of a node keep."""
    facts = {"elements": elements, "element_bytes": element_bytes, "shards": shards}
    size = processes * element_bytes * elements / shards
    return Term(name, size, "bytes", source, times=processes, facts=facts)


def on_card(
    case: Case,
    memory: Memory,
    allocated: Term,
    found: Iterable[Communicator],
    formula: Callable[..., Any],
    origin: str,
    further: tuple[Term, ...] = (),
) -> Term:
    """From what torch's tensors take to what the card shows; `formula` predicts it, NCCL's buffers are of `origin`.

    `further` is what else of the card torch does not see.
    """
    wasted = memory.reserved_bytes - memory.allocated_bytes
    waste = Term(
        "fragmentation",
        wasted,
        "bytes",
        source_of(formula, "the shares of catalog/profiles.json"),
        what=f"{100 * wasted / memory.allocated_bytes:.1f}% that the allocator holds back",
    )
    here = source_of(formula)
    reserved = sum_of("reserved", (allocated, waste), here, "bytes", what="what torch's allocator holds")
    context = Term(
        "CUDA context",
        case.profile.context_bytes,
        "bytes",
        source_of(profile_of, "context_bytes of catalog/profiles.json"),
        what="driver, and loaded kernels",
    )
    buffers = [Term(one.name, one.device_bytes, "bytes", origin, facts={"ranks": one.size}) for one in found]
    network = sum_of("NCCL", buffers, origin, "bytes", what="its communicators")
    return sum_of("device", (reserved, context, network, *further), here, "bytes", what="what nvidia-smi shows")


def margin_term(case: Case, memory: Memory, formula: Callable[..., Any]) -> Term:
    """What `fits` leaves free."""
    stated = case.cluster.margin is not None
    return Term(
        "margin",
        memory.margin_bytes,
        "bytes",
        source_of(formula, BANDS),
        what="as the spec or --margin says" if stated else "the error band of the prediction",
        facts={"from": "spec" if stated else "band"},
    )


def operator_term(
    operator: Kernel, times: float, again: float, repeated_s: float, *, has_backward: bool = True
) -> Term:
    """One kernel or collective of one kind of layer: its work, and what recomputation adds to that.

    A step runs it `times`, of which `again` may be recomputed: layers times micro batches.
    """
    backward, source = operator.backward_s if has_backward else 0.0, operator.source
    work = Term(operator.part, times * (operator.forward_s + backward), "s", source, times=times)
    more = Term("recompute", again * repeated_s, "s", source, times=again or 1.0)
    facts = {"part": operator.part, "forward_s": operator.forward_s, "backward_s": backward, "recompute_s": repeated_s}
    return sum_of(operator.name, (work, more), source, "s", times=times, facts=facts)


def end_term(name: str, forward_s: float, backward_s: float, microbatches: int, source: str) -> Term:
    """What stands before or behind the layers, in all micro batches of a step; the seconds are of one."""
    facts = {"forward_s": forward_s, "backward_s": backward_s}
    return Term(name, microbatches * (forward_s + backward_s), "s", source, times=microbatches, facts=facts)


def by_part(layers: Iterable[Term], what: Mapping[str, str], source: str) -> list[Term]:
    """The operators of the kinds of layers, by part of the step: each part, then its layers, then their operators."""
    layers = tuple(layers)
    found = []
    for part in what:
        kinds = []
        for layer in layers:
            rows = [replace(work, name=one.name) for one in layer.children if (work := one.child(part))]
            kinds.append(sum_of(layer.name, rows, source, "s", times=layer.times))
        found.append(sum_of(part, kinds, source, "s", what=what[part]))
    return found
