"""Seconds of one optimizer step: micro-batches through the pipeline, then gradients, optimizer and weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from topoplan.engines.megatron.communicators import embedding_ranks
from topoplan.engines.megatron.microbatch import (
    MicroBatch,
    StageTime,
    micro_batch,
    pipeline_times,
    stage_parts,
)
from topoplan.engines.megatron.pipeline import schedule_s
from topoplan.engines.megatron.states import (
    REMAINDER_BYTES,
    adam_state_bytes,
    chunk_layers,
    distinct_ranks,
    keeps_own_weights,
    stage_parameters,
    states_in_copies,
)
from topoplan.engines.prediction import Time, band_interval
from topoplan.layout.layout import Layout, stages_of
from topoplan.network.collectives import all_gather_s, all_reduce_s, point_to_point_s
from topoplan.network.placement import Group, group
from topoplan.network.traffic import traffic
from topoplan.operators.adapters import adapters_of
from topoplan.operators.machine import elementwise_s
from topoplan.operators.op import BF16, FP32, PARTS, Collective
from topoplan.operators.params import padded_vocab_size, replicated_elements
from topoplan.operators.routing import is_routing_assumed
from topoplan.operators.shard import Shard
from topoplan.specs.case import Case
from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu_profile import WIDER_FOR_FEW, WIDEST, Profile, band_keys
from topoplan.specs.job import Job

HOST_ADAM_STEP_BYTES = 34
"""Bytes moved per element by fp32 Adam on the host, counted as in `adam_step_bytes`."""


class DataParallel(NamedTuple):
    """Communication among data-parallel ranks in a step."""

    rank: int
    """The pipeline rank whose gradients and weights are communicated."""
    reduces: tuple[tuple[str, Collective], ...]
    """Reductions of the gradients of `dense` weights and of `expert` weights."""
    gathers: tuple[tuple[str, Collective], ...]
    """All-gathers of the weights; empty without the distributed optimizer."""
    exposed_reduce_s: float
    """Seconds that the reductions add: what the backward of one micro-batch does not hide, and what it gets longer."""
    exposed_gather_s: float
    """Seconds that the all-gathers add: what the forward of one micro-batch does not hide, and what it gets longer."""
    tied: Collective | None
    """All-reduce of a tied embedding's gradients between first and last stage."""
    replicated: Collective | None = None
    """All-reduce of the gradients of adapters that every rank of a tensor-parallel group holds in full."""

    @property
    def exposed_s(self) -> float:
        """Seconds that the communication adds to the step."""
        return self.exposed_reduce_s + self.exposed_gather_s + sum(one.call_s for _, one in self.afterwards)

    @property
    def afterwards(self) -> tuple[tuple[str, Collective], ...]:
        """The all-reduces that come last and that nothing hides, by the weights whose gradients they sum."""
        calls = (("tied embedding", self.tied), ("replicated adapters", self.replicated))
        return tuple((name, one) for name, one in calls if one is not None)


def pipeline_send(case: Case, layout: Layout, shard: Shard) -> Collective:
    """Return one message between pipeline neighbors: the hidden states of a micro-batch, or their gradients.

    The tensor has local tokens x hidden elements in bf16. If a pipeline leaves a node, all its messages are assumed to
    be as slow as one between nodes.
    """
    model, cluster, profile = case.model, case.cluster, case.profile
    ranks, sent = group(layout, "pp"), BF16 * shard.local_tokens * model.hidden_size
    return Collective("send", ranks, sent, point_to_point_s(ranks, sent, cluster, profile))


@lru_cache(maxsize=1 << 12)
def _collectives(
    tensors: tuple[tuple[str, Group, int], ...],
    element_bytes: int,
    is_sharded: bool,
    cluster: Cluster,
    profile: Profile,
) -> tuple[tuple[str, Collective], ...]:
    """Return one call for each (name, ranks, elements).

    It is an all-reduce, or half of one (all-gather or reduce-scatter) if each rank keeps a shard.
    """
    kind, seconds = ("all-gather", all_gather_s) if is_sharded else ("all-reduce", all_reduce_s)
    return tuple(
        (name, Collective(kind, ranks, whole := element_bytes * size, seconds(ranks, whole, cluster, profile)))
        for name, ranks, size in tensors
        if size
    )


