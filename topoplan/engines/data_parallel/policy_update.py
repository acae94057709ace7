"""Memory of one policy update of a verl-style trainer (Trinity-RFT, verl): FSDP, checkpointed layers, full logits.

Sources, of the versions that were read: Trinity-RFT 0.4.0 (`common/config.py`, `common/verl_config.py`,
`trainer/verl/fsdp_workers.py`, `trainer/verl/dp_actor.py`), verl 0.5.0 (`workers/actor/dp_actor.py`,
`utils/torch_functional.py`, `utils/fsdp_utils.py`), PyTorch's FSDP and autograd engine, transformers 4 and 5
(`models/qwen3/modeling_qwen3.py`). What the trainer does by default:

- A micro batch is filled with sequences up to `ceil(2 * max_model_len / ulysses)` tokens a GPU (`Trainer.
  max_token_len_per_gpu`): two of the longest ones.
- Without offload it is FSDP 1 over all GPUs, with fp32 parameters, gradients and Adam moments
  (`_build_model_optimizer`: torch_dtype float32, MixedPrecision bf16). On one GPU FSDP goes over to NO_SHARD. With
  offload it is FSDP 2 under CPUOffloadPolicy: all of these are in host memory. The reference model is offloaded in
  either case.
- Decoder layers are checkpointed, and logits are computed for all tokens at once in bf16: the vocabulary, not the
  model, is what fills the card.
- Ulysses slices the tokens before the model and gathers log-probabilities after it: everything between, logits too,
  has 1/ulysses of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from topoplan.network.nccl_buffers import Use, buffer_bytes
from topoplan.network.placement import Group, span
from topoplan.network.topology import local_ranks
from topoplan.operators.params import embedding_tensors, head_tensors, layer_tensors, parameter_count
from topoplan.specs.cluster import Cluster
from topoplan.specs.gpu_profile import Profile
from topoplan.specs.model import Attention, LatentAttention, Layer, LinearAttention, Model, Moe

BF16 = 2
FP32 = 4
SEQUENCES_PER_MICROBATCH = 2
"""Longest sequences that a micro batch has room for; Trinity-RFT `common/config.py`: max_token_len_per_gpu is twice
max_model_len over the Ulysses degree where it is not set, and `common/verl_config.py` raises it to that where it is
less."""
LOGITS_AT_PEAK = 4
"""bf16 copies of the logits' size alive at the worst moment of their backward.

verl divides the logits by the temperature in place, on a view of the model's output (`logits_rmpad.div_`), and autograd
runs that backward as a CopySlices node (PyTorch `csrc/autograd/functions/tensor.cpp`, CopySlices::apply_impl): the
incoming gradient, its copy for the base, a contiguous clone of the view and the divided result. Earlier moments have
three: logits and the gradients of log-probability (flash-attn's cross entropy, not in place where there is an entropy)
and of the entropy, whose compiled forward saves the logits alone."""
STRANDED_LOGITS = 1
"""Copies of the logits' size that the caching allocator loses without expandable segments.

The first update leaves its logits blocks free, Adam's moments are then put into one of them (best fit, blocks are
split), and the next update needs a whole one in its place (PyTorch `c10/cuda/CUDACachingAllocator.cpp`)."""
STATES_BYTES = 16
"""A parameter in fp32, its gradient and Adam's two moments."""
STEP_BYTES = 20
"""The same during the optimizer's step: foreach AdamW has one more fp32 tensor for every parameter, the square root of
the second moment (`torch/optim/adam.py::_multi_tensor_adam`)."""
SAVED_BYTES = 12
"""A parameter and its moments, while a checkpoint is written: gradients are set to None after the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyUpdate:
    """How one model is trained on how many GPUs."""

    gpus: int
    """GPUs of the trainer, one FSDP group."""
    max_model_len: int
    """Tokens of the longest sequence, prompt and response."""
    ulysses: int = 1
    """Ulysses sequence-parallel degree."""
    offload: bool = False
    """FSDP 2 with parameters, gradients and optimizer in host memory, and no Hugging Face checkpoint at the end."""
    expandable_segments: bool = False
    """PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch on one GPU."""
        return ceil(SEQUENCES_PER_MICROBATCH * self.max_model_len / self.ulysses)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMemory:
    """Memory of one GPU of the trainer, in bytes."""

    moments_bytes: Mapping[str, float]
    """Live tensors at each moment that can be the peak, by its name."""
    stranded_bytes: float
    """Reserved by the allocator at the peak and of no use."""
    context_bytes: float
    """CUDA context and NCCL's buffers."""
    capacity_bytes: float
    """What a process may use of the card."""
    host_bytes: float
    """Host memory of one process: what is offloaded."""

    @property
    def peak(self) -> str:
        """The moment that needs most."""
        return max(self.moments_bytes, key=lambda name: self.moments_bytes[name])

    @property
    def device_bytes(self) -> float:
        """All of it on the card."""
        return self.moments_bytes[self.peak] + self.stranded_bytes + self.context_bytes

    @property
    def fits(self) -> bool:
        """It is within the card."""
        return self.device_bytes <= self.capacity_bytes


