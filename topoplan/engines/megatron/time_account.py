"""Where the time of a step under Megatron-core goes, as a tree."""

from __future__ import annotations

from collections.abc import Iterator

from topoplan.engines.account import (
    BANDS,
    Flow,
    FlowMoment,
    TimeAccount,
    by_part,
    end_term,
    merged_stages,
    operator_term,
    sent_in_layers,
)
from topoplan.engines.megatron.microbatch import StageTime, chunk_ends, recomputed_share, stage_time
from topoplan.engines.megatron.pipeline import schedule_s
from topoplan.engines.megatron.states import chunk_layers
from topoplan.engines.megatron.step import (
    DataParallel,
    PipelineWork,
    data_parallel,
    optimizer_time,
    pipeline_send,
    pipeline_work,
    predict_time,
    step_terms,
)
from topoplan.engines.prediction import Time
from topoplan.layout.layout import Layout, stages_of
from topoplan.layout.stages import Chunk
from topoplan.operators.machine import Kernel
from topoplan.operators.op import Collective
from topoplan.operators.times import layer_kernels, layer_time
from topoplan.specs.case import Case
from topoplan.specs.model import Layer, layer_kind
from topoplan.terms import Term, source_of, sum_of

_WHAT = {
    "gemm": "linear layers",
    "attention": "attention kernels",
    "elementwise": "norms, activations, routing: bound by memory",
    "tp_comm": "tensor parallel, what GEMMs do not hide",
    "cp_comm": "context parallel, what attention does not hide",
    "ep_comm": "expert parallel: dispatch and combine",
    "recompute": "forward work that backward repeats",
}
_PIPELINE = {
    "pp_bubble": ("waiting for other stages", source_of(schedule_s, "arXiv 2104.04473, section 2.2")),
    "reference": ("the reference model, forward only", source_of(step_terms, "mcore_adapter trainer/dpo_trainer.py")),
    "pp_comm": (
        "what messages between stages add",
        source_of(pipeline_send, "Megatron pipeline_parallel/schedules.py"),
    ),
}


def time_account(case: Case, layout: Layout, time: Time) -> TimeAccount:
    """Return the terms of `time`."""
    chunks, work = stages_of(case.model, case.job, layout), pipeline_work(case, layout)
    kinds = layer_counts(case, layout, chunks[work.rank])
    operators = {layer: layer_kernels(case, layer, work.times.shard) for layer in kinds}
    layers = tuple(_layer_term(layout, work, layer, *counts, operators[layer]) for layer, counts in kinds.items())
    communication = data_parallel(case, layout, work.stages)
    optimizer_source = source_of(optimizer_time, "Megatron optimizer/distrib_optimizer.py")
    parts = [
        *by_part(layers, _WHAT, source_of(layer_time, "arXiv 2205.05198, section 5")),
        _ends(case, chunks[work.rank], work),
        *(
            Term(name, time.parts_s.get(name, 0.0), "s", source, what=what)
            for name, (what, source) in _PIPELINE.items()
        ),
        _exposed(communication),
        sum_of(
            "optimizer",
            [Term(name, seconds, "s", optimizer_source) for name, seconds in optimizer_time(case, layout)],
            optimizer_source,
            "s",
            what="gradient norm, Adam, host work",
        ),
    ]
    return TimeAccount(
        step=sum_of("step", parts, source_of(predict_time, BANDS), "s"),
        microbatches=work.microbatches,
        slowest_stage=work.rank,
        stages=merged_stages(
            (_stage_term(rank, chunks[rank], one) for rank, one in enumerate(work.stages)),
            lambda one: (one.facts["layers"], *(child.value for child in one.children)),
        ),
        layers=layers,
        sent=tuple(_sent(case, layout, work, kinds, operators, communication)),
    )


def layer_counts(case: Case, layout: Layout, chunks: tuple[Chunk, ...]) -> dict[Layer, tuple[int, float]]:
    """Return the distinct layers of some chunks: (their number, the number that the recompute mode applies to)."""
    kinds: dict[Layer, tuple[int, float]] = {}
    for chunk in chunks:
        for layer, number in chunk_layers(case.model, chunk):
            count, recomputed = kinds.get(layer, (0, 0.0))
            share = recomputed_share(chunk, layer, layout.recompute)
            kinds[layer] = (count + number, recomputed + number * share)
    return kinds