def data_parallel(case: Case, layout: Layout, stages: Sequence[StageTime]) -> DataParallel:
    """Return the communication of the pipeline rank that takes longest.

    The norm of all gradients makes every rank wait for it.
    """
    ranks = _rank_calls(case, _without_step(layout))
    found = [_data_parallel(case, layout, stages[calls.rank], calls) for calls in ranks]
    return max(found, key=lambda one: one.exposed_s)


def _without_step(layout: Layout) -> Layout:
    """Return the layout without micro-batch, sequence parallelism and recompute mode, which many layouts share."""
    return Layout(backend=layout.backend, degrees=layout.degrees, states=layout.states, switches=layout.switches)


_Calls = tuple[tuple[str, Collective], ...]


class _RankCalls(NamedTuple):
    """What one pipeline rank communicates with its data-parallel ranks in a step, regardless of its micro-batches."""

    rank: int
    reduces: _Calls
    reduce_s: float
    gathers: _Calls
    gather_s: float
    tied: Collective | None
    layers: int
    """Layers of the rank; 1 if it has none."""


def _data_parallel(case: Case, layout: Layout, stage: StageTime, calls: _RankCalls) -> DataParallel:
    """Return a rank's data-parallel communication, with what one micro-batch's forward and backward leave exposed.

    Collectives of the layers use the same links if the data-parallel ranks are within a domain; nothing is hidden while
    they do.
    """
    switches, waits = layout.switches, stage.collectives_s
    hidden_gather = switches.overlap_param_gather and switches.overlap_grad_reduce
    if traffic(group(layout, "dp_cp"), "ring", case.cluster).between:
        waits = (0.0, 0.0)

    def exposed(communication: float, work: float, *, is_hidden: bool) -> float:
        if not is_hidden:
            return communication
        # The last bucket has nothing left to hide behind; its share is that of one layer.
        left = max(communication - work, communication / calls.layers)
        return left + case.profile.overlap_interference * (communication - left)

    return DataParallel(
        calls.rank,
        calls.reduces,
        calls.gathers,
        exposed(calls.reduce_s, sum(stage.backward_s) - waits[1], is_hidden=switches.overlap_grad_reduce),
        exposed(calls.gather_s, sum(stage.forward_s) - waits[0], is_hidden=hidden_gather),
        calls.tied,
        _replicated_adapters(case, layout, calls.rank),
    )


@lru_cache(maxsize=1 << 12)
def _rank_calls(case: Case, layout: Layout) -> tuple[_RankCalls, ...]:
    """Return a rank's gradient reductions, weight gathers and tied embedding's all-reduce, for each distinct rank."""
    cluster, profile, stages = case.cluster, case.profile, stages_of(case.model, case.job, layout)
    gradient = FP32 if layout.grad_reduce_in_fp32 else BF16
    tied, dense, expert = _tied_embedding(case, layout), group(layout, "dp_cp"), group(layout, "edp")
    found = []
    for rank in distinct_ranks(case, layout):
        parameters = stage_parameters(case, layout, rank)
        tensors = (("dense", dense, parameters.dense), ("expert", expert, parameters.expert))
        reduces = _collectives(tensors, gradient, layout.distributed_optimizer, cluster, profile)
        gathers = _collectives(tensors, BF16, True, cluster, profile) if layout.distributed_optimizer else ()
        reduce_s, gather_s = (sum(one.call_s for _, one in calls) for calls in (reduces, gathers))
        layers = max(1, sum(chunk.num_layers + chunk.mtp_layers for chunk in stages[rank]))
        found.append(_RankCalls(rank, reduces, reduce_s, gathers, gather_s, tied, layers))
    return tuple(found)


def _replicated_adapters(case: Case, layout: Layout, rank: int) -> Collective | None:
    """Return the all-reduce of the gradients counted by `replicated_elements`, which comes after everything else."""
    model, cluster, job, profile = case.model, case.cluster, case.job, case.profile
    adapters = adapters_of(job)
    if adapters is None or not layout.sequence_parallel or layout.tp == 1:
        return None
    layers = [pair for chunk in stages_of(model, job, layout)[rank] for pair in chunk_layers(model, chunk)]
    elements = sum(count * replicated_elements(model, layer, adapters) for layer, count in layers)
    whole, ranks = (FP32 if layout.grad_reduce_in_fp32 else BF16) * elements, group(layout, "tp")
    return Collective("all-reduce", ranks, whole, all_reduce_s(ranks, whole, cluster, profile))


