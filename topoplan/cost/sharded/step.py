"""Seconds of one optimizer step of a layout whose backend splits data alone."""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.backends.sharded import HALF, SINGLE, moment_bytes, parameter_bytes, shards_of
from topoplan.cost.collectives import all_gather_s, all_reduce_s
from topoplan.cost.compute import PARTS, elementwise_s, gemm_s
from topoplan.cost.padding import load_of
from topoplan.cost.profile import Profile
from topoplan.cost.shard import Shard
from topoplan.cost.sharded.compute import LAUNCH_S, Tuning, eager_profile, eager_time
from topoplan.cost.sharded.linears import LORA_RANK, Elements, elements_of, layer_linears
from topoplan.cost.sharded.memory import layer_uses
from topoplan.cost.sharded.states import BUCKET
from topoplan.cost.step import HOST_ADAM_BYTES_PER_S, Time
from topoplan.layout.layout import Layout
from topoplan.layout.placement import Group
from topoplan.specs.cluster import Cluster
from topoplan.specs.job import Job
from topoplan.specs.model import Model

TIME_BAND = 0.3
"""Half width of the interval that measured step times fell in, as a fraction."""
ADAM_BYTES = 24
"""Moved by a fused Adam for one element beside its moments: fp32 gradient and weight read, weight written, the 16-bit
weight written, and the gradient once more for its norm, read and scaled."""
INTERFERENCE = 0.19
"""Share of hidden communication by which it slows down the work beside it, whose processors and memory it uses
("Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning", 2025, arXiv 2507.03114:
18.9% on average)."""
GATHER_COPY_BYTES = 8
"""Moved on the card for one gathered parameter and micro batch: out of the gathered buffer twice (PyTorch
`distributed/fsdp/_fully_shard/_fsdp_collectives.py`, foreach_all_gather_copy_out: 2 x 4 bytes)."""
REDUCE_COPY_BYTES = 12
"""The same for a gradient, into the buffer that is reduced in fp32 (there, foreach_reduce)."""
ZERO3_HOOK_S = 100e-6
"""Host time of stage 3's hooks around one submodule of a pass: fetch, wait, release
(`runtime/zero/partitioned_param_coordinator.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """Forward and backward of all layers and the ends for one micro batch, in seconds."""

    parts_s: dict[str, float]
    forward_s: float
    backward_s: float
    """With what checkpointing repeats."""
    recompute_s: float
    launched_s: float
    """What the host takes to launch it all."""


def tuning_of(job: Job, layout: Layout) -> Tuning:
    """What a job's adapters and packed weights add to a layer."""
    packed = parameter_bytes(job, layout).quantised if job.finetuning == "qlora" else 0.0
    rank = (job.lora_rank or LORA_RANK) if job.finetuning in ("lora", "qlora") else 0
    return Tuning(lora_rank=rank, packed_bytes=packed, ulysses=layout.ulysses)


def sharded_shard(layout: Layout, job: Job, profile: Profile) -> Shard:
    """A micro batch on one GPU, for lengths as they are on average."""
    load, sequences = load_of(job, layout), layout.micro_batch_size * job.sequences_per_sample
    return Shard(
        tokens=round(sequences * load.positions) // (layout.cp * layout.ulysses),
        seq_len=round(load.extent),
        tp=1,
        cp=layout.cp,
        ep=1,
        etp=1,
        sequence_parallel=False,
        precision=job.precision,
        flash_attention=profile.flash_attention,
    )


def _ends_s(
    model: Model, shard: Shard, cluster: Cluster, profile: Profile, *, fused: bool, trained: bool
) -> tuple[float, float]:
    """(forward, backward) of embedding, final norm, output layer and loss."""
    gpu, rows, columns, hidden = cluster.gpu, shard.tokens, model.vocab_size, model.hidden_size
    profile = eager_profile(profile, gpu)
    precision = "fp16" if shard.precision == "fp16" else "bf16"
    forward = gemm_s(rows, columns, hidden, gpu, profile, precision)
    backward = gemm_s(rows, hidden, columns, gpu, profile, precision)
    if trained:
        backward += gemm_s(columns, hidden, rows, gpu, profile, precision)
    # Bytes a logit: cast to fp32 (6), log softmax (8), its gradients (4 + 12) and the cast back (6).
    forward += elementwise_s((6 if fused else 14) * rows * columns, gpu, profile, kernels=6)
    backward += elementwise_s((4 if fused else 22) * rows * columns, gpu, profile, kernels=4)
    lookup = 3 * HALF * rows * hidden
    table = HALF * 3 * columns * hidden if trained else 0
    return forward + elementwise_s(lookup, gpu, profile), backward + elementwise_s(lookup + table, gpu, profile)


