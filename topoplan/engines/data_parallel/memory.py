"""Memory of a layout whose backend splits data only: what stays for the whole step, and the worst peak candidate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from topoplan.engines.data_parallel.communicators import communicators_bytes
from topoplan.engines.data_parallel.parameter_bytes import adapter_input_bytes, autocasts, parameter_bytes
from topoplan.engines.data_parallel.sharding import loops_experts, sharding_of
from topoplan.engines.data_parallel.states import ShardedStates, sharded_states
from topoplan.engines.prediction import FREED, Memory, Moment, StageMemory, margin_bytes, parts_beyond
from topoplan.layout.layout import Layout
from topoplan.operators.activations import ATTENTION_OUTPUTS, LayerActivations, eager_activations
from topoplan.operators.adapters import LORA_RANK
from topoplan.operators.eager import CHUNKED_LOGIT_BYTES, LayerUse
from topoplan.operators.finetuning import adapted, elements_of, layer_linears, trained_layers
from topoplan.operators.op import BF16, BLAS_THREADS, FP32
from topoplan.operators.padding import longest_sequence
from topoplan.operators.params import embedding_tensors
from topoplan.operators.vision import vision_kept_bytes
from topoplan.specs.case import Case
from topoplan.specs.job import ADAPTERS, Job
from topoplan.specs.model import Layer, Model

PRODUCTS_SAVED = 0.5
"""Fraction of its matrix products that a layer keeps under selective checkpointing of single operations: every second
one, in addition to attention's output (torchtitan `distributed/activation_checkpoint.py`, _apply_op_sac)."""

SAVES_PACKED_INPUTS = "<0.43.2"
"""Versions of bitsandbytes whose 4-bit products save their inputs for nothing (bitsandbytes #1270,
`autograd/_functions.py::MatMul4Bit`, ctx.tensors). Trainers accept them, so they are assumed if none is stated; 8-bit
products save theirs in every version (`MatMul8bitLt`)."""