def _tied_embedding(case: Case, layout: Layout) -> Collective | None:
    """Return the all-reduce among the stages that hold a copy of the embedding, which sum their copies' gradients.

    It sends the weight's whole gradient buffer, after everything else
    (`core/distributed/finalize_model_grads.py::_allreduce_word_embedding_grads`).
    """
    model, cluster, job, traits, profile = case.model, case.cluster, case.job, case.traits, case.profile
    ranks = embedding_ranks(case, layout)
    if len(ranks) == 1 or not job.trains_language_weights:
        return None
    elements = padded_vocab_size(model, layout.tp, traits.vocab_multiple) // layout.tp * model.hidden_size
    whole = (FP32 if layout.grad_reduce_in_fp32 else BF16) * elements
    copies = Group(len(ranks), ranks[1] * group(layout, "pp").stride)
    return Collective("all-reduce", copies, whole, all_reduce_s(copies, whole, cluster, profile))


def optimizer_time(case: Case, layout: Layout) -> tuple[tuple[str, float], ...]:
    """Return (name, seconds) of the work between the last backward and the next step's forward, on the slowest rank."""
    return _slowest_optimizer(case, _without_step(layout))


@lru_cache(maxsize=1 << 12)
def _slowest_optimizer(case: Case, layout: Layout) -> tuple[tuple[str, float], ...]:
    ranks = distinct_ranks(case, layout)
    return max((_optimizer_time(case, layout, rank) for rank in ranks), key=lambda one: sum(s for _, s in one))


def _optimizer_time(case: Case, layout: Layout, rank: int) -> tuple[tuple[str, float], ...]:
    cluster, profile = case.cluster, case.profile
    parameters = stage_parameters(case, layout, rank)
    dense_shards, expert_shards = layout.optimizer_shards
    elements = parameters.dense / dense_shards + parameters.expert / expert_shards
    gradient = FP32 if layout.grad_reduce_in_fp32 else BF16
    on_card = elements * (1.0 - layout.optimizer_offload_fraction)
    moved = adam_step_bytes(case.job, layout) * on_card + gradient * (parameters.dense + parameters.expert)
    # Gradient norm, Adam, and zeroing the gradient buffer.
    adam = ("gradient norm, Adam", elementwise_s(moved, cluster.gpu, profile, kernels=8))
    overhead = ("host work of a step", profile.step_overhead_s)
    if not layout.optimizer_offload_fraction:
        return adam, overhead
    away = elements * layout.optimizer_offload_fraction
    # Gradients are copied to the host in fp32; fp32 weights come back, or bf16 ones if there are no other weights.
    back = BF16 if layout.precision_aware_optimizer else FP32
    copied_s = away * (FP32 + back) / (cluster.pcie_bytes_per_s * profile.pcie_efficiency)
    host_s = away * HOST_ADAM_STEP_BYTES * cluster.gpus_per_node / profile.host_adam_bytes_per_s
    return adam, ("offload over PCIe", copied_s), ("Adam on the host", host_s), overhead


def adam_step_bytes(job: Job, layout: Layout) -> int:
    """Return the bytes moved per optimizer element on the card (TE FusedAdam).

    The gradient and the states are read; the states and the 16-bit weight are written. The gradient is read once more
    for its norm. A weight stored as a remainder is assembled from both its halves. A state that is processed in an fp32
    copy is read and the copy written; afterward the copy's maximum is computed, and the copy is scaled and cast.
    """
    taken = BF16 if keeps_own_weights(job, layout) and not layout.grad_reduce_in_fp32 else FP32
    states = adam_state_bytes(job, layout)
    halves = BF16 if states[0] == REMAINDER_BYTES and layout.main_params_dtype == "fp32" else 0
    copied = states_in_copies(layout)
    # In addition to the state's own two passes: the copy is written, stepped (read, written), read, scaled (read,
    # written), read.
    return 2 * taken + 2 * sum(states) + BF16 + halves + 7 * FP32 * len(copied)


