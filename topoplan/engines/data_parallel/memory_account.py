"""Where the memory of a layout that splits data only goes, as a tree."""

from __future__ import annotations

from dataclasses import replace

from topoplan.engines.account import (
    NCCL,
    MemoryAccount,
    allocated_term,
    beyond_terms,
    margin_term,
    moment_terms,
    on_card,
    state_term,
)
from topoplan.engines.data_parallel.communicators import communicators
from topoplan.engines.data_parallel.memory import LayerMemory, layer_memories, sharded_memory
from topoplan.engines.data_parallel.sharding import sharding_of
from topoplan.engines.data_parallel.states import State, states_of
from topoplan.engines.prediction import Memory
from topoplan.layout.layout import Layout
from topoplan.operators.activations import eager_activations
from topoplan.operators.finetuning import elements_of
from topoplan.operators.params import embedding_tensors, head_tensors, layer_parameters
from topoplan.operators.vision import vision_activation_bytes, vision_kept_bytes
from topoplan.specs.case import Case
from topoplan.specs.model import Layer, layer_kind
from topoplan.terms import Term, source_of, sum_of
from topoplan.units import GIB


def memory_account(case: Case, layout: Layout, memory: Memory) -> MemoryAccount:
    """Return the terms of `memory`, which must list its peak candidates."""
    (stage,) = memory.by_stage
    source, states, layers = source_of(sharded_memory), states_of(case, layout), layer_memories(case, layout)
    moments = moment_terms(stage.moments, source, {"gathered weights": _gathered(case, layout)})
    origin = source_of(sharded_memory, "catalog/profiles.json")
    workspace = Term("workspace", stage.parts_bytes["workspace"], "bytes", origin, what="cuBLAS")
    parts = (
        *(_states_term(part, states) for part in ("weights", "gradients", "optimizer")),
        workspace,
        _activations(case, layers),
        *_vision(case, layout),
        *beyond_terms(case, stage.parts_bytes, sharded_memory),
    )
    allocated, found = allocated_term(parts, moments[0], source), communicators(case, layout)
    return MemoryAccount(
        device=on_card(case, memory, allocated, found, sharded_memory, source_of(communicators, NCCL)),
        margin=margin_term(case, memory, sharded_memory),
        host=_host(case, layout, states),
        worst=0,
        stages=(),
        moments=moments,
        layers=tuple(_layer_term(one, layout) for one in layers),
        parameters=_parameters(case),
    )


def _states_term(part: str, states: tuple[State, ...]) -> Term:
    """Return the weights, gradients or optimizer states of one GPU."""
    rows = [_state(one, 1) for one in states if one.part == part and not one.on_host]
    away = any(one.part == part and one.on_host for one in states)
    return sum_of(part, rows, _source(part), "bytes", what="" if rows else "in host memory" if away else "none")


def _source(part: str) -> str:
    return source_of(states_of, "ZeRO, arXiv 1910.02054, section 3.1", *(["FSDP2 CPUOffloadPolicy"] * (part == "host")))


def _state(state: State, processes: int) -> Term:
    source = _source(state.part)
    return state_term(state.name, state.elements, state.element_bytes, state.shards, source, processes=processes)


def _host(case: Case, layout: Layout, states: tuple[State, ...]) -> Term | None:
    """Return what the processes of a node keep in pinned memory, or None."""
    processes = min(case.cluster.gpus_per_node, layout.world_size)
    rows = [
        replace(_state(one, processes), name=one.name if one.part in one.name else f"{one.part}: {one.name}")
        for one in states
        if one.on_host
    ]
    if not rows:
        return None
    # PyTorch's CachingHostAllocator (aten/src/ATen/core/CachingHostAllocator.h, PowerOf2Ceil; pytorch issue 95823).
    what = f"with pin_memory each buffer is rounded up to a power of two on top{_deepspeed_estimate(case, layout)}"
    return sum_of("host", rows, _source("host"), "bytes", what=what, facts={"processes": processes})