def update_memory(model: Model, cluster: Cluster, profile: Profile, update: PolicyUpdate) -> UpdateMemory:
    """Memory of one policy update.

    `cluster` is the machine the GPUs are in; how many of them is `update.gpus`.
    """
    states = _States(model, update)
    logits = BF16 * model.vocab_size * update.tokens
    kept = _checkpoint_bytes(model) * update.tokens
    moments = {
        "gradient of the logits": states.resident
        + states.root
        + states.layer
        + kept
        + (_head_bytes(model) * update.tokens + LOGITS_AT_PEAK * logits),
        "backward of a layer": states.resident + states.layer_backward + kept + _layer_bytes(model) * update.tokens,
        "gradients of embedding and output layer": states.resident + states.root_backward,
        "optimizer step": states.step,
        "checkpoint": states.checkpoint,
    }
    peak = max(moments.values())
    if update.expandable_segments:
        stranded = profile.expandable_fragmentation * peak
    else:
        with_block = moments["gradient of the logits"] + STRANDED_LOGITS * logits
        stranded = max(profile.fragmentation * peak, with_block - peak)
    return UpdateMemory(
        moments_bytes=moments,
        stranded_bytes=stranded,
        context_bytes=profile.context_bytes + _communicators_bytes(cluster, profile, update),
        capacity_bytes=cluster.gpu.memory_bytes - profile.driver_bytes,
        host_bytes=STATES_BYTES * parameter_count(model) / update.gpus if update.offload else 0.0,
    )


class _States:
    """What parameters, gradients and optimizer take of one GPU, without activations."""

    def __init__(self, model: Model, update: PolicyUpdate) -> None:
        parameters = parameter_count(model)
        table = sum(tensor.elements for tensor in embedding_tensors(model))
        head = sum(tensor.elements for tensor in head_tensors(model))
        layer = max(sum(tensor.elements for tensor in layer_tensors(model, one)) for one in set(model.layers))
        # FSDP 1 wraps the layers, and the rest is one unit; FSDP 2 wraps an embedding that is not tied too (verl
        # `utils/fsdp_utils.py`: get_fsdp_wrap_policy, apply_fsdp2).
        root = head if update.offload and not model.tie_word_embeddings else table + head
        shard = 0.0 if update.offload else parameters / update.gpus
        self.resident = STATES_BYTES * shard
        self.root = float(BF16 * root)
        """The outermost unit in bf16: gathered from the first layer to the last."""
        self.layer = float(BF16 * layer)
        """One layer in bf16: the next one is gathered ahead (BackwardPrefetch.BACKWARD_PRE)."""
        # A gradient is cast to fp32 and reduced in it: bf16, fp32, and this rank's part.
        gradient = BF16 + FP32 + FP32 / update.gpus
        # The output layer's gradient waits for the embedding's, which share a flat parameter.
        self.layer_backward = self.root + BF16 * root + 2 * self.layer + gradient * layer
        self.root_backward = self.root + gradient * root
        self.step = STEP_BYTES * shard
        self.checkpoint = SAVED_BYTES * shard
        if update.gpus == 1 and not update.offload:
            # NO_SHARD has no sharded state, and the full one is cloned on the card whatever the config says
            # (`fsdp/_state_dict_utils.py::_replace_with_full_state_dict_type`), tied weights under both their names.
            # The trainer's own checkpoint is still being written when the Hugging Face one is made.
            names = parameters + (table if model.tie_word_embeddings else 0)
            self.checkpoint += 2 * FP32 * names


