"""Where each second of a step goes in a plan that splits data alone: the terms of `engines/data_parallel/step.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from topoplan.engines.data_parallel.step import (
    Flow,
    LayerPass,
    Moment,
    ShardedTerms,
    sharded_shard,
    sharded_terms,
    tuning_of,
)
from topoplan.layout.layout import Layout
from topoplan.operators.eager_compute import eager_operators
from topoplan.operators.te_compute import Collective, Operator
from topoplan.planner.case import case_of
from topoplan.planner.plan import Plan
from topoplan.planner.time_breakdown import (
    EndRow,
    FlowRow,
    LayerTimes,
    OperatorRow,
    TimeRow,
    collective_row,
)
from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu_profile import Profile, profile_of
from topoplan.specs.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTimeBreakdown:
    """The time of a step of a plan that splits data alone, term by term."""

    microbatches: int
    forward_s: float
    """Work of one micro batch, without what is sent beside it."""
    backward_s: float
    """The same, with what is recomputed."""
    layers: tuple[LayerTimes, ...]
    """Kinds of layers; frozen ones before all trained ones have no backward."""
    ends: tuple[EndRow, ...]
    communication: tuple[TimeRow, ...]
    """What backward and forward do not hide of weights and gradients."""
    flows: tuple[FlowRow, ...]
    """Weights and gradients, hidden or not."""
    collectives: tuple[FlowRow, ...]
    """Calls within a layer: those of Ulysses, or of ring attention."""
    offload: tuple[TimeRow, ...]
    copied_s: float
    """All copies over PCIe of a step, hidden or not."""
    optimizer: tuple[TimeRow, ...]
    other: tuple[TimeRow, ...]
    """Waiting for the host's launches, and DPO's reference model."""

    @property
    def sent_s(self) -> float:
        """All communication of weights and gradients in a step, hidden or not."""
        return sum(row.step_s for row in self.flows)

    @property
    def rows(self) -> tuple[TimeRow, ...]:
        """Every term once."""
        operators = [row for times in self.layers for row in times.operators]
        return (
            *(TimeRow(part=row.part, name=row.name, step_s=row.step_s) for row in operators),
            *(TimeRow(part="recompute", name=row.name, step_s=row.step_recompute_s) for row in operators),
            *(TimeRow(part="ends", name=row.name, step_s=row.step_s) for row in self.ends),
            *self.communication,
            *self.offload,
            *self.optimizer,
            *self.other,
        )


def _ends(terms: ShardedTerms) -> Iterator[EndRow]:
    """What stands before and behind the layers."""
    tower, all_ends = terms.passes.vision_s, terms.passes.ends_s
    rest = all_ends[0] - tower[0], all_ends[1] - tower[1]
    for name, (ahead, back) in (("vision tower", tower), ("embedding, output layer, loss", rest)):
        if ahead:
            yield EndRow(name=name, forward_s=ahead, backward_s=back, step_s=terms.count * (ahead + back))


def sharded_time_breakdown(spec: Spec, plan: Plan) -> ShardedTimeBreakdown:
    """The terms of `plan.time`."""
    layout, profile = plan.layout, profile_of(spec.cluster.gpu, spec.profile)
    case = case_of(spec, layout.backend)
    terms = sharded_terms(case, layout)
    layers, calls = _layers(spec, layout, profile, terms)
    return ShardedTimeBreakdown(
        microbatches=terms.count,
        forward_s=terms.passes.forward_s,
        backward_s=terms.passes.backward_s,
        layers=layers,
        ends=tuple(_ends(terms)),
        communication=tuple(_rows("dp_comm", _exposed(terms))),
        flows=tuple(_flow_row(flow, terms.count, spec.cluster) for flow in terms.traffic.flows),
        collectives=calls,
        offload=tuple(
            _rows(
                "offload",
                [
                    ("copies over PCIe, not hidden", terms.count * terms.exposed_copied_s),
                    ("weights back over PCIe", terms.copied_after_s),
                ],
            )
        ),
        copied_s=terms.count * terms.copied_s + terms.copied_after_s,
        optimizer=tuple(
            _rows(
                "optimizer",
                [
                    ("Adam on the host" if terms.adam_on_host else "Adam", terms.adam_s),
                    ("host work of a step", terms.overhead_s),
                ],
            )
        ),
        other=(
            *_rows("host launches", [("host launches", terms.count * terms.waited_s)]),
            *_rows("reference", [("reference", terms.reference_s)]),
        ),
    )


def _rows(part: str, terms: list[tuple[str, float]]) -> Iterator[TimeRow]:
    for name, seconds in terms:
        if seconds > 0.0:
            yield TimeRow(part=part, name=name, step_s=seconds)


def _exposed(terms: ShardedTerms) -> list[tuple[str, float]]:
    traffic, count = terms.traffic, terms.count

    def named(moment: Moment) -> str:
        # "weights for backward and gradients to their shards": what is sent, and not what becomes of it.
        return " and ".join(dict.fromkeys(flow.name.split()[0] for flow in traffic.flows if flow.moment == moment))

    return [
        (f"{named('forward')} in forward, not hidden", count * terms.exposed_forward_s),
        (f"{named('backward')} in backward, not hidden", count * terms.exposed_backward_s),
        (f"{named('last')} in the last backward, not hidden", terms.exposed_last_s),
        ("copies into and out of buffers", count * traffic.copies_s),
        ("weights after the step", traffic.seconds("after")),
    ]


def _flow_row(flow: Flow, count: int, cluster: Cluster) -> FlowRow:
    size, seconds = flow.sent_bytes / flow.calls, flow.seconds / flow.calls
    call = Collective(flow.kind, flow.group, size, seconds)
    return FlowRow(
        name=flow.name,
        moment=flow.moment,
        times=count if flow.moment in ("forward", "backward") else 1,
        calls=flow.calls,
        shape=flow.group,
        call=collective_row(flow.name, call, cluster),
        moment_s=flow.seconds,
        moment_bytes=flow.sent_bytes,
    )


def _layers(
    spec: Spec, layout: Layout, profile: Profile, terms: ShardedTerms
) -> tuple[tuple[LayerTimes, ...], tuple[FlowRow, ...]]:
    """(the kinds of layers operator by operator, the collectives among them)."""
    case = case_of(spec, layout.backend)
    shard, tuning = sharded_shard(case, layout), tuning_of(spec.job, layout)
    calls: dict[tuple[str, Collective], float] = {}
    found = []
    for one in _kinds(terms.passes.layers):
        operators, _ = eager_operators(case, one.layer, one.use, shard, tuning)
        rows = tuple(_operator_row(operator, one, terms.count) for operator in operators)
        found.append(LayerTimes(layer=one.layer, count=one.count, recomputed=one.count * one.repeated, operators=rows))
        for operator in operators:
            if operator.collective is not None:
                key = (operator.name, operator.collective)
                calls[key] = calls.get(key, 0.0) + one.count * (
                    operator.collective.forward_calls * (1 + one.repeated)
                    + operator.collective.backward_calls * one.has_backward
                )
    return tuple(found), tuple(
        FlowRow(
            name=name,
            moment="layers",
            times=terms.count,
            calls=round(number),
            shape=call.group,
            call=collective_row(name, call, spec.cluster),
            moment_s=number * call.call_s,
            moment_bytes=number * call.sent_bytes,
        )
        for (name, call), number in calls.items()
    )


def _kinds(passes: tuple[LayerPass, ...]) -> list[LayerPass]:
    """Equal ones that follow each other as one."""
    kinds: list[LayerPass] = []
    for one in passes:
        if kinds and replace(kinds[-1], count=one.count) == one:
            kinds[-1] = replace(one, count=kinds[-1].count + one.count)
        else:
            kinds.append(one)
    return kinds


def _operator_row(operator: Operator, one: LayerPass, microbatches: int) -> OperatorRow:
    backward = operator.backward_s if one.has_backward else 0.0
    repeated = one.repeated * operator.forward_s
    times = microbatches * one.count
    return OperatorRow(
        name=operator.name,
        part=operator.part,
        forward_s=operator.forward_s,
        backward_s=backward,
        recompute_s=repeated,
        step_s=times * (operator.forward_s + backward),
        step_recompute_s=times * repeated,
    )
