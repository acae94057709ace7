"""Where each byte goes of a plan that splits data alone: the terms that `engines/data_parallel/memory.py` adds up."""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.engines.data_parallel.communicators import communicators
from topoplan.engines.data_parallel.memory import LayerMemory, layer_memories
from topoplan.engines.data_parallel.parameter_bytes import HALF, SINGLE, moment_bytes, parameter_bytes, shards_of
from topoplan.engines.data_parallel.states import sharded_states, whole_gradients_bytes
from topoplan.engines.megatron.moments import Moment
from topoplan.layout.layout import Layout
from topoplan.network.communicators import Communicator
from topoplan.operators.eager_activations import ATTENTION_OUTPUTS
from topoplan.operators.eager_linears import Elements, elements_of
from topoplan.operators.params import embedding_tensors, head_tensors, layer_parameters
from topoplan.planner.breakdown import SavedRow
from topoplan.planner.case import case_of
from topoplan.planner.plan import Plan
from topoplan.specs.gpu_profile import profile_notes, profile_of
from topoplan.specs.model import Layer, Model
from topoplan.specs.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRow:
    """What is kept of some parameters all the step."""

    part: str
    """The part of the memory that it belongs to: weights, gradients or optimizer."""
    name: str
    elements: int
    """Of the whole model."""
    element_bytes: float
    """Of one of them."""
    shards: int
    """GPUs that share them."""
    on_host: bool
    """In pinned host memory, else on the GPU."""

    @property
    def held_bytes(self) -> float:
        """Of one GPU, or of the process on the host that drives it."""
        return self.element_bytes * self.elements / self.shards


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """Parameters of one part of the model, on a GPU that holds all of them."""

    name: str
    elements: int
    layer: Layer | None = None
    """The kind of layer, where it is some."""
    count: int = 1
    """Layers of that kind; `elements` are of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationRows:
    """One kind of layer that backward goes through."""

    layer: Layer
    count: int
    trains_weights: bool
    adapters: int
    """Linear layers with an adapter."""
    saved: tuple[SavedRow, ...]
    saved_bytes: float
    """All of `saved` together."""
    kept_bytes: float
    """What a micro batch leaves in a layer from forward to backward, with the plan's checkpointing."""
    peak_bytes: float
    """What the layer's own backward adds: what is recomputed, and gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedBreakdown:
    """The memory of a plan that splits data alone, term by term. All GPUs need the same."""

    states: tuple[StateRow, ...]
    elements: Elements
    parameters: tuple[ParameterRow, ...]
    """By place in the model; they add up to `elements`."""
    layers: tuple[ActivationRows, ...]
    without_backward: int
    """Layers before the first trained one, which keep nothing."""
    moments: tuple[Moment, ...]
    """All that may be the peak, the largest first."""
    fragmentation: float
    """What the allocator holds beyond live tensors, as a share of them."""
    context_bytes: int
    communicators: tuple[Communicator, ...]
    processes: int
    """Of a node: each has its own part of the host's memory."""
    margin_stated: bool
    """The margin is the user's; else it is the error band of the prediction."""
    notes: tuple[str, ...]
    """On the constants behind the plan: a file of the user's own, and bands that are borrowed."""


def sharded_breakdown(spec: Spec, plan: Plan) -> ShardedBreakdown:
    """The terms of `plan.memory`, which has to list its moments (`planner.predict.predict`)."""
    model, job, cluster, layout, memory = spec.model, spec.job, spec.cluster, plan.layout, plan.memory
    profile, (stage,) = profile_of(cluster.gpu, spec.profile), memory.by_stage
    case = case_of(spec, layout.backend)
    layers = layer_memories(case, layout)
    elements = elements_of(model, job)
    return ShardedBreakdown(
        states=_states(spec, layout, elements),
        elements=elements,
        parameters=_parameters(model, elements),
        layers=tuple(_activations(one, layout) for one in layers),
        without_backward=model.num_layers - sum(one.count for one in layers),
        moments=tuple(sorted(stage.moments, key=lambda moment: -moment.total_bytes)),
        fragmentation=memory.reserved_bytes / memory.allocated_bytes - 1.0,
        context_bytes=profile.context_bytes,
        communicators=communicators(case, layout),
        processes=min(cluster.gpus_per_node, layout.world_size),
        margin_stated=cluster.margin is not None,
        notes=profile_notes(profile, cluster.gpu, model, job, is_megatron=False),
    )


