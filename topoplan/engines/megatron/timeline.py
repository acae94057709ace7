"""The step of a layout under Megatron-core, as every pipeline rank sees it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from topoplan.engines.megatron.simulate import simulate
from topoplan.engines.megatron.step import DataParallel, StepTerms, data_parallel, step_terms
from topoplan.engines.megatron.time_account import layer_counts
from topoplan.engines.prediction import Time
from topoplan.engines.timeline import BACKWARD, FORWARD, RECOMPUTE, CommunicationSpans, Event, Phase, Timeline
from topoplan.layout.layout import Layout, stages_of
from topoplan.layout.stages import Chunk
from topoplan.operators.shard import Shard
from topoplan.operators.times import layer_kernels
from topoplan.specs.case import Case

LAYERS, REDUCE, GATHER = "layer collectives", "gradient reduce", "parameter gather"


def timeline(case: Case, layout: Layout, time: Time) -> Timeline:
    """Simulate the pipeline, and add what all ranks do before and after it.

    There, all ranks are drawn like the slowest one, as in the predicted step: its gradients are reduced, the norm of
    all gradients makes every rank wait, and weights are updated and gathered.
    """
    terms = step_terms(case, layout)
    stages = terms.work.stages
    run = simulate(
        [stage.forward_s for stage in stages],
        [stage.backward_s for stage in stages],
        terms.work.microbatches,
        p2p_s=terms.message_s,
        recompute_s=[stage.recompute_s for stage in stages],
    )
    states = data_parallel(case, layout, stages)
    start = terms.reference_s
    phases = [Phase(name="reference", start_s=0.0, end_s=start)]
    end = start + run.total_s
    for name, seconds in (
        (REDUCE, states.exposed_s - states.exposed_gather_s),
        ("optimizer", time.parts_s["optimizer"]),
        (GATHER, states.exposed_gather_s),
    ):
        phases.append(Phase(name=name, start_s=end, end_s=end + seconds))
        end += seconds
    events = run.events
    if start:
        events = tuple(replace(one, start_s=start + one.start_s, end_s=start + one.end_s) for one in events)
    communications = (_in_layers(case, layout, terms, events), _of_states(states, start, phases))
    return Timeline(
        ranks=layout.pp,
        chunks=layout.vpp,
        microbatches=terms.work.microbatches,
        events=events,
        phases=tuple(phase for phase in phases if phase.end_s > phase.start_s),
        pipeline_start_s=start,
        pipeline_end_s=start + run.total_s,
        total_s=end,
        closed_form_s=terms.pipeline_s,
        communications=tuple(communication for communication in communications if communication.spans),
    )


def _in_layers(case: Case, layout: Layout, terms: StepTerms, events: Iterable[Event]) -> CommunicationSpans:
    """Return the collectives of tensor, context and expert parallelism, spread evenly over the layers of each pass."""
    rank = terms.work.rank
    chunks = stages_of(case.model, case.job, layout)[rank]
    seconds = [_seconds_in(case, layout, terms.work.times.shard, chunk) for chunk in chunks]
    spans: list[Phase] = []
    for event in events:
        sent_s = seconds[event.chunk].get(event.kind, 0.0) if event.rank == rank else 0.0
        if sent_s > 0.0:
            layers = max(1, chunks[event.chunk].num_layers + chunks[event.chunk].mtp_layers)
            each_s = (event.end_s - event.start_s) / layers
            ends = [event.start_s + number * each_s for number in range(1, layers + 1)]
            spans += [Phase(name=LAYERS, start_s=end - sent_s / layers, end_s=end) for end in ends]
    return CommunicationSpans(name="in layers", rank=rank, spans=tuple(spans))


def _seconds_in(case: Case, layout: Layout, shard: Shard, chunk: Chunk) -> dict[str, float]:
    """Return the seconds of all collectives in a chunk's layers per pass of a micro-batch, by kind of event."""
    seconds = dict.fromkeys((FORWARD, RECOMPUTE, BACKWARD), 0.0)
    for layer, (count, recomputed) in layer_counts(case, layout, (chunk,)).items():
        for one in layer_kernels(case, layer, shard):
            if (call := one.collective) is not None and call.group.size > 1:
                forward_s = call.forward_calls * call.call_s
                seconds[FORWARD] += count * forward_s
                seconds[RECOMPUTE] += recomputed * forward_s * one.is_repeated(layout.recompute)
                seconds[BACKWARD] += count * call.backward_calls * call.call_s
    return seconds


def _of_states(states: DataParallel, start_s: float, phases: Iterable[Phase]) -> CommunicationSpans:
    """Return the collectives of gradients and weights.

    The hidden part of the reductions is drawn at the end of the pipeline, the hidden part of the gathers at its start.
    """
    alone = {phase.name: phase for phase in phases}
    reduce, gather = alone[REDUCE], alone[GATHER]
    hidden_reduce_s = sum(one.call_s for _, one in states.reduces) - states.exposed_reduce_s
    hidden_gather_s = sum(one.call_s for _, one in states.gathers) - states.exposed_gather_s
    spans = (
        # Gathers the weights that the previous step has updated.
        Phase(name=GATHER, start_s=start_s, end_s=start_s + hidden_gather_s),
        replace(reduce, start_s=reduce.start_s - hidden_reduce_s),
        gather,
    )
    return CommunicationSpans(
        name="of states", rank=states.rank, spans=tuple(one for one in spans if one.end_s > one.start_s)
    )
