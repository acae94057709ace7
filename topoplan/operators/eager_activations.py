"""What a layer of Hugging Face's models keeps for its backward pass, tensor by tensor, for one micro batch of a GPU.

Source: the modules of transformers 5.6 (`models/llama/modeling_llama.py` and its kin), and what PyTorch's autograd
saves for each operation (`tools/autograd/derivatives.yaml`): a product saves the other factor where this one needs a
gradient, a matrix product its input where the weight needs one, `pow` its input, FlashAttention q, k, v, its output and
the softmax statistics. Weights are in 16 bits, or in fp32 under autocast, which casts the input of every linear layer
anew (PyTorch `aten/src/ATen/autocast_mode.cpp`, cached_cast keeps casts of weights alone). Nothing is fused but where
Liger's kernels replace the norms and the gated MLP (`liger_kernel/ops/rms_norm.py`, `swiglu.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from topoplan.operators.te_activations import BF16, FP32, SavedTensor
from topoplan.specs.model import Attention, LatentAttention, Layer, Mlp, Model, Moe

INT64 = 8

LOGIT_BYTES = 3 * FP32
"""Bytes a logit at the start of backward: the saved log softmax, the gradient of the negative log likelihood, and that
of the log softmax, all in fp32. transformers `loss/loss_utils.py::ForCausalLMLoss` computes in fp32, and the model's
own logits are gone by then (`Trainer.compute_loss` hands back the loss alone)."""
FORWARD_LOGIT_BYTES = BF16 + 2 * FP32
"""The same at the end of forward: the logits, their fp32 form, and the log softmax."""
CHUNKED_LOGIT_BYTES = BF16 + FP32
"""The same for the chunk of rows that Liger's fused loss works on: logits, turned into gradients in place, and their
fp32 form (`liger_kernel/ops/fused_linear_cross_entropy.py`)."""


ATTENTION_OUTPUTS = ("attention output", "softmax statistics")
"""Saved tensors that attention itself makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerUse:
    """How one layer is trained, as far as its memory and time depend on it."""

    tokens: int
    """Positions of a micro batch on this GPU."""
    seq_len: int
    """Extent of attention."""
    trains_weights: bool
    """Its own weights have gradients."""
    adapted: frozenset[str]
    """Names of its linear layers that have an adapter."""
    fused: bool
    """Liger's kernels."""
    flash_attention: bool = True
    fp32_weights: bool = False
    """Its own weights are in fp32, under autocast."""
    residual_bytes: int = BF16
    """Of an element between layers: it has the type of the embedding."""
    adapter_input_bytes: int = BF16
    """Of an element of the copy that an adapter makes of its input; 0 where both have one type and it makes none."""


@dataclass(frozen=True, slots=True)
class EagerActivations:
    """Memory of one layer and one micro batch, in bytes."""

    saved: tuple[SavedTensor, ...]
    input_bytes: float
    """The layer's input: all that gradient checkpointing keeps."""
    backward_bytes: float
    """Gradients at the worst moment of the layer's own backward."""

    @property
    def saved_bytes(self) -> float:
        """All of `saved` together."""
        return sum(tensor.saved_bytes for tensor in self.saved)


class _Saved:
    """Collects the saved tensors of one layer."""

    def __init__(self, model: Model, use: LayerUse) -> None:
        self.use, self.is_layernorm = use, model.norm == "layernorm"
        self.tensors: list[SavedTensor] = []

    def add(self, name: str, saved_bytes: float) -> None:
        if saved_bytes:
            self.tensors.append(SavedTensor(name, saved_bytes))

    def norm(self, name: str, elements: float, rows: float, *, of_residual: bool = False) -> None:
        """A norm's input. Eager RMSNorm makes an fp32 copy, and keeps what its weight is multiplied with."""
        each = self.use.residual_bytes if of_residual else BF16
        if self.use.fused or self.is_layernorm:
            self.add(f"{name} input", each * elements + 2 * FP32 * rows)
            return
        self.add(f"{name} input in fp32", FP32 * (elements + rows))
        self.add(f"{name} output before its weight", each * elements if self.use.trains_weights else 0)

    def inputs(self, names: tuple[str, ...], width: float, *, is_kept_anyway: bool = False) -> None:
        """The common input of some linear layers, in 16 bits: once, or once each where autocast casts it for each.

        An adapter of another type than the input casts it, a copy of its own (peft
        `tuners/lora/layer.py::Linear.forward`); in fp32 under autocast, what is kept of it is in 16 bits again.
        """
        use, tokens = self.use, self.use.tokens
        own = tuple(name for name in names if name in use.adapted)
        if not is_kept_anyway and (use.trains_weights or (own and not use.adapter_input_bytes)):
            for name in names if use.fp32_weights else names[:1]:
                self.add(f"{name} input", BF16 * tokens * width)
        for name in own:
            self.add(f"{name} adapter's input", use.adapter_input_bytes * tokens * width)


def _attention(saved: _Saved, hidden: int, attention: Attention) -> None:
    tokens = saved.use.tokens
    query, key = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    saved.norm("input_layernorm", tokens * hidden, tokens, of_residual=True)
    saved.inputs(("q_proj", "k_proj", "v_proj"), hidden)
    if attention.qk_norm:
        saved.norm("q_norm, k_norm", tokens * (query + key), tokens * (attention.heads + attention.kv_heads))
    if attention.output_gate:
        saved.add("output gate", 2 * BF16 * tokens * query)
    saved.add("q", BF16 * tokens * query)
    saved.add("k, v", 2 * BF16 * tokens * key)
    saved.add("attention output", BF16 * tokens * query)
    saved.add("softmax statistics", FP32 * tokens * attention.heads)
    if not saved.use.flash_attention:
        saved.add("attention probabilities", BF16 * tokens * saved.use.seq_len * attention.heads)
    saved.inputs(("o_proj",), query, is_kept_anyway=True)


