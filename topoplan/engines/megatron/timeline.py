"""The step of a layout under Megatron-core, as every pipeline rank sees it."""

from __future__ import annotations

from dataclasses import replace

from topoplan.engines.megatron.simulate import simulate
from topoplan.engines.megatron.step import data_parallel, step_terms
from topoplan.engines.prediction import Time
from topoplan.engines.timeline import Phase, Timeline
from topoplan.layout.layout import Layout
from topoplan.specs.case import Case


def timeline(case: Case, layout: Layout, time: Time) -> Timeline:
    """Simulate the pipeline, and put before and behind it what all ranks do.

    There all ranks are drawn as the busiest one, whose times the predicted step has: its gradients are reduced, the
    norm of all gradients makes every rank wait, weights are updated and gathered.
    """
    terms = step_terms(case, layout)
    stages, rank = terms.work.stages, terms.work.rank
    run = simulate(
        [stage.forward_s for stage in stages],
        [stage.backward_s for stage in stages],
        terms.work.microbatches,
        p2p_s=terms.message_s,
        recompute_s=[stage.recompute_s for stage in stages],
    )
    talk = data_parallel(case, layout, stages[rank], rank)
    start, events = terms.reference_s, run.events
    if start:
        events = tuple(replace(one, start_s=start + one.start_s, end_s=start + one.end_s) for one in events)
    phases = [Phase(name="reference", start_s=0.0, end_s=start)]
    end = start + run.total_s
    for name, seconds in (
        ("gradient reduce", talk.exposed_s - talk.exposed_gather_s),
        ("optimizer", time.parts_s["optimizer"]),
        ("parameter gather", talk.exposed_gather_s),
    ):
        phases.append(Phase(name=name, start_s=end, end_s=end + seconds))
        end += seconds
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
    )