def _passes(model: Model, cluster: Cluster, job: Job, layout: Layout, profile: Profile) -> _Passes:
    shard, tuning = sharded_shard(layout, job, profile), tuning_of(job, layout)
    uses = layer_uses(model, job, layout, shard.tokens, shard.seq_len, flash=profile.flash_attention)
    parts = dict.fromkeys(PARTS, 0.0)
    forward = backward = 0.0
    kernels = [0, 0]
    again = {"full": 1.0, "selective": 0.5, "none": 0.0}[layout.recompute.granularity]
    repeated, seen = 0.0, 0
    for layer, use, count in uses:
        time = eager_time(model, layer, use, shard, cluster, profile, tuning)
        for name, ahead, back in zip(PARTS, time.forward_s, time.backward_s, strict=True):
            parts[name] += count * (ahead + back)
        forward += count * sum(time.forward_s)
        backward += count * sum(time.backward_s)
        repeated += count * again * sum(time.forward_s)
        kernels[0] += round(count * time.forward_kernels * (1.0 + again))
        kernels[1] += count * time.backward_kernels
        seen += count
    if seen < model.num_layers and uses:
        # Layers that are frozen and before all trained ones have a forward alone.
        for layer in model.layers[: model.num_layers - seen]:
            time = eager_time(model, layer, uses[0][1], shard, cluster, profile, tuning)
            for name, ahead in zip(PARTS, time.forward_s, strict=True):
                parts[name] += ahead
            forward += sum(time.forward_s)
            kernels[0] += time.forward_kernels
    trained = job.finetuning == "full" and not job.freeze_language_model
    ends = _ends_s(model, shard, cluster, profile, fused=layout.fused_linear_cross_entropy, trained=trained)
    found: dict[str, float] = {name: seconds for name, seconds in parts.items() if seconds}
    found["ends"] = sum(ends)
    if repeated:
        found["recompute"] = repeated
    return _Passes(
        parts_s=found,
        forward_s=forward + ends[0],
        backward_s=backward + repeated + ends[1],
        recompute_s=repeated,
        launched_s=LAUNCH_S * sum(kernels),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traffic:
    """Seconds of communication; those of a micro batch, and those once a step."""

    forward_s: float = 0.0
    """Weights gathered for a forward."""
    backward_s: float = 0.0
    """Weights gathered again, gradients reduced, in one micro batch."""
    last_s: float = 0.0
    """The same of the last micro batch only."""
    after_s: float = 0.0
    """Behind everything: weights handed out after the step."""
    first_share: float = 0.0
    """Share of a pass that nothing hides: the first unit's."""
    copies_s: float = 0.0
    """Copies on the card, in a micro batch."""


def _calls(model: Model, layout: Layout, elements: Elements) -> int:
    """Collectives into which what is gathered or reduced in one pass is cut.

    FSDP2: one a block. Stage 3: one a submodule, which for large models are linear layers
    (`partitioned_param_coordinator.py::fetch_sub_module`). Stages 1 and 2: one a bucket.
    """
    if layout.backend == "fsdp2":
        return model.num_layers + 2
    if layout.zero_stage == 3:
        return sum(len(layer_linears(model, layer)) + 2 for layer in model.layers) + 2
    return max(1, round(elements.trained / BUCKET))


def _traffic(
    model: Model, cluster: Cluster, job: Job, layout: Layout, elements: Elements, profile: Profile
) -> _Traffic:
    """What the ranks tell each other.

    ZeRO (arXiv 1910.02054, section 7): stages 1 and 2 send as much as plain data parallelism, stage 3 half as much
    again. Stage 1 reduces gradients once a step, stage 2 and full sharding after every micro batch.
    """
    each, shares = parameter_bytes(job, layout), shards_of(layout, cluster.gpus_per_node)
    world = Group(layout.world_size, 1)
    if layout.world_size == 1:
        return _Traffic()

    calls = _calls(model, layout, elements)

    def gather(size: float, ranks: Group = world) -> float:
        return calls * all_gather_s(ranks, size / calls, cluster, profile)

    # What is in 16 bits on the wire: all weights, but packed ones, which no backend splits.
    whole = HALF * (elements.total - elements.quantised)
    gradients = HALF * elements.trained
    # FSDP2 reduces in fp32.
    reduced = (SINGLE if layout.backend == "fsdp2" and not job.pure_bf16 else HALF) * elements.trained
    unit = 1.0 / (model.num_layers + 1)
    if layout.backend == "ddp":
        return _Traffic(
            last_s=all_reduce_s(world, each.gradient * elements.trained, cluster, profile), first_share=unit
        )
    if layout.backend == "deepspeed" and layout.zero_stage < 3:
        reduce, after = gather(gradients), gather(gradients)
        if layout.zero_stage == 1:
            return _Traffic(last_s=reduce, after_s=after, first_share=unit)
        return _Traffic(backward_s=reduce, after_s=after, first_share=unit)
    copied = GATHER_COPY_BYTES * elements.total + REDUCE_COPY_BYTES * elements.trained
    copies = elementwise_s(copied, cluster.gpu, profile, kernels=0)
    if shares.weights < layout.world_size:
        node = Group(shares.weights, 1)
        across = Group(layout.world_size // shares.weights, shares.weights)
        reduce = gather(reduced, node) + all_reduce_s(across, reduced / shares.weights, cluster, profile)
        return _Traffic(
            forward_s=gather(whole, node),
            backward_s=gather(whole, node) + reduce,
            first_share=unit,
            copies_s=copies,
        )
    return _Traffic(
        forward_s=gather(whole), backward_s=gather(whole) + gather(reduced), first_share=unit, copies_s=copies
    )


def _copies_s(cluster: Cluster, job: Job, layout: Layout, elements: Elements, profile: Profile) -> tuple[float, float]:
    """(seconds of a micro batch, of a step) over PCIe, with what is offloaded."""
    each, shares = parameter_bytes(job, layout), shards_of(layout, cluster.gpus_per_node)
    rate = cluster.pcie_bytes_per_s * profile.pcie_efficiency
    micro = step = 0.0
    if layout.offload:
        weights = (each.trained * elements.trained + each.frozen * elements.frozen) / shares.weights
        # Shards go up for forward and for backward, gradients come down after every micro batch.
        micro = 2 * weights + each.gradient * elements.trained / shares.gradients
    if layout.offload_optimizer:
        micro = HALF * elements.trained / shares.optimizer
        step = HALF * elements.trained / shares.optimizer
    if layout.offload_param:
        micro += 2 * HALF * (elements.total - elements.quantised) / shares.weights
    return micro / rate, step / rate


def _optimizer_s(cluster: Cluster, job: Job, layout: Layout, elements: Elements, profile: Profile) -> dict[str, float]:
    """Seconds of Adam by place."""
    own = elements.trained / shards_of(layout, cluster.gpus_per_node).optimizer
    moved = own * (ADAM_BYTES + 2 * moment_bytes(job))
    if layout.offload or layout.offload_optimizer:
        return {"optimizer": moved * min(cluster.gpus_per_node, layout.world_size) / HOST_ADAM_BYTES_PER_S}
    return {"optimizer": elementwise_s(moved, cluster.gpu, profile, kernels=16)}


def sharded_time(model: Model, cluster: Cluster, job: Job, layout: Layout, profile: Profile) -> Time:
    """Seconds of one optimizer step; communication runs beside the work of its pass, all but the first unit's."""
    elements = elements_of(model, job)
    passes = _passes(model, cluster, job, layout, profile)
    sent = _traffic(model, cluster, job, layout, elements, profile)
    copied, copied_after = _copies_s(cluster, job, layout, elements, profile)
    count = layout.gradient_accumulation_steps

    def exposed(communication: float, work: float) -> float:
        left = max(communication - work, communication * sent.first_share)
        return left + INTERFERENCE * (communication - left)

    hidden = exposed(sent.forward_s, passes.forward_s) + exposed(sent.backward_s, passes.backward_s) + sent.copies_s
    comm = count * hidden + exposed(sent.last_s, passes.backward_s) + sent.after_s
    work = passes.forward_s + passes.backward_s
    launched = passes.launched_s
    if layout.backend == "deepspeed" and layout.zero_stage == 3:
        submodules = sum(12 for _ in model.layers)
        launched += ZERO3_HOOK_S * submodules * (2 if layout.recompute.granularity == "none" else 3)
    waited = max(0.0, launched - work - hidden)
    offload = count * max(0.0, copied - work) + copied_after
    parts = {name: count * seconds for name, seconds in passes.parts_s.items()}
    parts["host launches"] = count * waited
    parts["dp_comm"] = comm
    parts["offload"] = offload
    parts |= _optimizer_s(cluster, job, layout, elements, profile)
    parts["optimizer"] += profile.step_overhead_s
    if job.stage == "dpo":
        parts["reference"] = count * passes.forward_s
    parts = {name: seconds for name, seconds in parts.items() if seconds > 0.0}
    step_s = sum(parts.values())
    return Time(step_s=step_s, band_s=(step_s * (1.0 - TIME_BAND), step_s * (1.0 + TIME_BAND)), parts_s=parts)
