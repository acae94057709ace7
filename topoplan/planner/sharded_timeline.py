"""One optimizer step of a plan that splits data alone, layer by layer, as one GPU and what is around it see it.

Weights of the next layer are gathered while this one is computed, its gradients are reduced while the next one's are:
PyTorch `distributed/fsdp/_fully_shard/_fsdp_state.py` (one unit is fetched ahead), DeepSpeed
`runtime/zero/partitioned_param_coordinator.py` and `stage_1_and_2.py` (overlap_comm), PyTorch's
`DistributedDataParallel` (buckets). Collectives of a pass run one at a time, in the order in which they are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from topoplan.engines.data_parallel.step import ShardedTerms, sharded_terms
from topoplan.engines.megatron.simulate import BACKWARD, FORWARD, RECOMPUTE, Event
from topoplan.planner.case import case_of
from topoplan.planner.plan import Plan
from topoplan.specs.spec import Spec

GPU, NETWORK, PCIE, HOST = "GPU", "network", "PCIe", "host"
"""Lanes: kernels, collectives, copies between card and host, and the host's own work."""
GATHER, REDUCE = "parameter gather", "gradient reduce"
BUFFERS, LAUNCHES, COPY, OPTIMIZER, REFERENCE = "buffers", "launches", "copy", "optimizer", "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedRun:
    """One step of a GPU; all GPUs do the same."""

    lanes: tuple[str, ...]
    """Those that have something to do."""
    events: tuple[Event, ...]
    """By lane, then in time; `rank` is the number of the lane. What lies between them is idle time."""
    total_s: float


@dataclass(slots=True)
class _Lanes:
    """Collects events; what follows without a gap and is of the same kind and micro batch is one."""

    events: dict[str, list[Event]] = field(default_factory=dict)

    def add(self, lane: str, kind: str, microbatch: int, start: float, end: float) -> None:
        if end <= start:
            return
        mine = self.events.setdefault(lane, [])
        if mine and (mine[-1].kind, mine[-1].microbatch) == (kind, microbatch):
            last = mine[-1]
            if start - last.end_s <= 1e-9 * end:
                mine.pop()
                start = last.start_s
        mine.append(Event(rank=0, chunk=0, microbatch=microbatch, kind=kind, start_s=start, end_s=end))


def sharded_run(spec: Spec, plan: Plan) -> ShardedRun:
    """Simulate the step of a plan."""
    layout = plan.layout
    case = case_of(spec, layout.backend)
    terms = sharded_terms(case, layout)
    units, lanes = spec.model.num_layers + 1, _Lanes()
    lanes.add(GPU, REFERENCE, 0, 0.0, terms.reference_s)
    now = terms.reference_s
    for microbatch in range(terms.count):
        now = _micro_batch(lanes, terms, units, microbatch, now)
    last = terms.count - 1
    place = HOST if terms.adam_on_host else GPU
    lanes.add(place, OPTIMIZER, last, now, now + terms.adam_s)
    now += terms.adam_s
    lanes.add(PCIE, COPY, last, now, now + terms.copied_after_s)
    now += terms.copied_after_s
    gathered = terms.traffic.seconds("after")
    lanes.add(NETWORK, GATHER, last, now, now + gathered)
    now += gathered
    lanes.add(HOST, "host work", last, now, now + terms.overhead_s)
    names = tuple(lane for lane in (GPU, NETWORK, PCIE, HOST) if lane in lanes.events)
    return ShardedRun(
        lanes=names,
        events=tuple(
            Event(
                rank=number,
                chunk=0,
                microbatch=event.microbatch,
                kind=event.kind,
                start_s=event.start_s,
                end_s=event.end_s,
            )
            for number, name in enumerate(names)
            for event in lanes.events[name]
        ),
        total_s=now + terms.overhead_s,
    )


def _micro_batch(lanes: _Lanes, terms: ShardedTerms, units: int, microbatch: int, start: float) -> float:
    """Forward and backward of one micro batch. Returns its end."""
    passes, traffic = terms.passes, terms.traffic
    is_last = microbatch == terms.count - 1
    gathers = {GATHER: 0.0, REDUCE: 0.0}
    for flow in traffic.flows:
        if flow.moment == "backward" or (flow.moment == "last" and is_last):
            gathers[GATHER if flow.name.startswith("weights") else REDUCE] += flow.seconds
    work = passes.forward_s + passes.backward_s
    now = start
    for kind, own, gather, reduce, exposed in (
        (FORWARD, passes.forward_s, traffic.seconds("forward"), 0.0, terms.exposed_forward_s),
        (
            BACKWARD,
            passes.backward_s,
            gathers[GATHER],
            gathers[REDUCE],
            terms.exposed_backward_s + (terms.exposed_last_s if is_last else 0.0),
        ),
    ):
        # What communication beside it slows down the work: the cost model's exposure, less what nothing hides.
        sent = gather + reduce
        slowed = max(0.0, exposed - max(sent - own, sent * traffic.first_share))
        repeated = passes.recompute_s / own if kind == BACKWARD else 0.0
        now = _pass(lanes, kind, microbatch, now, units, own + slowed, gather, reduce, repeated)
        for name, seconds in ((BUFFERS, traffic.copies_s / 2), (LAUNCHES, terms.waited_s * own / work)):
            lanes.add(GPU, name, microbatch, now, now + seconds)
            now += seconds
    lanes.add(PCIE, COPY, microbatch, start, start + terms.copied_s)
    return max(now, start + terms.copied_s)


def _pass(
    lanes: _Lanes,
    kind: str,
    microbatch: int,
    start: float,
    units: int,
    work_s: float,
    gather_s: float,
    reduce_s: float,
    repeated: float,
) -> float:
    """All units of one pass in turn. What checkpointing repeats is told apart in the events, ahead of the rest."""
    work, gather, reduce = work_s / units, gather_s / units, reduce_s / units
    network, done = start, start
    busy: list[tuple[float, float]] = []

    def send(what: str, seconds: float, earliest: float) -> float:
        nonlocal network
        begin = max(network, earliest)
        lanes.add(NETWORK, what, microbatch, begin, begin + seconds)
        if seconds:
            network = begin + seconds
        return begin + seconds if seconds else earliest

    ready = send(GATHER, gather, start)
    for unit in range(units):
        begin = max(done, ready)
        if unit < units - 1:
            ready = send(GATHER, gather, begin)
        done = begin + work
        if busy and begin - busy[-1][1] <= 1e-9 * begin:
            busy[-1] = (busy[-1][0], done)
        else:
            busy.append((begin, done))
        send(REDUCE, reduce, done)
    for begin, end in busy:
        split = begin + repeated * (end - begin)
        lanes.add(GPU, RECOMPUTE, microbatch, begin, split)
        lanes.add(GPU, kind, microbatch, split, end)
    return max(done, network)
