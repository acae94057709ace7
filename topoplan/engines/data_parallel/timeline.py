"""The step of a layout that splits data only, layer by layer, on one GPU, its network and its host.

Weights of the next layer are gathered while the current one is computed, and its gradients are reduced while the next
ones are computed: PyTorch `distributed/fsdp/_fully_shard/_fsdp_state.py` (one unit is prefetched), DeepSpeed
`runtime/zero/partitioned_param_coordinator.py` and `stage_1_and_2.py` (overlap_comm), PyTorch's
`DistributedDataParallel` (buckets). Collectives of a pass run one at a time, in the order in which they are issued.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from topoplan.engines.data_parallel.step import ShardedTerms, sharded_terms
from topoplan.engines.prediction import Time
from topoplan.engines.timeline import BACKWARD, FORWARD, RECOMPUTE, Event, Timeline
from topoplan.layout.layout import Layout
from topoplan.specs.case import Case

GPU, NETWORK, PCIE, HOST = "GPU", "network", "PCIe", "host"
"""Lanes: kernels, collectives, copies between card and host, and the host's own work."""
GATHER, REDUCE = "parameter gather", "gradient reduce"
BUFFERS, LAUNCHES, COPY, OPTIMIZER, REFERENCE = "buffers", "launches", "copy", "optimizer", "reference"


@dataclass(slots=True)
class _Lanes:
    """Collects events; consecutive ones without a gap and of the same kind and micro-batch are merged."""

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


def timeline(case: Case, layout: Layout, time: Time) -> Timeline:
    """Simulate the step layer by layer for one GPU, its communication and its host; all GPUs do the same."""
    terms = sharded_terms(case, layout)
    units, lanes = case.model.num_layers + 1, _Lanes()
    lanes.add(GPU, REFERENCE, 0, 0.0, terms.reference_s)
    now = terms.reference_s
    for microbatch in range(terms.count):
        now = _micro_batch(lanes, terms, units, microbatch, now)
    for lane, kind, seconds in (
        (HOST if terms.adam_on_host else GPU, OPTIMIZER, terms.adam_s),
        (PCIE, COPY, terms.copied_after_s),
        (NETWORK, GATHER, terms.communication.seconds("after")),
        (HOST, "host work", terms.overhead_s),
    ):
        lanes.add(lane, kind, terms.count - 1, now, now + seconds)
        now += seconds
    names = tuple(lane for lane in (GPU, NETWORK, PCIE, HOST) if lane in lanes.events)
    return Timeline(
        ranks=len(names),
        chunks=1,
        microbatches=terms.count,
        events=tuple(replace(one, rank=number) for number, name in enumerate(names) for one in lanes.events[name]),
        phases=(),
        pipeline_start_s=0.0,
        pipeline_end_s=now,
        total_s=now,
        closed_form_s=time.step_s,
        lanes=names,
    )


def _micro_batch(lanes: _Lanes, terms: ShardedTerms, units: int, microbatch: int, start: float) -> float:
    """Simulate forward and backward of one micro-batch. Returns the end."""
    passes, communication = terms.passes, terms.communication
    is_last = microbatch == terms.count - 1
    gathers = {GATHER: 0.0, REDUCE: 0.0}
    for one in communication.sendings:
        if one.when == "backward" or (one.when == "last" and is_last):
            gathers[GATHER if one.name.startswith("weights") else REDUCE] += one.seconds
    work = passes.forward_s + passes.backward_s
    now = start
    for kind, own, gather, reduce, exposed in (
        (FORWARD, passes.forward_s, communication.seconds("forward"), 0.0, terms.exposed_forward_s),
        (
            BACKWARD,
            passes.backward_s,
            gathers[GATHER],
            gathers[REDUCE],
            terms.exposed_backward_s + (terms.exposed_last_s if is_last else 0.0),
        ),
    ):
        # By how much concurrent communication slows down the work: the cost model's exposure, less what nothing hides.
        sent = gather + reduce
        slowed = max(0.0, exposed - max(sent - own, sent * communication.first_share))
        repeated = passes.recompute_s / own if kind == BACKWARD else 0.0
        now = _pass(lanes, kind, microbatch, now, units, own + slowed, gather, reduce, repeated)
        for name, seconds in ((BUFFERS, communication.copies_s / 2), (LAUNCHES, terms.waited_s * own / work)):
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
    """Simulate all units of one pass in turn. Returns the end.

    What checkpointing repeats has events of its own, before the rest.
    """
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
