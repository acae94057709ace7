"""Seconds of one optimizer step of a layout whose backend splits data only."""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.engines.data_parallel.communication import Communication, communication_of, gathered_linears
from topoplan.engines.data_parallel.memory import layer_uses
from topoplan.engines.data_parallel.parameter_bytes import moment_bytes, parameter_bytes, shards_of
from topoplan.engines.data_parallel.sharding import loops_experts, sharding_of
from topoplan.engines.data_parallel.states import LIVE_PARAMETERS, kept_bytes, largest_layer, wire_bytes
from topoplan.engines.prediction import Time, band_interval
from topoplan.layout.layout import Layout
from topoplan.operators.eager import LayerUse, eager_case
from topoplan.operators.finetuning import Elements, elements_of
from topoplan.operators.machine import elementwise_s, gemm_s
from topoplan.operators.op import BF16, PARTS
from topoplan.operators.padding import load_of
from topoplan.operators.shard import Shard
from topoplan.operators.times import eager_time
from topoplan.operators.vision import vision_s
from topoplan.specs.case import Case
from topoplan.specs.gpu_profile import WIDER_FOR_NONE, WIDEST
from topoplan.specs.model import Layer, Moe

ADAM_BYTES = 24
"""Bytes that a fused Adam moves per element besides its moments: fp32 gradient and weight read, weight written, 16-bit
weight written, and the gradient read once more for its norm, and scaled."""
STEP_LAUNCHES = 6
"""Operations of stage 3's optimizer step per tensor: the norm of the gradient, computed on an fp64 copy
(`stage3.py::get_grad_norm_direct`), and copying the new weights out of the flat buffer."""
FUSED_MOVED = (6, 4)
"""Bytes per logit that Liger's fused loss reads and writes: (cast to fp32 in forward, gradient in backward)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPass:
    """Equal layers of a model, as a micro-batch passes through them."""

    layer: Layer
    use: LayerUse
    count: int
    has_backward: bool
    """False for frozen layers before all trained ones, which have a forward only."""
    repeated: float
    """Fraction of the forward that checkpointing runs again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Forward and backward of all layers and the ends for one micro-batch, in seconds."""

    layers: tuple[LayerPass, ...]
    parts_s: dict[str, float]
    forward_s: float
    backward_s: float
    """Including what checkpointing repeats."""
    recompute_s: float
    ends_s: tuple[float, float]
    """(forward, backward) of embedding, output layer, loss and vision tower; included in the totals."""
    vision_s: tuple[float, float]
    """(forward, backward) of the vision tower; included in `ends_s`."""
    launched_s: float
    """Seconds that the host takes to launch all operations."""


def sharded_shard(case: Case, layout: Layout) -> Shard:
    """Return the share of a micro-batch on one GPU, with sequences of average length."""
    job, profile = case.job, case.profile
    load = load_of(case, layout, ranks_wait=sharding_of(layout).divides_gradients)
    sequences = layout.micro_batch_size * job.sequences_per_sample
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


def _ends_s(case: Case, shard: Shard, *, fused: bool, trained: bool) -> tuple[float, float]:
    """Return (forward, backward) seconds of embedding, output layer and loss; the final norm is not counted."""
    model, cluster, profile, loss = case.model, case.cluster, eager_case(case).profile, case.traits.loss
    gpu, rows, columns, hidden = cluster.gpu, shard.tokens, model.head_size, model.hidden_size
    precision = "fp16" if shard.precision == "fp16" else "bf16"
    forward = gemm_s(rows, columns, hidden, gpu, profile, precision)
    backward = gemm_s(rows, hidden, columns, gpu, profile, precision)
    if trained:
        backward += gemm_s(columns, hidden, rows, gpu, profile, precision)
    moved = FUSED_MOVED if fused or loss is None else (loss.forward_moved_bytes, loss.backward_moved_bytes)
    forward += elementwise_s(moved[0] * rows * columns, gpu, profile, kernels=6)
    backward += elementwise_s(moved[1] * rows * columns, gpu, profile, kernels=4)
    lookup = 3 * BF16 * rows * hidden
    table = BF16 * 3 * model.vocab_size * hidden if trained else 0
    return forward + elementwise_s(lookup, gpu, profile), backward + elementwise_s(lookup + table, gpu, profile)


def _passes(case: Case, layout: Layout) -> Passes:
    model, job, profile = case.model, case.job, case.profile
    shard = sharded_shard(case, layout)
    uses = layer_uses(case, layout, shard.tokens, shard.seq_len)
    again = {"full": 1.0, "selective": 0.5, "none": 0.0}[layout.recompute.granularity]
    layers = [
        LayerPass(layer=layer, use=use, count=count, has_backward=True, repeated=again) for layer, use, count in uses
    ]
    # Frozen layers before all trained ones have a forward only.
    ahead_of_trained = model.layers[: model.num_layers - sum(count for _, _, count in uses)] if uses else ()
    layers += [
        LayerPass(layer=layer, use=uses[0][1], count=1, has_backward=False, repeated=0.0) for layer in ahead_of_trained
    ]
    parts, kernels = dict.fromkeys(PARTS, 0.0), 0
    forward = backward = repeated = 0.0
    for one in layers:
        time, count = eager_time(case, one.layer, one.use, shard), one.count
        for name, ahead, back in zip(PARTS, time.forward_s, time.backward_s, strict=True):
            parts[name] += count * (ahead + back * one.has_backward)
        forward += count * sum(time.forward_s)
        backward += count * sum(time.backward_s) * one.has_backward
        repeated += count * one.repeated * sum(time.forward_s)
        kernels += round(count * time.forward_kernels * (1.0 + one.repeated))
        kernels += count * time.backward_kernels * one.has_backward
    trained = job.trains_language_weights
    ends = _ends_s(case, shard, fused=layout.fused_linear_cross_entropy, trained=trained)
    vision = (0.0, 0.0)
    if model.vision is not None:
        vision = vision_s(eager_case(case), layout, model.vision)
    ends = ends[0] + vision[0], ends[1] + vision[1]
    found: dict[str, float] = {name: seconds for name, seconds in parts.items() if seconds}
    found["ends"] = sum(ends)
    if repeated:
        found["recompute"] = repeated
    return Passes(
        layers=tuple(layers),
        parts_s=found,
        forward_s=forward + ends[0],
        backward_s=backward + repeated + ends[1],
        recompute_s=repeated,
        ends_s=ends,
        vision_s=vision,
        launched_s=profile.eager_launch_s * kernels,
    )


def _copies_s(case: Case, layout: Layout, elements: Elements) -> tuple[float, float]:
    """Return (seconds per micro-batch, seconds per step) of copies over PCIe caused by offload."""
    cluster, job, profile = case.cluster, case.job, case.profile
    each, shares = parameter_bytes(job, layout), shards_of(layout, cluster.gpus_per_node)
    rate = cluster.pcie_bytes_per_s * profile.pcie_efficiency
    micro = step = 0.0
    if layout.offload:
        weights = kept_bytes(elements, each) / shares.weights
        # Shards are copied to the GPU for forward and for backward; gradients are copied to the host after every
        # micro-batch.
        micro = 2 * weights + each.gradient * elements.trained / shares.gradients
    if layout.offload_optimizer:
        micro = BF16 * elements.trained / shares.optimizer
        step = BF16 * elements.trained / shares.optimizer
    if layout.offload_param:
        micro += 2 * wire_bytes(elements, each) / shares.weights
    return micro / rate, step / rate


def _on_host(layout: Layout) -> bool:
    return layout.offload or layout.offload_optimizer


def _adam_s(case: Case, layout: Layout, elements: Elements) -> float:
    """Return the seconds of Adam, on the GPU or on the host, wherever its states are."""
    cluster, job, profile = case.cluster, case.job, case.profile
    own = elements.trained / shards_of(layout, cluster.gpus_per_node).optimizer
    moved = own * (ADAM_BYTES + 2 * moment_bytes(job))
    if _on_host(layout):
        return moved * min(cluster.gpus_per_node, layout.world_size) / profile.host_adam_bytes_per_s
    return elementwise_s(moved, cluster.gpu, profile, kernels=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTerms:
    """The terms of a step in seconds; terms of a micro-batch occur `count` times."""

    passes: Passes
    communication: Communication
    count: int
    """Number of micro-batches."""
    exposed_forward_s: float
    """Per micro-batch: communication during forward that lengthens it."""
    exposed_backward_s: float
    exposed_last_s: float
    """Per step: communication during the last backward only that lengthens it."""
    waited_s: float
    """Per micro-batch: seconds that the GPU waits for the host's launches."""
    copied_s: float
    """Per micro-batch: copies over PCIe, hidden or not."""
    exposed_copied_s: float
    """Per micro-batch: copies over PCIe that work on the GPU does not hide."""
    copied_after_s: float
    """Per step: copies over PCIe after the optimizer."""
    adam_s: float
    adam_on_host: bool
    overhead_s: float
    """Host work of a step."""
    reference_s: float
    """DPO's reference model, forward only, over all micro-batches."""

    @property
    def dp_comm_s(self) -> float:
        """All communication that lengthens the step."""
        hidden = self.exposed_forward_s + self.exposed_backward_s + self.communication.copies_s
        return self.count * hidden + self.exposed_last_s + self.communication.seconds("after")


