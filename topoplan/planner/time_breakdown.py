"""Where each second of a step goes: the terms that `engines/megatron/step.py` adds up, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from topoplan.engines.data_parallel.step import Moment
from topoplan.engines.megatron.microbatch import chunk_ends, recomputed_share
from topoplan.engines.megatron.states import chunk_layers
from topoplan.engines.megatron.step import DataParallel, data_parallel, optimizer_time, pipeline_send, pipeline_work
from topoplan.layout.layout import Layout, Recompute, stages_of
from topoplan.layout.stages import Chunk
from topoplan.network.placement import Group, span
from topoplan.operators.te_compute import PARTS, Collective, Operator, layer_operators
from topoplan.planner.breakdown import runs_of
from topoplan.planner.case import case_of
from topoplan.planner.plan import Plan
from topoplan.specs.cluster import Cluster
from topoplan.specs.model import Layer, Model
from topoplan.specs.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """Seconds of a step that belong together. All rows of a breakdown add up to the step."""

    part: str
    """The part of the step (`Time.parts_s`) that it belongs to."""
    name: str
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """One kernel, or one collective, of one kind of layer."""

    name: str
    part: str
    forward_s: float
    """Of one layer and one micro batch, like the next two."""
    backward_s: float
    recompute_s: float
    """Its forward once more, where the plan recomputes it."""
    step_s: float
    """Forward and backward of all such layers of the stage and all micro batches."""
    step_recompute_s: float
    """What recomputation adds to that; the step counts it as recompute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """One kind of layer of the slowest stage."""

    layer: Layer
    count: int
    """Layers of this kind on the stage."""
    recomputed: float
    """How many of them the plan's recomputation is about; a mean where the first layers of a chunk are."""
    operators: tuple[OperatorRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRow:
    """Embedding, vision tower, or output layer and loss, of the slowest stage."""

    name: str
    forward_s: float
    """Of one micro batch."""
    backward_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One kind of call over one kind of group."""

    name: str
    kind: str
    """all-gather (a reduce-scatter costs the same), all-reduce, all-to-all or send."""
    ranks: int
    nodes: int
    """Nodes that the worst placed group touches."""
    sent_bytes: float
    """The whole tensor; with all-to-all and send, what one rank sends."""
    call_s: float
    """One call with nothing that hides it."""
    bytes_per_s: float
    """sent_bytes over call_s, latency included: the algorithm bandwidth of nccl-tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRow:
    """What the ranks of a group send each other at one moment of a step."""

    name: str
    moment: Moment | Literal["layers", "stages"]
    """When; layers: within every layer, between its kernels; stages: between model chunks on their stages."""
    times: int
    """How often a step has this moment, or how many micro batches."""
    calls: int
    """Collectives at one such moment, or of one micro batch."""
    shape: Group
    call: CollectiveRow
    """One of them."""
    moment_s: float
    """All calls of one moment, hidden or not."""
    moment_bytes: float
    """The tensors of all calls of one moment, as `call.sent_bytes` counts them."""

    @property
    def step_s(self) -> float:
        """All calls of a step, hidden or not."""
        return self.times * self.moment_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimeRow:
    """Pipeline stages that take the same time."""

    stages: tuple[int, ...]
    layers: int
    forward_s: float
    """Of one micro batch."""
    backward_s: float
    """Of one micro batch, recomputation included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBreakdown:
    """The time of a step, term by term."""

    microbatches: int
    stages: tuple[StageTimeRow, ...]
    slowest: int
    """The stage that the others wait for; what follows is of it."""
    layers: tuple[LayerTimes, ...]
    ends: tuple[EndRow, ...]
    data_parallel: tuple[TimeRow, ...]
    """What backward and forward do not hide."""
    gradients_s: float
    """All of the gradient reduction, hidden or not."""
    weights_s: float
    """All of the weight gathering, hidden or not."""
    optimizer: tuple[TimeRow, ...]
    other: tuple[TimeRow, ...]
    """Parts that are one term: the bubble and the sends of the pipeline, DPO's reference model."""
    collectives: tuple[CollectiveRow, ...]
    flows: tuple[FlowRow, ...]
    """All that a rank of the slowest stage sends in a step."""

    @property
    def rows(self) -> tuple[TimeRow, ...]:
        """Every term once."""
        operators = [row for times in self.layers for row in times.operators]
        return (
            *(TimeRow(part=row.part, name=row.name, step_s=row.step_s) for row in operators),
            *(TimeRow(part="recompute", name=row.name, step_s=row.step_recompute_s) for row in operators),
            *(TimeRow(part="ends", name=row.name, step_s=row.step_s) for row in self.ends),
            *self.data_parallel,
            *self.optimizer,
            *self.other,
        )


_SPLIT = (*PARTS, "recompute", "ends", "dp_comm", "optimizer")
"""Parts that have rows of their own; the others are one term."""


def time_breakdown(spec: Spec, plan: Plan) -> TimeBreakdown:
    """The terms of `plan.time`."""
    model, cluster, job, layout = spec.model, spec.cluster, spec.job, plan.layout
    microbatches = layout.gradient_accumulation_steps
    chunks = stages_of(model, job, layout)
    case = case_of(spec, layout.backend)
    work = pipeline_work(case, layout)
    times, slowest, shard = work.stages, work.rank, work.times.shard

    layers = _layers_of(model, chunks[slowest], layout.recompute)
    operators = {layer: layer_operators(case, layer, shard) for layer in layers}
    told = data_parallel(case, layout, times[slowest], slowest)
    exposed = [("gradients, not hidden", told.exposed_reduce_s), ("weights, not hidden", told.exposed_gather_s)]
    exposed += [(name, one.call_s) for name, one in told.afterwards]
    calls = [(one.name, one.collective) for table in operators.values() for one in table if one.collective]
    # DPO's reference model sees every micro batch too, forward only.
    forwards = 2 if job.stage == "dpo" else 1
    send = pipeline_send(case, layout, shard)
    calls += [("stage to stage", send)]
    calls += [(f"{kind} gradients of a step", one) for kind, one in told.reduces]
    calls += [(f"{kind} weights of a step", one) for kind, one in told.gathers]
    calls += told.afterwards
    return TimeBreakdown(
        microbatches=microbatches,
        stages=_merged(
            [
                StageTimeRow(
                    stages=(rank,),
                    layers=sum(chunk.num_layers + chunk.mtp_layers for chunk in chunks[rank]),
                    forward_s=sum(time.forward_s),
                    backward_s=sum(time.backward_s),
                )
                for rank, time in enumerate(times)
            ]
        ),
        slowest=slowest,
        layers=tuple(
            LayerTimes(
                layer=layer,
                count=count,
                recomputed=recomputed,
                operators=tuple(
                    _operator_row(one, layout.recompute, microbatches * count, microbatches * recomputed)
                    for one in operators[layer]
                ),
            )
            for layer, (count, recomputed) in layers.items()
        ),
        ends=tuple(
            EndRow(name=name, forward_s=forward, backward_s=backward, step_s=microbatches * (forward + backward))
            for chunk in chunks[slowest]
            for name, forward, backward in chunk_ends(case, chunk, work.times)
        ),
        data_parallel=tuple(
            TimeRow(part="dp_comm", name=name, step_s=seconds) for name, seconds in exposed if seconds > 0
        ),
        gradients_s=sum(one.call_s for _, one in told.reduces),
        weights_s=sum(one.call_s for _, one in told.gathers),
        optimizer=tuple(
            TimeRow(part="optimizer", name=name, step_s=seconds)
            for name, seconds in optimizer_time(case, layout, slowest)
        ),
        other=tuple(
            TimeRow(part=part, name=part, step_s=seconds)
            for part, seconds in plan.time.parts_s.items()
            if part not in _SPLIT
        ),
        # Equal calls of several kinds of layer are one.
        collectives=tuple(
            dict.fromkeys(collective_row(name, call, cluster) for name, call in calls if call.group.size > 1)
        ),
        flows=tuple(
            _flow_row(one, cluster)
            for one in (
                *_layer_flows(layers, operators, layout.recompute, microbatches, forwards),
                *_stage_flows(layout, slowest, microbatches, forwards, send),
                *_step_flows(told),
            )
            if one.call.group.size > 1
        ),
    )


def _layers_of(model: Model, chunks: tuple[Chunk, ...], recompute: Recompute) -> dict[Layer, tuple[int, float]]:
    """The distinct layers of a stage: how many there are, and how many its recompute mode is about."""
    kinds: dict[Layer, tuple[int, float]] = {}
    for chunk in chunks:
        for layer, number in chunk_layers(model, chunk):
            count, recomputed = kinds.get(layer, (0, 0.0))
            kinds[layer] = (count + number, recomputed + number * recomputed_share(chunk, layer, recompute))
    return kinds


def _operator_row(operator: Operator, recompute: Recompute, times: float, again: float) -> OperatorRow:
    """`times` and `again`: how often a step runs it, and how often it may run once more."""
    repeated = operator.recompute_s(recompute)
    return OperatorRow(
        name=operator.name,
        part=operator.part,
        forward_s=operator.forward_s,
        backward_s=operator.backward_s,
        recompute_s=repeated,
        step_s=times * (operator.forward_s + operator.backward_s),
        step_recompute_s=again * repeated,
    )


@dataclass(frozen=True, slots=True)
class _Flow:
    """Calls of one kind at one moment of a step."""

    name: str
    moment: Moment | Literal["layers", "stages"]
    times: int
    calls: float
    call: Collective


def _layer_flows(
    layers: dict[Layer, tuple[int, float]],
    operators: dict[Layer, tuple[Operator, ...]],
    recompute: Recompute,
    microbatches: int,
    forwards: int,
) -> Iterator[_Flow]:
    calls: dict[tuple[str, Collective], float] = {}
    for layer, (count, recomputed) in layers.items():
        for one in operators[layer]:
            if one.collective is None:
                continue
            again = recomputed * one.collective.forward_calls * one.is_repeated(recompute)
            number = count * (forwards * one.collective.forward_calls + one.collective.backward_calls) + again
            calls[one.name, one.collective] = calls.get((one.name, one.collective), 0.0) + number
    for (name, call), number in calls.items():
        yield _Flow(name, "layers", microbatches, number, call)


def _stage_flows(layout: Layout, rank: int, microbatches: int, forwards: int, send: Collective) -> Iterator[_Flow]:
    """Hidden states to the stage behind, their gradients to the one before; the ends of the model send one way."""
    calls = forwards * (layout.vpp - (rank == layout.pp - 1)) + layout.vpp - (rank == 0)
    yield _Flow("stage to stage", "stages", microbatches, calls, send)


def _step_flows(told: DataParallel) -> Iterator[_Flow]:
    for kind, one in told.reduces:
        is_sharded = one.kind != "all-reduce"
        call = replace(one, kind="reduce-scatter") if is_sharded else one
        yield _Flow(f"{kind} gradients" + (" to their shards" if is_sharded else ""), "last", 1, 1.0, call)
    for kind, one in told.gathers:
        yield _Flow(f"{kind} weights after the step", "after", 1, 1.0, one)
    for name, one in told.afterwards:
        yield _Flow(f"gradients of {name}", "last", 1, 1.0, one)


def _flow_row(flow: _Flow, cluster: Cluster) -> FlowRow:
    return FlowRow(
        name=flow.name,
        moment=flow.moment,
        times=flow.times,
        calls=round(flow.calls),
        shape=flow.call.group,
        call=collective_row(flow.name, flow.call, cluster),
        moment_s=flow.calls * flow.call.call_s,
        moment_bytes=flow.calls * flow.call.sent_bytes,
    )


def collective_row(name: str, call: Collective, cluster: Cluster) -> CollectiveRow:
    """One call, with the nodes that it touches and its algorithm bandwidth."""
    return CollectiveRow(
        name=name,
        kind=call.kind,
        ranks=call.group.size,
        nodes=span(call.group, cluster.gpus_per_node).domains,
        sent_bytes=call.sent_bytes,
        call_s=call.call_s,
        bytes_per_s=call.sent_bytes / call.call_s if call.call_s else 0.0,
    )


def _merged(rows: list[StageTimeRow]) -> tuple[StageTimeRow, ...]:
    """Stages that follow each other and take the same, as one row."""
    runs = runs_of(rows, lambda row: (row.layers, row.forward_s, row.backward_s))
    return tuple(replace(run[0], stages=tuple(stage for row in run for stage in row.stages)) for run in runs)
