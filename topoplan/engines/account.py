"""What every engine's account is made of: the trees of memory and time, and what stands beside them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal

from topoplan.engines.prediction import Memory, Moment
from topoplan.network.collectives import all_gather_s, all_reduce_s, all_to_all_s, point_to_point_s
from topoplan.network.communicators import Communicator
from topoplan.network.placement import Group, span
from topoplan.operators.machine import Kernel
from topoplan.specs.case import Case
from topoplan.specs.cluster import Cluster
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
    calls: int
    """Collectives at one such moment, or of one micro batch."""
    kind: str
    """all-gather, reduce-scatter, all-reduce, all-to-all or send."""
    shape: Group
    nodes: int
    """That the worst placed group touches."""
    call_bytes: float
    """The whole tensor of one call; with all-to-all and send, what one rank sends."""
    call_s: float
    """One call with nothing that hides it."""
    moment_bytes: float
    """Of all calls of one moment."""
    moment_s: float
    """All calls of one moment, hidden or not."""

    @property
    def step_s(self) -> float:
        """All calls of a step, hidden or not."""
        return self.times * self.moment_s

    @property
    def bytes_per_s(self) -> float:
        """The algorithm bandwidth of nccl-tests, latency included."""
        return self.call_bytes / self.call_s if self.call_s else 0.0

    @property
    def source(self) -> str:
        """The place of the formula of a call."""
        return source_of(_COLLECTIVES[self.kind], "Thakur et al. 2005, section 4; nccl-tests PERFORMANCE.md")


_COLLECTIVES: Mapping[str, Callable[..., float]] = {
    "all-gather": all_gather_s,
    "reduce-scatter": all_gather_s,
    "all-reduce": all_reduce_s,
    "all-to-all": all_to_all_s,
    "send": point_to_point_s,
}


def sent(
    name: str,
    moment: SentAt,
    times: int,
    calls: float,
    *,
    kind: str,
    shape: Group,
    call: tuple[float, float],
    cluster: Cluster,
) -> Sent:
    """Calls of one kind; `call` is the bytes and the seconds of one."""
    size, seconds = call
    return Sent(
        name=name,
        moment=moment,
        times=times,
        calls=round(calls),
        kind=kind,
        shape=shape,
        nodes=span(shape, cluster.gpus_per_node).domains,
        call_bytes=size,
        call_s=seconds,
        moment_bytes=calls * size,
        moment_s=calls * seconds,
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


def peak_term(peak: Term) -> Term:
    """The largest moment, as a part of what is allocated."""
    largest = sorted((one for one in peak.children if one.value > 0), key=lambda one: -one.value)[:2]
    what = f"{peak.name}: {', '.join(one.name for one in largest)}" if largest else peak.name
    return replace(peak, name="peak", what=what, facts={"moment": peak.name})


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """How often a step runs the operators of one kind of layer."""

    times: float
    """Layers times micro batches."""
    again: float
    """How many of these may be recomputed."""
    has_backward: bool = True


def operator_term(operator: Kernel, runs: Runs, repeated_s: float, source: str) -> Term:
    """One kernel or collective of one kind of layer: its work, and what recomputation adds to that."""
    backward = operator.backward_s if runs.has_backward else 0.0
    work = Term(operator.part, runs.times * (operator.forward_s + backward), "s", source, times=runs.times)
    again = Term("recompute", runs.again * repeated_s, "s", source, times=runs.again or 1.0)
    facts = {"part": operator.part, "forward_s": operator.forward_s, "backward_s": backward, "recompute_s": repeated_s}
    return sum_of(operator.name, (work, again), source, "s", times=runs.times, facts=facts)


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