def _checkpoint_bytes(model: Model) -> int:
    """Bytes a token that the forward pass keeps: the input of every layer."""
    return BF16 * model.hidden_size * model.num_layers


def _head_bytes(model: Model) -> int:
    """Bytes a token behind the last layer: the norm's fp32 copy and its bf16 result, and the output layer's input."""
    return (FP32 + BF16 + BF16) * model.hidden_size


def _layer_bytes(model: Model) -> float:
    """Bytes a token of one layer that is computed again and goes back: what it saves, and its gradients."""
    return max(_one_layer_bytes(model, layer) for layer in set(model.layers))


def _one_layer_bytes(model: Model, layer: Layer) -> float:
    """Eager transformers layers: each norm keeps an fp32 copy, its bf16 result and the product with the weight."""
    hidden = model.hidden_size
    query, key_value = _attention_widths(layer)
    norms = 2 * (FP32 + BF16 + BF16) * hidden
    # Queries and keys behind the rotation, values, the result; with a norm of their own, as above.
    attention = BF16 * (2 * query + 2 * key_value)
    if isinstance(layer.attention, Attention) and layer.attention.qk_norm:
        attention += (FP32 + BF16) * (query + key_value)
    width = _mlp_width(layer)
    # gate, up, the activation's result and the product of both.
    mlp = 4 * BF16 * width
    # Gradients: of product, gate and up; or of queries (fp32 sums), keys and values.
    going_back = max(3 * BF16 * width, (FP32 + BF16) * query + 2 * BF16 * key_value) + 2 * BF16 * hidden
    return norms + attention + mlp + going_back


def _attention_widths(layer: Layer) -> tuple[int, int]:
    """Elements a token of queries, and of keys (values have as many)."""
    attention = layer.attention
    if isinstance(attention, LatentAttention):
        width = attention.heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
        return width, width
    if isinstance(attention, LinearAttention):
        return attention.value_heads * attention.value_head_dim, attention.key_heads * attention.key_head_dim
    return attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim


def _mlp_width(layer: Layer) -> int:
    """Columns of the feed-forward block that one token goes through."""
    if isinstance(layer.ffn, Moe):
        return layer.ffn.experts_per_token * layer.ffn.intermediate_size + layer.ffn.shared_intermediate_size
    return layer.ffn.intermediate_size


def _communicators_bytes(cluster: Cluster, profile: Profile, update: PolicyUpdate) -> int:
    """Buffers of FSDP's group, of Ulysses' all-to-all, and of the pair that sends weights to the explorer.

    Source: `fsdp_workers.py`, the device meshes and setup_weight_sync_group; verl `utils/ulysses.py`.
    """
    domain = local_ranks(cluster)

    def of(size: int, *uses: Use) -> int:
        return buffer_bytes(size, span(Group(size, 1), domain), frozenset(uses), cluster, profile)

    total = of(update.gpus, "gather", "small all-reduce") + of(2, "gather")
    if update.ulysses > 1:
        total += of(update.ulysses, "gather", "all-to-all")
    return total
