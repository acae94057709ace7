"""Where the memory of a layout under Megatron-core goes, as a tree."""

from __future__ import annotations

from dataclasses import replace

from topoplan.engines.account import (
    NCCL,
    MemoryAccount,
    allocated_term,
    beyond_terms,
    margin_term,
    merged_stages,
    moment_terms,
    on_card,
    state_term,
)
from topoplan.engines.megatron.communicators import communicators
from topoplan.engines.megatron.memory import fullest_moment, predict_memory, stage_memory
from topoplan.engines.megatron.moments import KeptPiece, chunk_kept, chunk_kept_bytes, kept_of, stage_moments
from topoplan.engines.megatron.pipeline import in_flight
from topoplan.engines.megatron.states import (
    StageStates,
    chunk_layers,
    end_tensors,
    host_optimizer_parts,
    layer_elements,
    optimizer_element_bytes,
    optimizer_parts,
    quantised_element_bytes,
    stage_parameters,
    stage_states,
)
from topoplan.engines.prediction import Memory, StageMemory, margin_bytes
from topoplan.layout.layout import Layout
from topoplan.operators.activations import kept_activations, layer_activations
from topoplan.operators.layers import layer_tensors
from topoplan.operators.op import BF16, Weight
from topoplan.operators.params import adapter_tensors, cut
from topoplan.operators.shard import shard_of
from topoplan.operators.user_buffers import user_buffer_bytes
from topoplan.operators.vision import vision_activation_bytes, vision_kept_bytes
from topoplan.specs.case import Case
from topoplan.specs.model import Layer, layer_kind
from topoplan.terms import Term, source_of, sum_of

_CUT_BY = {"tp": "tp", "expert": "ep x etp", "expert_replicated": "ep", "replicated": "replicated"}


def memory_account(case: Case, layout: Layout, memory: Memory) -> MemoryAccount:
    """Return the terms of `memory`, which must list every stage with its peak candidates."""
    worst = max(memory.by_stage, key=lambda stage: stage.allocated_bytes)
    (states,) = stage_states(case, layout, [worst.stage])
    moments = moment_terms(worst.moments, source_of(stage_moments))
    layers = {id(layer): _layer_term(case, layout, layer, n) for layer, n in _layers_of(case, states)}
    parameters = _parameters(case, layout, states)
    parts = (
        *_resident(case, layout, states, worst, parameters),
        *_activations(case, layout, states, layers),
        *beyond_terms(case, worst.parts_bytes, stage_memory),
    )
    allocated = allocated_term(parts, moments[0], source_of(stage_memory))
    mapped = user_buffer_bytes(shard_of(case, layout), case.model.hidden_size)
    words = "of collectives inside GEMMs"
    buffers = Term("user buffers", mapped, "bytes", source_of(user_buffer_bytes, "TE initialize_ub"), what=words)
    origin = source_of(communicators, NCCL)
    found = communicators(case, layout)
    return MemoryAccount(
        device=on_card(case, memory, allocated, found, predict_memory, origin, (buffers,) if mapped else ()),
        margin=margin_term(case, memory, margin_bytes),
        host=_host(case, layout, memory) if memory.host_bytes else None,
        worst=worst.stage,
        stages=_stages(case, layout, memory),
        moments=moments,
        layers=tuple(layers.values()),
        parameters=parameters,
    )


def _layers_of(case: Case, states: StageStates) -> list[tuple[Layer, int]]:
    """Return the distinct layers of a stage with their counts."""
    kinds: dict[Layer, int] = {}
    for chunk in states.chunks:
        for layer, count in chunk_layers(case.model, chunk):
            kinds[layer] = kinds.get(layer, 0) + count
    return list(kinds.items())


def _parameters(case: Case, layout: Layout, states: StageStates) -> Term:
    """Return the elements on one rank, by layer and weight."""
    model, adapters = case.model, shard_of(case, layout).adapters
    found = []
    for layer, count in _layers_of(case, states):
        tensors = (*layer_tensors(model, layer), *(adapter_tensors(model, layer, adapters) if adapters else ()))
        source = source_of(layer_tensors, "Megatron attention.py, mlp.py, experts.py")
        rows = [_weight(one, cut(one, layout.tp, layout.ep, layout.etp), count, source) for one in tensors]
        found.append(sum_of(layer_kind(layer), rows, source, "elements", times=count))
    source = source_of(end_tensors)
    found += [_weight(t, n, 1, source) for chunk in states.chunks for t, n in end_tensors(case, chunk, layout.tp)]
    if model.vision and states.rank == 0:
        tower = model.vision
        parts = (
            ("vision encoder", tower.encoder_parameters),
            ("vision projector", tower.projector_parameters),
            ("vision deepstack mergers", tower.deepstack_parameters),
        )
        found += [_weight(Weight(name, n, "replicated"), n, 1, source_of(stage_parameters)) for name, n in parts if n]
    held = states.parameters
    facts = {"dense": held.dense, "expert": held.expert, "frozen": held.frozen}
    words = f"sharded by tp {layout.tp}, ep {layout.ep}, etp {layout.etp}"
    return sum_of("parameters of a rank", found, source_of(stage_parameters), "elements", facts=facts, what=words)