def tokens_of(case: Case, layout: Layout) -> int:
    """Return the token positions of a micro-batch on one GPU, with its sequences at their maximum length."""
    sequences = layout.micro_batch_size * case.job.sequences_per_sample
    return -(-sequences * longest_sequence(case, layout) // (layout.cp * layout.ulysses))


def layer_uses(case: Case, layout: Layout, tokens: int, seq_len: int) -> list[tuple[Layer, LayerUse, int]]:
    """Return (layer, how it is trained, count) of the layers that backward goes through.

    Layers before the first trained one have no backward; adapters are on all layers.
    """
    job = case.job
    autocast, trains_embedding = autocasts(job, layout), job.trains_language_weights
    uses = []
    for layer, trains_weights, names, count in _kinds(case.model, job):
        use = LayerUse(
            tokens=tokens,
            seq_len=seq_len,
            trains_weights=trains_weights,
            adapted=names,
            fused=layout.fused_linear_cross_entropy,
            flash_attention=case.profile.flash_attention,
            fp32_weights=trains_weights and autocast,
            packed_bytes=parameter_bytes(job, layout).quantised if job.finetuning == "qlora" else 0.0,
            saves_packed_inputs=job.quantization_bit == 8 or case.cluster.may_run("bitsandbytes", SAVES_PACKED_INPUTS),
            lora_rank=(job.lora_rank or LORA_RANK) if job.finetuning in ADAPTERS else 0,
            ulysses=layout.ulysses,
            loops_experts=loops_experts(case, layout),
            residual_bytes=FP32 if autocast and trains_embedding else BF16,
            adapter_input_bytes=adapter_input_bytes(job, layout),
            adapter_dropout=bool(job.lora_dropout),
        )
        uses.append((layer, use, count))
    return uses


@lru_cache(maxsize=64)
def _kinds(model: Model, job: Job) -> tuple[tuple[Layer, bool, frozenset[str], int], ...]:
    """Return (layer, whether its own weights are trained, names of its linear layers with adapters, count)."""
    trained, found = trained_layers(model, job), dict[tuple[int, bool], list[int]]()
    for place in range(min(trained, default=0), model.num_layers):
        found.setdefault((id(model.layers[place]), place in trained), []).append(place)
    kinds = []
    for (_, trains_weights), places in found.items():
        layer = model.layers[places[0]]
        names = frozenset(linear.name for linear in layer_linears(model, layer) if adapted(job, linear))
        kinds.append((layer, trains_weights, names, len(places)))
    return tuple(kinds)


def _kept(
    model: Model, layer: Layer, one: LayerActivations, layout: Layout, tokens: int
) -> tuple[tuple[str, float], ...]:
    """Return what a layer keeps from forward to backward, as (name, bytes)."""
    everything = tuple((tensor.name, tensor.saved_bytes) for tensor in one.saved)
    if layout.recompute.granularity == "none":
        return everything
    inputs = ("layer input", one.input_bytes)
    if layout.recompute.granularity == "full":
        return (inputs,)
    attention = tuple((name, size) for name, size in everything if name in ATTENTION_OUTPUTS)
    products = BF16 * tokens * sum(linear.outputs for linear in layer_linears(model, layer))
    selected = (inputs, *attention, ("every second product", PRODUCTS_SAVED * products))
    return min(everything, selected, key=lambda kept: sum([size for _, size in kept]))


def _loss_bytes(case: Case, layout: Layout, tokens: int) -> float:
    """Return the bytes of logits, logit gradients and hidden states at the turn from forward to backward.

    Logits are tokens x vocabulary (with Liger, one chunk of rows at a time), hidden states tokens x hidden.
    """
    model, job = case.model, case.job
    hidden = BF16 * tokens * model.hidden_size
    trains_head = job.trains_language_weights
    if not layout.fused_linear_cross_entropy and case.traits.loss is not None:
        # The final norm saves its input in fp32 and, if trained, the tensor that its weight multiplies; a trained
        # output layer saves its input.
        ends = (FP32 + (2 * BF16 if trains_head else 0)) * tokens * model.hidden_size
        return case.traits.loss.backward_bytes * tokens * model.head_size + ends
    # Liger splits the rows into chunks whose logits are about as large as the hidden states; the gradients of hidden
    # states and output layer are computed at once.
    chunks = 1 << max(0, (-(-model.vocab_size // model.hidden_size) - 1).bit_length())
    rows = -(-tokens // chunks)
    gradient = BF16 * model.vocab_size * model.hidden_size if trains_head else 0
    return CHUNKED_LOGIT_BYTES * rows * model.vocab_size + gradient + 3 * hidden


def _moments(
    case: Case,
    layout: Layout,
    states: ShardedStates,
    *,
    kept: float,
    own: float,
    logits: float,
    loss: float,
    layer: float,
    vision: float,
) -> tuple[Moment, ...]:
    """Return the moments that may be the peak.

    `own` is what the layer in backward has kept itself, `layer` what its backward adds.
    """
    # Gradients exist once the first micro-batch has produced them; stage 3 has a gradient buffer that is never
    # released.
    lasting = layout.gradient_accumulation_steps > 1 or sharding_of(layout).keeps_gradients
    none_yet = () if lasting else (("gradients not there yet", -states.gradients_bytes),)
    gathered = ("gathered weights", states.gathered_bytes)
    backward = (gathered, ("gradients on their way", states.layer_gradients_bytes), ("backward of a layer", layer))
    copies = ("16-bit copies of weights", states.cast_bytes)
    # Copies of gradients in DeepSpeed's optimizer, or the root of the second moment in a foreach AdamW.
    temporaries = "root of the second moment" if case.traits.adam_bytes else "copies of gradients"
    return (
        Moment("end of forward", (*none_yet, copies, ("logits", logits))),
        Moment("loss", (*none_yet, gathered, ("logits and their gradients", loss))),
        Moment("first layer's backward", (*none_yet, *backward)),
        Moment("last layer's backward", ((FREED, own - kept), *backward)),
        Moment("optimizer step", ((FREED, -kept - vision), (temporaries, states.step_bytes))),
        *_checkpoint(case, layout, -kept - vision - states.gradients_bytes),
    )


def _checkpoint(case: Case, layout: Layout, freed: float) -> tuple[Moment, ...]:
    """Return the checkpoint of FSDP 1 on one GPU as a peak candidate; nothing otherwise.

    On one GPU there is no sharded state to write, so the whole state is cloned on the card, whatever is configured.
    Tied weights are in it under both names (PyTorch `fsdp/_state_dict_utils.py::_replace_with_full_state_dict_type`). A
    second clone is made while the trainer still writes the first. Gradients are freed by then.
    """
    if case.traits.fsdp_version != 1 or layout.world_size > 1:
        return ()
    model = case.model
    twice = sum(tensor.elements for tensor in embedding_tensors(model)) if model.tie_word_embeddings else 0
    clones = 2.0 * FP32 * (elements_of(model, case.job).total + twice)
    return (Moment("checkpoint", ((FREED, freed), ("clones of the weights", clones))),)


def _reserved_bytes(case: Case, layout: Layout, allocated: float, at_loss: float) -> float:
    """Return what torch's allocator holds; `at_loss` are the bytes of live tensors at the loss.

    A block of logits that a trainer leaves stranded is counted separately, in addition to the usual fragmentation. If
    every layer is recomputed and the loss is computed in chunks, all allocations have few sizes and the same order.
    """
    profile = case.profile
    if layout.expandable_segments:
        return allocated * (1.0 + profile.expandable_fragmentation)
    if not case.traits.stranded_bytes:
        is_regular = layout.fused_linear_cross_entropy and layout.recompute.granularity == "full"
        return allocated * (1.0 + (profile.fragmentation if is_regular else profile.sharded_fragmentation))
    stranded = case.traits.stranded_bytes * tokens_of(case, layout) * case.model.head_size
    return max(allocated * (1.0 + profile.fragmentation), at_loss + stranded)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Equal layers that backward goes through, for one micro-batch."""

    layer: Layer
    use: LayerUse
    count: int
    activations: LayerActivations
    kept: tuple[tuple[str, float], ...]
    """What one layer leaves from forward to backward, as (name, bytes)."""

    @property
    def kept_bytes(self) -> float:
        """Sum of `kept`."""
        return sum([size for _, size in self.kept])

    @property
    def backward_bytes(self) -> float:
        """What the layer's own backward adds.

        A recomputed layer holds all its activations again, beside what was kept.
        """
        return self.activations.saved_bytes - self.kept_bytes + self.activations.backward_bytes


def layer_memories(case: Case, layout: Layout) -> tuple[LayerMemory, ...]:
    """Return every kind of layer with its activations."""
    model, tokens = case.model, tokens_of(case, layout)
    uses = layer_uses(case, layout, tokens, longest_sequence(case, layout))
    found = []
    for layer, use, count in uses:
        one = eager_activations(model, layer, use)
        kept = _kept(model, layer, one, layout, tokens)
        found.append(LayerMemory(layer=layer, use=use, count=count, activations=one, kept=kept))
    return tuple(found)


def sharded_memory(case: Case, layout: Layout, *, all_stages: bool = False) -> Memory:
    """Return the memory of a GPU under a backend that splits data only; all GPUs need equally much.

    `all_stages` includes the peak candidates.
    """
    model, cluster, profile = case.model, case.cluster, case.profile
    layers = layer_memories(case, layout)
    kept = sum([one.count * one.kept_bytes for one in layers])
    worst = max(layers, key=lambda one: one.kept_bytes + one.backward_bytes, default=None)
    own, backward = (worst.kept_bytes, worst.backward_bytes) if worst else (0.0, 0.0)
    states = sharded_states(case, layout)
    vision = vision_kept_bytes(case, layout)
    tokens = tokens_of(case, layout)
    loss = _loss_bytes(case, layout, tokens)
    # If the loss is computed in chunks, the chunks are as large in forward as after it.
    whole = None if layout.fused_linear_cross_entropy else case.traits.loss
    logits = loss if whole is None else whole.forward_bytes * tokens * model.head_size
    moments = _moments(
        case, layout, states, kept=kept, own=own, logits=logits, loss=loss, layer=backward, vision=vision
    )
    peak = max(moments, key=lambda moment: moment.total_bytes)
    parts = {
        "weights": states.weights_bytes,
        "gradients": states.gradients_bytes,
        "optimizer": states.optimizer_bytes,
        "workspace": float(BLAS_THREADS * profile.cublas_workspace_bytes),
        "activations": kept,
        f"peak ({peak.name})": peak.total_bytes,
    }
    if vision:
        parts["vision activations"] = vision
    parts |= parts_beyond(profile, kept + vision + peak.total_bytes)
    allocated = sum(parts.values())
    at_loss = allocated + (1.0 + profile.tensors_beyond) * (moments[1].total_bytes - peak.total_bytes)
    reserved = _reserved_bytes(case, layout, allocated, at_loss)
    device = reserved + profile.context_bytes + communicators_bytes(case, layout)
    stage = StageMemory(
        stage=0,
        allocated_bytes=allocated,
        parts_bytes=parts,
        host_bytes=states.host_bytes,
        moments=moments if all_stages else (),
    )
    return Memory(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=device,
        capacity_bytes=cluster.gpu.memory_bytes,
        band=profile.sharded_memory_band,
        margin_bytes=margin_bytes(case, device * profile.sharded_memory_band),
        host_bytes=states.host_bytes * min(cluster.gpus_per_node, layout.world_size),
        host_capacity_bytes=cluster.host_memory_bytes,
        by_stage=(stage,),
    )