def _latent_attention(saved: _Saved, hidden: int, attention: LatentAttention) -> None:
    tokens, heads = saved.use.tokens, attention.heads
    key = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    saved.norm("input_layernorm", tokens * hidden, tokens, of_residual=True)
    if attention.q_lora_rank:
        saved.inputs(("q_a_proj", "kv_a_proj_with_mqa"), hidden)
        saved.norm("q_a_layernorm", tokens * attention.q_lora_rank, tokens)
        saved.inputs(("q_b_proj",), attention.q_lora_rank)
    else:
        saved.inputs(("q_proj", "kv_a_proj_with_mqa"), hidden)
    saved.norm("kv_a_layernorm", tokens * attention.kv_lora_rank, tokens)
    saved.inputs(("kv_b_proj",), attention.kv_lora_rank)
    saved.add("q, k", 2 * BF16 * tokens * heads * key)
    # v is a view of kv_b_proj's output, which lives on with the part of k beside it.
    saved.add("v, kv_b_proj output", BF16 * tokens * heads * (attention.qk_nope_head_dim + attention.v_head_dim))
    saved.add("attention output", BF16 * tokens * heads * attention.v_head_dim)
    saved.add("softmax statistics", FP32 * tokens * heads)
    saved.inputs(("o_proj",), heads * attention.v_head_dim, is_kept_anyway=True)


def _mlp(saved: _Saved, hidden: int, width: float, *, gated: bool) -> float:
    """A feed-forward block without its norm. Returns the gradients at the worst moment of its backward, in bytes."""
    tokens = saved.use.tokens
    saved.inputs(("gate_proj", "up_proj") if gated else ("up_proj",), hidden)
    _activation(saved, BF16 * tokens * width, gated=gated)
    saved.inputs(("down_proj",), width)
    # Of the output, of the product, and of its factors.
    return tokens * (saved.use.residual_bytes * hidden + BF16 * width * (3 if gated else 2))


def _activation(saved: _Saved, size: float, *, gated: bool) -> None:
    if gated:
        saved.add("gate, up", 2 * size)
        # Liger's kernel works the activation out again in backward.
        saved.add("activation", 0 if saved.use.fused else size)
    else:
        saved.add("up", size)


def _moe(saved: _Saved, hidden: int, moe: Moe) -> float:
    """Experts in one parameter, which autocast does not cast: with fp32 weights they compute in fp32.

    transformers `integrations/moe.py`, grouped_mm_experts_forward and _grouped_mm.
    """
    use = saved.use
    tokens, routed = use.tokens, use.tokens * moe.experts_per_token
    each = FP32 if use.fp32_weights else BF16
    saved.add("router probabilities", FP32 * tokens * moe.experts)
    saved.add("order of tokens", 4 * INT64 * routed)
    # A shared expert's first product keeps the same tensor.
    is_kept_anyway = moe.shared_intermediate_size and not use.fp32_weights
    saved.add("router input", BF16 * tokens * hidden if use.trains_weights and not is_kept_anyway else 0)
    saved.add("experts' input", each * routed * hidden if use.trains_weights else 0)
    product = each * routed * moe.intermediate_size
    _activation(saved, product, gated=moe.gated)
    saved.add("experts.down_proj input", product if use.trains_weights else 0)
    saved.add("experts' output", each * routed * hidden)
    if moe.shared_intermediate_size:
        if moe.shared_gate:
            saved.inputs(("shared_expert_gate",), hidden, is_kept_anyway=not use.fp32_weights)
            saved.add("shared expert's output", BF16 * tokens * hidden)
        _mlp(saved, hidden, moe.shared_intermediate_size, gated=moe.gated)
    return product * (3 if moe.gated else 2) + 2 * each * routed * hidden


@lru_cache(maxsize=1 << 12)
def eager_activations(model: Model, layer: Layer, use: LayerUse) -> EagerActivations:
    """Everything that one layer keeps for one micro batch, and what its backward adds."""
    hidden, tokens, attention = model.hidden_size, use.tokens, layer.attention
    saved = _Saved(model, use)
    if isinstance(attention, Attention):
        _attention(saved, hidden, attention)
    elif isinstance(attention, LatentAttention):
        _latent_attention(saved, hidden, attention)
    else:
        key = attention.key_heads * attention.key_head_dim
        value = attention.value_heads * attention.value_head_dim
        saved.norm("input_layernorm", tokens * hidden, tokens, of_residual=True)
        saved.inputs(("in_proj_qkvz", "in_proj_ba"), hidden)
        saved.add("convolution's input and output", 2 * BF16 * tokens * (2 * key + value))
        saved.add("normed q, k", BF16 * tokens * 2 * key)
        saved.add("decay and beta", 2 * FP32 * tokens * attention.value_heads)
        saved.add("chunk products, output and gate", 4 * BF16 * tokens * value)
        saved.inputs(("out_proj",), value)
    saved.norm("post_attention_layernorm", tokens * hidden, tokens, of_residual=True)
    if isinstance(layer.ffn, Mlp):
        backward = _mlp(saved, hidden, layer.ffn.intermediate_size, gated=layer.ffn.gated)
    else:
        backward = _moe(saved, hidden, layer.ffn)
    if model.hidden_dropout:
        saved.add("dropout masks", 2 * tokens * hidden)
    input_bytes = float(use.residual_bytes * tokens * hidden)
    return EagerActivations(saved=tuple(saved.tensors), input_bytes=input_bytes, backward_bytes=backward)