def _states(spec: Spec, layout: Layout, elements: Elements) -> tuple[StateRow, ...]:
    """Weights, gradients and optimizer. What the host holds beyond them is gradients, in fp32 or in 16 bits."""
    case = case_of(spec, layout.backend)
    job, cluster = spec.job, spec.cluster
    each, shares = parameter_bytes(job, layout), shards_of(layout, cluster.gpus_per_node)
    totals = sharded_states(case, layout)
    weights_away = layout.offload or layout.offload_param
    optimizer_away = layout.offload or layout.offload_optimizer
    rows: list[StateRow] = []

    def add(part: str, name: str, count: int, size: float, shards: int, *, on_host: bool) -> None:
        if count and size:
            rows.append(
                StateRow(part=part, name=name, elements=count, element_bytes=size, shards=shards, on_host=on_host)
            )

    trained = elements.trained
    kinds = [
        ("adapters" if elements.adapters else "trained", trained, each.trained),
        ("frozen", elements.frozen, each.frozen),
        ("packed", elements.quantised, each.quantised),
    ]
    if job.stage == "dpo" and not elements.adapters:
        kinds.append(("reference model", elements.total, HALF))
    for name, count, size in kinds:
        add("weights", name, count, size, shares.weights, on_host=weights_away)
    whole = whole_gradients_bytes(layout, elements)
    if whole:
        add("gradients", "whole gradients, summed over micro batches", trained, HALF, 1, on_host=False)
    if totals.gradients_bytes > whole:
        add("gradients", "gradients", trained, each.gradient, shares.gradients, on_host=False)
    moments = moment_bytes(job)
    if each.optimizer > moments:
        add("optimizer", "fp32 copy of the weights", trained, SINGLE, shares.optimizer, on_host=optimizer_away)
    add("optimizer", "Adam's moments", trained, moments, shares.optimizer, on_host=optimizer_away)
    rest = totals.host_bytes - sum(row.held_bytes for row in rows if row.on_host)
    if optimizer_away and trained:
        size = rest * shares.optimizer / trained
        add("gradients", "gradients for Adam on the host", trained, size, shares.optimizer, on_host=True)
    return tuple(rows)


def _parameters(model: Model, elements: Elements) -> tuple[ParameterRow, ...]:
    counts: dict[Layer, int] = {}
    for layer in model.layers:
        counts[layer] = counts.get(layer, 0) + 1
    rows = [ParameterRow(name="embedding", elements=sum(tensor.elements for tensor in embedding_tensors(model)))]
    rows += [
        ParameterRow(
            name="layers", elements=count * layer_parameters(model, layer, 1, 1, 1).total, layer=layer, count=count
        )
        for layer, count in counts.items()
    ]
    head = "final norm" if model.tie_word_embeddings else "final norm, output layer"
    rows.append(ParameterRow(name=head, elements=sum(tensor.elements for tensor in head_tensors(model))))
    if model.vision:
        rows.append(ParameterRow(name="vision tower", elements=model.vision.parameters))
    if elements.adapters:
        rows.append(ParameterRow(name="adapters", elements=elements.adapters))
    return tuple(rows)


def _activations(one: LayerMemory, layout: Layout) -> ActivationRows:
    granularity = layout.recompute.granularity
    return ActivationRows(
        layer=one.layer,
        count=one.count,
        trains_weights=one.use.trains_weights,
        adapters=len(one.use.adapted),
        saved=tuple(
            SavedRow(
                name=tensor.name,
                saved_bytes=tensor.saved_bytes,
                freed_by=(),
                kept=granularity == "none" or (granularity == "selective" and tensor.name in ATTENTION_OUTPUTS),
            )
            for tensor in one.activations.saved
        ),
        saved_bytes=one.activations.saved_bytes,
        kept_bytes=one.kept_bytes,
        peak_bytes=one.backward_bytes,
    )