def _deepspeed_estimate(case: Case, layout: Layout) -> str:
    """Return DeepSpeed's own estimate of it (`runtime/zero/stage3.py::estimate_zero3_model_states_mem_needs`; stages 1
    and 2 have a counterpart).

    The estimate adds room for buffers and omits the 16-bit gradients.
    """
    if layout.backend != "deepspeed" or case.job.finetuning != "full":
        return ""
    each = 18 if layout.offload_param else 16
    nodes = case.cluster.nodes if layout.zero_stage == 3 else 1
    needed = each * elements_of(case.model, case.job).total / nodes
    return (
        f"; DeepSpeed's own estimate is {each} bytes per parameter ({needed / GIB:,.0f} GiB), and half as much again"
        " to be safe"
    )


def _activations(case: Case, layers: tuple[LayerMemory, ...]) -> Term:
    """Return what a micro-batch keeps from forward to backward, by layer and tensor."""
    source, kinds = source_of(layer_memories, "arXiv 2205.05198, section 4"), []
    for one in layers:
        rows = [Term(name, one.count * size, "bytes", source, times=one.count) for name, size in one.kept]
        kinds.append(sum_of(_name(one), rows, source, "bytes", times=one.count))
    words = "one micro batch, from forward to backward"
    if without := case.model.num_layers - sum(one.count for one in layers):
        words += f"; the first {without} layers are frozen and keep nothing"
    return sum_of("activations", kinds, source, "bytes", what=words)


def _gathered(case: Case, layout: Layout) -> str:
    """Return a description of the term for gathered weights."""
    unit = sharding_of(layout).unit
    if unit == "block":
        return "the layer at hand, the next one, and the last unit"
    if unit == "submodule":
        return "up to stage3_max_live_parameters stay whole"
    return "the largest linear layer, unpacked" if elements_of(case.model, case.job).quantised else "autocast's copies"


def _vision(case: Case, layout: Layout) -> list[Term]:
    size, source = vision_kept_bytes(case, layout), source_of(vision_activation_bytes)
    words = "the vision tower's, of one micro batch"
    return [Term("vision activations", size, "bytes", source, what=words)] if size else []


def _name(one: LayerMemory) -> str:
    adapters = f", {len(one.use.adapted)} adapter{'s' * (len(one.use.adapted) > 1)}" if one.use.adapted else ""
    return f"{layer_kind(one.layer)}, {'trained' if one.use.trains_weights else 'frozen'}{adapters}"


def _layer_term(one: LayerMemory, layout: Layout) -> Term:
    """Return what one layer saves for one micro-batch; tensors not in `kept` are recomputed."""
    again = "recomputed in part" if layout.recompute.granularity == "selective" else "recomputed"
    source = source_of(eager_activations, "PyTorch derivatives.yaml")
    kept = {name for name, _ in one.kept}
    rows = [
        Term(
            tensor.name,
            tensor.saved_bytes,
            "bytes",
            source,
            what="" if tensor.name in kept else again,
            facts={"kept": tensor.name in kept},
        )
        for tensor in one.activations.saved
    ]
    facts = {"count": one.count, "kept_bytes": one.kept_bytes, "backward_bytes": one.backward_bytes}
    return sum_of(_name(one), rows, source, "bytes", facts=facts)


def _parameters(case: Case) -> Term:
    """Return the elements of the whole model, by place."""
    model, counts = case.model, dict[Layer, int]()
    elements = elements_of(model, case.job)
    for layer in model.layers:
        counts[layer] = counts.get(layer, 0) + 1
    head = "final norm" if model.tie_word_embeddings else "final norm, output layer"
    rows: list[tuple[str, int, int]] = [
        ("embedding", sum(tensor.elements for tensor in embedding_tensors(model)), 1),
        *((layer_kind(one), n * layer_parameters(model, one, 1, 1, 1).total, n) for one, n in counts.items()),
        (head, sum(tensor.elements for tensor in head_tensors(model)), 1),
        ("vision tower", model.vision.parameters if model.vision else 0, 1),
        ("adapters", elements.adapters, 1),
    ]
    source = source_of(elements_of)
    facts = {"trained": elements.trained, "frozen": elements.frozen, "packed": elements.quantised}
    terms = [Term(name, size, "elements", source, times=n) for name, size, n in rows]
    return sum_of("parameters of the model", terms, source, "elements", facts=facts)