def _hooks_s(case: Case, layout: Layout, sent: Communication) -> float:
    """Return the host's work around linear layers in stage 3: once in each pass, and once more for their gradients.

    What a recomputed layer has gathered is released before its backward if more parameters than
    stage3_max_reuse_distance are used in between (`partitioned_param_coordinator.py`, max_reuse_distance). An expert
    that runs by itself starts only when the host has learned which tokens are the expert's, so the last gather of the
    previous expert is waited for.
    """
    if sharding_of(layout).unit != "submodule":
        return 0.0
    others, looped = gathered_linears(case, layout)
    ahead, again = 1, 0.0
    if layout.recompute.granularity != "none":
        ahead, again = 2, max(0.0, 1.0 - LIVE_PARAMETERS / (2 * largest_layer(case.model)))
    hooks = case.profile.zero3_hook_s * (others + looped) * (ahead + 1 + again + (case.job.finetuning == "full"))
    gathers = [one.call.call_s for one in sent.sendings if one.when == "forward"]
    return hooks + ahead * looped / 3 * sum(gathers)


def _overhead_s(case: Case, layout: Layout) -> float:
    """Return the host's work per step; stage 3 has some for every tensor."""
    profile = case.profile
    if sharding_of(layout).unit != "submodule":
        return profile.step_overhead_s
    return profile.step_overhead_s + STEP_LAUNCHES * profile.eager_launch_s * sum(gathered_linears(case, layout))