def _weight(tensor: Weight, elements: int, count: int, source: str) -> Term:
    facts = {"whole": tensor.elements, "cut_by": _CUT_BY[tensor.split]}
    return Term(tensor.name, elements * count, "elements", source, times=count, facts=facts)


def _resident(case: Case, layout: Layout, states: StageStates, stage: StageMemory, parameters: Term) -> list[Term]:
    """Return what stays for the whole step."""
    held, sizes = states.parameters, stage.parts_bytes
    trained, source = held.dense + held.expert, source_of(stage_states, "Megatron param_and_grad_buffer.py")
    found = [
        _weights(case, layout, states, parameters),
        state_term("gradients", trained, sizes["gradients"] / trained if trained else 0.0, 1, source),
        _optimizer(case, layout, states),
    ]
    if (copies := sizes.get("copies for offload")) is not None:
        source = source_of(optimizer_parts, "MLM distrib_optimizer.py, hybrid_optimizer.py")
        found.append(state_term("copies for offload", trained, copies / trained, 1, source))
    source, words = source_of(stage_states, "catalog/profiles.json"), "cuBLAS, of torch and of Transformer Engine"
    found.append(Term("workspace", sizes["workspace"], "bytes", source, what=words))
    if "reference model" in sizes:
        source = source_of(stage_states, "mcore_adapter dpo_trainer.py")
        found.append(state_term("reference model", held.total, BF16, 1, source))
    return found


def _weights(case: Case, layout: Layout, states: StageStates, parameters: Term) -> Term:
    """Return the weights in 16 bits, and their quantized copies."""
    rows, shard = list(parameters.scaled(BF16, "bytes", source_of(stage_states)).children), shard_of(case, layout)
    if shard.is_low_precision:
        elements, size = layer_elements(case.model, states.chunks, layout), quantised_element_bytes(layout, shard)
        rows.append(state_term("quantised copies", elements, size, 1, source_of(quantised_element_bytes)))
    total = sum_of("weights", rows, source_of(stage_states), "bytes")
    elements = states.parameters.total
    return replace(total, facts={"elements": elements, "element_bytes": total.value / elements})


def _optimizer(case: Case, layout: Layout, states: StageStates) -> Term:
    """Return the optimizer states of dense weights and of experts, each divided over the ranks that share them."""
    source = source_of(optimizer_element_bytes, "ZeRO-1, arXiv 1910.02054, section 5")
    size, held = optimizer_element_bytes(case.job, layout), states.parameters
    dense, experts = layout.optimizer_shards
    rows = [
        state_term("dense", held.dense, size, dense, source),
        state_term("experts", held.expert, size, experts, source),
    ]
    return sum_of("optimizer", rows, source, "bytes")


def _layer_term(case: Case, layout: Layout, layer: Layer, count: int) -> Term:
    """Return what one layer saves for one micro-batch; tensors that are not kept are recomputed."""
    model, shard, recompute = case.model, shard_of(case, layout), layout.recompute
    kept, source = kept_activations(model, layer, shard, recompute), source_of(layer_activations, "arXiv 2205.05198")
    full, modules = kept.kept_bytes != kept.plain_bytes, set(recompute.modules)
    rows = [
        Term(
            one.name,
            one.saved_bytes,
            "bytes",
            source,
            facts={"kept": not (full or modules & set(one.freed_by)), "freed_by": (*one.freed_by, "full")},
        )
        for one in layer_activations(model, layer, shard).saved
        if not one.saved_only_by or modules & set(one.saved_only_by)
    ]
    facts = {
        "count": count,
        "kept_bytes": kept.kept_bytes,
        "plain_bytes": kept.plain_bytes,
        "backward_bytes": kept.peak_bytes,
    }
    return sum_of(layer_kind(layer), rows, source, "bytes", facts=facts)