def _layer_term(
    layout: Layout, work: PipelineWork, layer: Layer, count: int, recomputed: float, operators: tuple[Kernel, ...]
) -> Term:
    times, again = work.microbatches * count, work.microbatches * recomputed
    rows = [operator_term(one, times, again, one.recompute_s(layout.recompute)) for one in operators]
    facts = {"count": count, "recomputed": recomputed}
    return sum_of(layer_kind(layer), rows, source_of(layer_kernels), "s", times=times, facts=facts)


def _ends(case: Case, chunks: tuple[Chunk, ...], work: PipelineWork) -> Term:
    """Return what runs before and after the layers of a stage."""
    source = source_of(chunk_ends, "Megatron tensor_parallel/layers.py, cross_entropy.py")
    rows = [
        end_term(name, forward, backward, work.microbatches, source)
        for chunk in chunks
        for name, forward, backward in chunk_ends(case, chunk, work.times)
    ]
    return sum_of("ends", rows, source, "s", what="embedding, output layer, loss, vision tower")


def _exposed(communication: DataParallel) -> Term:
    """Return the communication of gradients and weights that lengthens the step."""
    source = source_of(data_parallel, "Megatron param_and_grad_buffer.py, finalize_model_grads.py")
    rows = [
        ("gradients, not hidden", communication.exposed_reduce_s),
        ("weights, not hidden", communication.exposed_gather_s),
        *((name, one.call_s) for name, one in communication.afterwards),
    ]
    terms = [Term(name, seconds, "s", source) for name, seconds in rows]
    return sum_of("dp_comm", terms, source, "s", what="gradients and weights, what is not hidden")


def _stage_term(rank: int, chunks: tuple[Chunk, ...], stage: StageTime) -> Term:
    source = source_of(stage_time)
    rows = [
        Term("forward", sum(stage.forward_s), "s", source),
        Term("backward", sum(stage.backward_s), "s", source),
    ]
    layers = sum(chunk.num_layers + chunk.mtp_layers for chunk in chunks)
    return sum_of("micro batch", rows, source, "s", facts={"stages": (rank,), "layers": layers})


def _sent(
    case: Case,
    layout: Layout,
    work: PipelineWork,
    kinds: dict[Layer, tuple[int, float]],
    operators: dict[Layer, tuple[Kernel, ...]],
    communication: DataParallel,
) -> Iterator[Flow]:
    """Yield everything that a rank of the slowest stage sends in a step."""
    # A reference model processes every micro-batch too, forward only.
    forwards, gpus = 1 + case.job.forwards_beside, case.cluster.gpus_per_node
    runs = (
        (one, count * forwards + recomputed * one.is_repeated(layout.recompute), count)
        for layer, (count, recomputed) in kinds.items()
        for one in operators[layer]
    )
    yield from sent_in_layers(runs, work.microbatches, gpus)
    # Hidden states to the next stage, their gradients to the previous one; the first and the last stage send one way
    # only.
    messages = forwards * (layout.vpp - (work.rank == layout.pp - 1)) + layout.vpp - (work.rank == 0)
    rows: list[tuple[str, FlowMoment, int, float, Collective]] = [
        ("stage to stage", "stages", work.microbatches, messages, pipeline_send(case, layout, work.times.shard)),
        *(
            (f"{kind} gradients", "last", 1, 1.0, one)
            if one.kind == "all-reduce"
            else (f"{kind} gradients to their shards", "last", 1, 1.0, one._replace(kind="reduce-scatter"))
            for kind, one in communication.reduces
        ),
        *((f"{kind} weights after the step", "after", 1, 1.0, one) for kind, one in communication.gathers),
        *((f"gradients of {name}", "last", 1, 1.0, one) for name, one in communication.afterwards),
    ]
    for name, moment, times, number, call in rows:
        if call.group.size > 1:
            yield Flow(name=name, moment=moment, times=times, number=number, call=call, gpus_per_node=gpus)
