"""What the accounts of all engines are built from: the trees of memory and of time, and the data beside them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal

from topoplan.engines.prediction import BEYOND, Memory, Moment
from topoplan.network.collectives import all_gather_s, all_reduce_s, all_to_all_s, point_to_point_s
from topoplan.network.nccl_buffers import Communicator
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
    """Where the memory of the fullest GPU goes."""

    device: Term
    """Memory needed on the card, as nvidia-smi shows it at least, broken down to single tensors."""
    margin: Term
    host: Term | None
    """Pinned host memory of a node; None if nothing is offloaded."""
    worst: int
    """The pipeline stage that `device`, `moments`, `layers` and `parameters` describe; 0 without a pipeline."""
    stages: tuple[Term, ...]
    """Allocated memory of each stage by part; consecutive stages with equal needs are merged into one."""
    moments: tuple[Term, ...]
    """The points of the step that may be the peak, largest first, each with what is alive there beyond the parts that
    stay for the whole step."""
    layers: tuple[Term, ...]
    """For each kind of layer, what it saves for one micro-batch, tensor by tensor, whether this plan keeps it or
    not."""
    parameters: Term
    """Elements on one rank, weight by weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAccount:
    """Where the time of a step goes."""

    step: Term
    """The step by part, then by layer and operator."""
    microbatches: int
    slowest_stage: int
    """The pipeline stage whose work the terms of the step describe; 0 without a pipeline."""
    stages: tuple[Term, ...]
    """Seconds of one micro-batch on each pipeline stage; consecutive stages with equal times are merged into one."""
    layers: tuple[Term, ...]
    """Each kind of layer by operator: the terms of `step`, grouped by layer instead of by part."""
    sent: tuple[Flow, ...]
    copied_s: float = 0.0
    """All PCIe copies of a step, hidden or not."""


FlowMoment = Literal["forward", "backward", "last", "after", "layers", "stages"]
"""When in a step the ranks send: in every forward, in every backward, in the last backward, after the step, within
layers, or between stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What the ranks of a group send each other at one kind of moment of a step."""

    name: str
    moment: FlowMoment
    times: int
    """How often this moment occurs in a step; for traffic within layers or between stages, the number of
    micro-batches."""
    number: float
    """Collectives per moment, or per micro-batch; calls of other sizes are counted in proportion to their bytes."""
    call: Collective
    """One of the collectives; unlike in the cost formula, all-gather and reduce-scatter have different kinds here."""
    gpus_per_node: int

    @property
    def calls(self) -> int:
        """Collectives per moment, rounded."""
        return round(self.number)

    @property
    def nodes(self) -> int:
        """Nodes that the worst placed group spans."""
        return span(self.call.group, self.gpus_per_node).domains

    @property
    def moment_bytes(self) -> float:
        """Bytes of all calls of one moment."""
        return self.number * self.call.sent_bytes

    @property
    def moment_s(self) -> float:
        """Seconds of all calls of one moment, hidden or not."""
        return self.number * self.call.call_s

    @property
    def step_s(self) -> float:
        """Seconds of all calls of a step, hidden or not."""
        return self.times * self.moment_s

    @property
    def bytes_per_s(self) -> float:
        """Algorithm bandwidth as nccl-tests defines it (bytes over seconds of a call), latency included."""
        return self.call.sent_bytes / self.call.call_s if self.call.call_s else 0.0

    @property
    def source(self) -> str:
        """Where the formula for the time of a call is, and its origins."""
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
) -> Iterator[Flow]:
    """Yield what the operators of layers send.

    `runs` has (operator, forwards, backwards): how often the layers with this operator run in one micro-batch.
    """
    calls: dict[tuple[str, Collective], float] = {}
    for operator, forwards, backwards in runs:
        if (call := operator.collective) is not None and call.group.size > 1:
            number = forwards * call.forward_calls + backwards * call.backward_calls
            calls[operator.name, call] = calls.get((operator.name, call), 0.0) + number
    for (name, call), number in calls.items():
        yield Flow(
            name=name, moment="layers", times=microbatches, number=number, call=call, gpus_per_node=gpus_per_node
        )