def _activations(case: Case, layout: Layout, states: StageStates, layers: dict[int, Term]) -> list[Term]:
    """Return what the micro-batches in flight keep, chunk by chunk, and what they keep of the vision tower."""
    model, shard = case.model, shard_of(case, layout)
    kept = kept_of(model, case.job.mtp_num_layers, shard, layout.recompute)
    pieces = [chunk_kept(model, chunk, shard, layout.recompute, kept) for chunk in states.chunks]
    held, tower = _in_flight(case, layout, states)
    chunks = []
    for number, (chunk, found, batches) in enumerate(zip(states.chunks, pieces, held, strict=True)):
        rows = [_piece(piece, layers, layout).repeated(batches) for piece in found if piece[1]]
        facts = {"layers": chunk.num_layers + chunk.mtp_layers, "in_flight": batches}
        name = f"chunk {number}" if len(pieces) > 1 else "layers"
        chunks.append(sum_of(name, rows, source_of(chunk_kept), "bytes", times=batches, facts=facts))
    words = "1 micro batch" if sum(held) == 1 else f"{sum(held)} micro batches"
    kept_terms = [
        sum_of(
            "activations",
            chunks,
            source_of(in_flight, "Megatron schedules.py, arXiv 2104.04473, section 2.2"),
            "bytes",
            what=f"{words}{f', of {len(pieces)} chunks,' if len(pieces) > 1 else ''} in flight",
        )
    ]
    if tower:
        source, words = source_of(vision_activation_bytes), f"of {held[0]} micro batch{'es' * (held[0] > 1)} in flight"
        value = held[0] * tower
        term = Term("vision activations", value, "bytes", source, times=held[0], what=words)
        kept_terms.append(term)
    return kept_terms


def _in_flight(case: Case, layout: Layout, states: StageStates) -> tuple[tuple[int, ...], float]:
    """Return what a stage holds in flight when its activations are largest.

    The result is (micro-batches of each chunk, bytes that one micro-batch keeps of the vision tower).
    """
    model, shard, recompute = case.model, shard_of(case, layout), layout.recompute
    kept = kept_of(model, case.job.mtp_num_layers, shard, recompute)
    sizes = [chunk_kept_bytes(model, chunk, shard, recompute, kept) for chunk in states.chunks]
    tower = vision_kept_bytes(case, layout) if states.rank == 0 else 0.0
    return fullest_moment(layout, states.rank, sizes, tower), tower


def _piece(piece: KeptPiece, layers: dict[int, Term], layout: Layout) -> Term:
    """Return a piece of what a chunk keeps: layers with the tensors that they keep, or one kind of tensor."""
    what, count, size = piece
    source = source_of(chunk_kept, "arXiv 2205.05198, section 4")
    if isinstance(what, str):
        return Term(what, count * size, "bytes", source, times=count)
    layer = layers[what]
    if layout.recompute.granularity == "full":
        if size != layer.facts["plain_bytes"]:
            name = f"inputs of {layer.name}"
            return Term(name, count * size, "bytes", source, times=count)
        return replace(layer, facts={}).repeated(count)
    rows = [one for one in layer.children if one.facts["kept"]]
    return sum_of(layer.name, rows, layer.source, "bytes").repeated(count)


def _stages(case: Case, layout: Layout, memory: Memory) -> tuple[Term, ...]:
    """Return the allocated memory of every stage, by part."""
    found = []
    source = source_of(stage_memory)
    for stage, states in zip(memory.by_stage, stage_states(case, layout, range(layout.pp)), strict=True):
        moment = next((name for name in stage.parts_bytes if name.startswith("peak")), "")
        rows = [
            Term("peak" if name == moment else name, size, "bytes", source) for name, size in stage.parts_bytes.items()
        ]
        facts = {
            "stages": (stage.stage,),
            "layers": sum(chunk.num_layers + chunk.mtp_layers for chunk in states.chunks),
            "in_flight": _in_flight(case, layout, states)[0],
            "peak": moment.removeprefix("peak (").removesuffix(")"),
        }
        found.append(sum_of("allocated", rows, source, "bytes", facts=facts))
    return merged_stages(
        found, lambda one: (one.facts["layers"], one.facts["in_flight"], one.facts["peak"], _values(one))
    )


def _values(term: Term) -> tuple[tuple[str, float], ...]:
    return tuple((one.name, one.value) for one in term.children)


def _host(case: Case, layout: Layout, memory: Memory) -> Term:
    """Return the host memory of a node's processes for the stage that offloads the most."""
    most = max(memory.by_stage, key=lambda stage: stage.host_bytes).stage
    (states,) = stage_states(case, layout, [most])
    gpus, source = case.cluster.gpus_per_node, source_of(host_optimizer_parts, "Megatron hybrid_optimizer.py")
    rows = [
        Term(name, gpus * size, "bytes", source, times=gpus)
        for name, size in host_optimizer_parts(layout, states).items()
    ]
    return sum_of(
        "host", rows, source, "bytes", what="kept by Megatron's HybridDeviceOptimizer", facts={"processes": gpus}
    )