def sharded_terms(case: Case, layout: Layout) -> ShardedTerms:
    """Return the terms of a step; communication overlaps with the work of its pass, except for the first unit's."""
    model, job, profile = case.model, case.job, case.profile
    elements = elements_of(model, job)
    passes = _passes(case, layout)
    sent = communication_of(case, layout, elements)
    copied, copied_after = _copies_s(case, layout, elements)

    def exposed(communication: float, work: float) -> float:
        left = max(communication - work, communication * sent.first_share)
        return left + profile.overlap_interference * (communication - left)

    forward = exposed(sent.seconds("forward"), passes.forward_s)
    backward = exposed(sent.seconds("backward"), passes.backward_s)
    work = passes.forward_s + passes.backward_s
    launched = passes.launched_s + _hooks_s(case, layout, sent)
    count = layout.gradient_accumulation_steps
    return ShardedTerms(
        passes=passes,
        communication=sent,
        count=count,
        exposed_forward_s=forward,
        exposed_backward_s=backward,
        exposed_last_s=exposed(sent.seconds("last"), passes.backward_s),
        waited_s=max(0.0, launched - work - (forward + backward + sent.copies_s)),
        copied_s=copied,
        exposed_copied_s=max(0.0, copied - work),
        copied_after_s=copied_after,
        adam_s=_adam_s(case, layout, elements),
        adam_on_host=_on_host(layout),
        overhead_s=_overhead_s(case, layout),
        reference_s=job.forwards_beside * count * passes.forward_s,
    )


def sharded_time(case: Case, layout: Layout) -> Time:
    """Return the seconds of one optimizer step."""
    model, profile = case.model, case.profile
    terms = sharded_terms(case, layout)
    parts = {name: terms.count * seconds for name, seconds in terms.passes.parts_s.items()}
    parts["host launches"] = terms.count * terms.waited_s
    parts["dp_comm"] = terms.dp_comm_s
    parts["offload"] = terms.count * terms.exposed_copied_s + terms.copied_after_s
    parts["optimizer"] = terms.adam_s + terms.overhead_s
    parts["reference"] = terms.reference_s
    parts = {name: seconds for name, seconds in parts.items() if seconds > 0.0}
    step_s = sum(parts.values())
    band = profile.sharded_time_band
    if any(isinstance(layer.ffn, Moe) for layer in model.layers):
        # The runs behind the band are of dense models; and experts that run one by one are the host's time, of which
        # one published run tells (see the engine's warning).
        band = min(WIDER_FOR_NONE * band * (WIDER_FOR_NONE if loops_experts(case, layout) else 1.0), WIDEST)
    return Time(step_s=step_s, band_s=band_interval(step_s, band), parts_s=parts)