def merged_stages(stages: Iterable[Term], sameness: Callable[[Term], Hashable]) -> tuple[Term, ...]:
    """Merge consecutive stages with the same `sameness` key; `facts["stages"]` lists the numbers merged."""
    found = []
    for _, run in groupby(stages, key=sameness):
        same = list(run)
        numbers = tuple(number for one in same for number in one.facts["stages"])
        found.append(replace(same[0], facts={**same[0].facts, "stages": numbers}))
    return tuple(found)


def moment_terms(
    moments: Iterable[Moment], source: str, what: Mapping[str, str] = MappingProxyType({})
) -> tuple[Term, ...]:
    """Return the points of the step that may be the peak, largest first; `what` describes terms of them, by name."""
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
    """Return all memory of torch's tensors: the parts that stay for the whole step, and the largest peak candidate."""
    largest = sorted((one for one in peak.children if one.value > 0), key=lambda one: -one.value)[:2]
    what = f"{peak.name}: {', '.join(one.name for one in largest)}" if largest else peak.name
    last = replace(peak, name="peak", what=what, facts={"moment": peak.name})
    words = "torch's peak of live tensors"
    return sum_of("allocated", (*parts, last), source, "bytes", with_zeros=True, what=words)


def beyond_terms(case: Case, parts_bytes: Mapping[str, float], formula: Callable[..., Any]) -> list[Term]:
    """Return what a calibrated profile adds to the tensors of a stage; `formula` predicted them."""
    if BEYOND not in parts_bytes:
        return []
    profile = case.profile
    words = f"{100 * profile.tensors_beyond:.0f}% of what comes and goes: a run out of memory needed that"
    source = source_of(formula, profile.origins["tensors_beyond"].source)
    return [Term(BEYOND, parts_bytes[BEYOND], "bytes", source, what=words)]


def state_term(name: str, elements: int, element_bytes: float, shards: int, source: str, *, processes: int = 1) -> Term:
    """Return the bytes that a rank, or `processes` processes of a node together, keep of some parameters."""
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
    """Return everything from torch's tensors up to what the card shows.

    `formula` is the function that predicted `memory`; `origin` is the source of NCCL's buffers; `further` is other
    memory of the card that torch does not see.
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
    return sum_of(
        "device", (reserved, context, network, *further), here, "bytes", what="nvidia-smi shows at least this"
    )


def margin_term(case: Case, memory: Memory, formula: Callable[..., Any]) -> Term:
    """Return the memory that `fits` requires to stay free."""
    stated = case.cluster.margin is not None
    return Term(
        "margin",
        memory.margin_bytes,
        "bytes",
        source_of(formula, BANDS),
        what="as the spec or --margin says" if stated else "the error band, and what the driver keeps",
        facts={"from": "spec" if stated else "band"},
    )


def operator_term(
    operator: Kernel, times: float, again: float, repeated_s: float, *, has_backward: bool = True
) -> Term:
    """Return one kernel or collective of one kind of layer: its own work, and what recomputation adds.

    A step runs the operator `times` times (layers times micro-batches); `again` of these are in layers that the
    recompute mode covers, and `repeated_s` is what recomputation adds to each of them, in seconds.
    """
    backward, source = operator.backward_s if has_backward else 0.0, operator.source
    work = Term(operator.part, times * (operator.forward_s + backward), "s", source, times=times)
    more = Term("recompute", again * repeated_s, "s", source, times=again or 1.0)
    facts = {"part": operator.part, "forward_s": operator.forward_s, "backward_s": backward, "recompute_s": repeated_s}
    return sum_of(operator.name, (work, more), source, "s", times=times, facts=facts)


def end_term(name: str, forward_s: float, backward_s: float, microbatches: int, source: str) -> Term:
    """Return what runs before or after the layers, over all micro-batches; `forward_s` and `backward_s` are of one."""
    facts = {"forward_s": forward_s, "backward_s": backward_s}
    return Term(name, microbatches * (forward_s + backward_s), "s", source, times=microbatches, facts=facts)


def by_part(layers: Iterable[Term], what: Mapping[str, str], source: str) -> list[Term]:
    """Return the operators of the kinds of layers by part of the step: part, then layer, then operator."""
    layers = tuple(layers)
    found = []
    for part in what:
        kinds = []
        for layer in layers:
            rows = [replace(work, name=one.name) for one in layer.children if (work := one.child(part))]
            kinds.append(sum_of(layer.name, rows, source, "s", times=layer.times))
        found.append(sum_of(part, kinds, source, "s", what=what[part]))
    return found
