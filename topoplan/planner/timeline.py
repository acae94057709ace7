"""One optimizer step: as every pipeline rank sees it, with what is before and after the simulated pipeline, or,
where data alone is split, as one GPU with its links and its host does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from topoplan.engines.megatron.simulate import Event, simulate
from topoplan.engines.megatron.step import data_parallel, step_terms
from topoplan.planner.case import case_of
from topoplan.planner.plan import Plan
from topoplan.planner.sharded_timeline import ShardedRun, sharded_run
from topoplan.specs.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What all ranks do before or after the pipeline."""

    name: str
    """reference, gradient reduce, optimizer or parameter gather."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One optimizer step; all times are seconds from its start."""

    ranks: int
    """Pipeline ranks, or lanes."""
    chunks: int
    """Model chunks of a rank."""
    microbatches: int
    events: tuple[Event, ...]
    """Of the pipeline, by rank, then in time."""
    phases: tuple[Phase, ...]
    """Before and after the pipeline, in time. What the gradients and the weights take there is what is not hidden."""
    pipeline_start_s: float
    pipeline_end_s: float
    total_s: float
    closed_form_s: float
    """Seconds of the pipeline as the ranking has them."""
    fill_s: float
    """From the start of the step until every rank has run its first backward."""
    drain_s: float
    """Of the last forward of the rank that ends its forwards first; the step's end is behind it."""
    busy: tuple[Mapping[str, float], ...]
    """By rank: seconds by kind of event, and `idle`, which together are the pipeline's."""
    lanes: tuple[str, ...] = ()
    """Where data alone is split: the parts of a GPU and its host that `rank` counts, and the pipeline is all the step;
    else empty."""

    @property
    def pipeline_s(self) -> float:
        """Seconds of the simulated pipeline."""
        return self.pipeline_end_s - self.pipeline_start_s

    @property
    def deviation(self) -> float:
        """The closed form over the simulation, less one."""
        return self.closed_form_s / self.pipeline_s - 1.0

    def idle_share(self, rank: int) -> float:
        """Share of the pipeline's time in which a rank has nothing to do: its bubble."""
        return self.busy[rank]["idle"] / self.pipeline_s


def timeline(spec: Spec, plan: Plan) -> Timeline:
    """Simulate the step of a plan.

    Where data alone is split, all GPUs do the same: it is drawn as one of them, what it sends and what its host does.
    Before and after the pipeline all ranks are drawn as the busiest one, whose times the predicted step has: its
    gradients are reduced, the norm of all gradients makes every rank wait, weights are updated and gathered.
    """
    if not plan.layout.is_megatron:
        return _of_lanes(plan, sharded_run(spec, plan))
    layout = plan.layout
    case = case_of(spec, layout.backend)
    terms = step_terms(case, layout)
    stages, rank, microbatches = terms.work.stages, terms.work.rank, terms.work.microbatches
    forward = [stage.forward_s for stage in stages]
    backward = [stage.backward_s for stage in stages]
    run = simulate(
        forward, backward, microbatches, p2p_s=terms.message_s, recompute_s=[stage.recompute_s for stage in stages]
    )
    told = data_parallel(case, layout, stages[rank], rank)
    start = plan.time.parts_s.get("reference", 0.0)
    phases = [Phase(name="reference", start_s=0.0, end_s=start)]
    end = start + run.total_s
    for name, seconds in (
        ("gradient reduce", told.exposed_s - told.exposed_gather_s),
        ("optimizer", plan.time.parts_s["optimizer"]),
        ("parameter gather", told.exposed_gather_s),
    ):
        phases.append(Phase(name=name, start_s=end, end_s=end + seconds))
        end += seconds
    events = tuple(
        Event(
            rank=event.rank,
            chunk=event.chunk,
            microbatch=event.microbatch,
            kind=event.kind,
            start_s=start + event.start_s,
            end_s=start + event.end_s,
        )
        for event in run.events
    )
    first_backward = [run.total_s + start] * layout.pp
    last_forward = [start] * layout.pp
    for event in events:
        if event.kind == "backward":
            first_backward[event.rank] = min(first_backward[event.rank], event.end_s)
        elif event.kind == "forward":
            last_forward[event.rank] = max(last_forward[event.rank], event.start_s)
    return Timeline(
        ranks=layout.pp,
        chunks=layout.vpp,
        microbatches=microbatches,
        events=events,
        phases=tuple(phase for phase in phases if phase.end_s > phase.start_s),
        pipeline_start_s=start,
        pipeline_end_s=start + run.total_s,
        total_s=end,
        closed_form_s=terms.pipeline_s,
        fill_s=max(first_backward),
        drain_s=min(last_forward),
        busy=_busy(events, layout.pp, run.total_s),
    )


def _busy(events: tuple[Event, ...], ranks: int, total_s: float) -> tuple[dict[str, float], ...]:
    """Seconds of every rank by kind of event, and what is left of the total."""
    busy: list[dict[str, float]] = [{} for _ in range(ranks)]
    for event in events:
        mine = busy[event.rank]
        mine[event.kind] = mine.get(event.kind, 0.0) + event.end_s - event.start_s
    for mine in busy:
        mine["idle"] = max(0.0, total_s - sum(mine.values()))
    return tuple(busy)


def _of_lanes(plan: Plan, run: ShardedRun) -> Timeline:
    backward = [event.end_s for event in run.events if event.kind == "backward" and event.microbatch == 0]
    last = plan.layout.gradient_accumulation_steps - 1
    forward = [event.start_s for event in run.events if event.kind == "forward" and event.microbatch == last]
    return Timeline(
        ranks=len(run.lanes),
        chunks=1,
        microbatches=last + 1,
        events=run.events,
        phases=(),
        pipeline_start_s=0.0,
        pipeline_end_s=run.total_s,
        total_s=run.total_s,
        closed_form_s=plan.time.step_s,
        fill_s=max(backward),
        drain_s=min(forward),
        busy=_busy(run.events, len(run.lanes), run.total_s),
        lanes=run.lanes,
    )