class PipelineWork(NamedTuple):
    """The work of the pipeline stages in a step."""

    times: MicroBatch
    stages: tuple[StageTime, ...]
    """Times of one micro-batch, by pipeline rank."""
    rank: int
    """The busiest pipeline rank."""
    microbatches: int

    @property
    def busiest_s(self) -> float:
        """Seconds of the busiest rank's work, a lower bound of the step."""
        return self.microbatches * self.stages[self.rank].total_s

    def schedule_s(self, message_s: float) -> float:
        """Return the seconds of the pipeline's schedule if a message between neighbors takes `message_s`."""
        forward = [stage.forward_s for stage in self.stages]
        backward = [stage.backward_s for stage in self.stages]
        return schedule_s(forward, backward, self.microbatches, message_s)


def pipeline_work(case: Case, layout: Layout, times: MicroBatch | None = None) -> PipelineWork:
    """Return the work of a layout's stages; `times` is the layout's `micro_batch`, if known."""
    times = times or micro_batch(case, layout)
    stages = pipeline_times(case, layout, times)
    busiest = max(distinct_ranks(case, layout), key=lambda rank: stages[rank].total_s)
    return PipelineWork(times=times, stages=stages, rank=busiest, microbatches=layout.gradient_accumulation_steps)


class StepTerms(NamedTuple):
    """The terms of a step: the parts of `Time` other than the work of one stage."""

    work: PipelineWork
    message_s: float
    """Seconds of one message between pipeline neighbors."""
    pipeline_s: float
    """Seconds of the schedule, messages included."""
    reference_s: float
    """Seconds of DPO's reference model, forward only."""
    data_parallel_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.pipeline_s + self.reference_s + self.data_parallel_s + self.optimizer_s


def step_terms(case: Case, layout: Layout, work: PipelineWork | None = None) -> StepTerms:
    """Return the terms of a layout's step; `work` is the layout's `pipeline_work`, if known."""
    job = case.job
    work = work or pipeline_work(case, layout)
    stages = work.stages
    reference = 0.0
    if job.forwards_beside:
        # The reference model processes all micro-batches first, forward only (mcore_adapter `trainer/dpo_trainer.py`).
        each = [job.forwards_beside * sum(stage.forward_s) for stage in stages]
        reference = work.microbatches * max(each) + (sum(each) - max(each)) / layout.vpp
    message = pipeline_send(case, layout, work.times.shard).call_s if layout.pp > 1 else 0.0
    optimizer = optimizer_time(case, layout)
    return StepTerms(
        work=work,
        message_s=message,
        pipeline_s=work.schedule_s(message),
        reference_s=reference,
        data_parallel_s=data_parallel(case, layout, stages).exposed_s,
        optimizer_s=sum([seconds for _, seconds in optimizer]),
    )


def predict_time(case: Case, layout: Layout) -> Time:
    """Return the seconds of one optimizer step of a layout.

    The parts are those of the busiest pipeline rank. What it waits for other ranks is `pp_bubble`, and what messages
    add to the pipeline is `pp_comm`. The parts after the pipeline are those of the rank that takes longest in them.
    """
    model, job, terms = case.model, case.job, step_terms(case, layout)
    work, microbatches = terms.work, terms.work.microbatches
    without_messages = work.schedule_s(0.0) if layout.pp > 1 else terms.pipeline_s
    layers, ends = stage_parts(case, stages_of(model, job, layout)[work.rank], work.times)
    parts: dict[str, float] = {name: microbatches * part for name, part in zip(PARTS, layers, strict=True)}
    parts["recompute"] = microbatches * sum(work.stages[work.rank].recompute_s)
    parts["ends"] = microbatches * ends
    parts["pp_bubble"] = without_messages - work.busiest_s
    parts["reference"] = terms.reference_s
    parts["pp_comm"] = terms.pipeline_s - without_messages
    parts["dp_comm"] = terms.data_parallel_s
    parts["optimizer"] = terms.optimizer_s
    parts = {name: seconds for name, seconds in parts.items() if seconds > 0.0}
    step_s = sum(parts.values())
    band: float = getattr(case.profile, band_keys(model, job)[1])
    if is_routing_assumed(case, layout):
        # Nearly all of the runs behind the band used forced load balancing.
        band = min(WIDER_FOR_FEW * band, WIDEST)
    return Time(step_s=step_s, band_s=band_interval(step_s, band), parts_s=parts)
