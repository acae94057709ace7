"""What a layer of Hugging Face's models keeps for its backward pass, tensor by tensor, for one micro batch of a GPU.

Source: the modules of transformers 5.6 (`models/llama/modeling_llama.py` and its kin) under autocast in 16 bits, and
what PyTorch's autograd saves for each operation (`tools/autograd/derivatives.yaml`): a product saves the other factor
where this one needs a gradient, a matrix product its input where the weight needs one, `pow` its input, FlashAttention
q, k, v, its output and the softmax statistics. Nothing is fused but where Liger's kernels replace the norms and the
gated MLP (`liger_kernel/ops/rms_norm.py`, `swiglu.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from topoplan.cost.activations import BF16, FP32, SavedTensor
from topoplan.specs.model import Attention, LatentAttention, Layer, Mlp, Model, Moe

LOGIT_BYTES = 3 * FP32
"""Bytes a logit at the start of backward: the saved log softmax, the gradient of the negative log likelihood, and that
of the log softmax, all in fp32. transformers `loss/loss_utils.py::ForCausalLMLoss` computes in fp32, and the model's
own logits are gone by then (`Trainer.compute_loss` hands back the loss alone)."""
CHUNKED_LOGIT_BYTES = BF16 + FP32
"""The same for the chunk of rows that Liger's fused loss works on: logits, turned into gradients in place, and their
fp32 form (`liger_kernel/ops/fused_linear_cross_entropy.py`)."""


ATTENTION_OUTPUTS = ("attention output", "v, attention output", "softmax statistics")
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

    @property
    def has_backward(self) -> bool:
        """Whether gradients are computed in it at all, beside those that pass through."""
        return self.trains_weights or bool(self.adapted)


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

    def norm(self, name: str, elements: float, rows: float) -> None:
        """A norm's input. Eager RMSNorm makes an fp32 copy, and keeps what its weight is multiplied with."""
        if self.use.fused or self.is_layernorm:
            self.add(f"{name} input", BF16 * elements + 2 * FP32 * rows)
            return
        self.add(f"{name} input in fp32", FP32 * elements)
        self.add(f"{name} output before its weight", BF16 * elements if self.use.trains_weights else 0)

    def inputs(self, names: tuple[str, ...], width: float, *, is_kept_anyway: bool = False) -> None:
        """The common input of some linear layers: once for their weights, and once more for each adapter.

        An adapter in fp32 casts its input there and autocast casts it back, a copy of its own (peft
        `tuners/lora/layer.py::Linear.forward`).
        """
        tokens = self.use.tokens
        if self.use.trains_weights and not is_kept_anyway:
            self.add(f"{names[0]} input", BF16 * tokens * width)
        for name in names:
            if name in self.use.adapted:
                self.add(f"{name} adapter's input", BF16 * tokens * width)


def _attention(saved: _Saved, hidden: int, attention: Attention) -> None:
    tokens = saved.use.tokens
    query, key = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    saved.norm("input_layernorm", tokens * hidden, tokens)
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
    saved.norm("input_layernorm", tokens * hidden, tokens)
    if attention.q_lora_rank:
        saved.inputs(("q_a_proj", "kv_a_proj_with_mqa"), hidden)
        saved.norm("q_a_layernorm", tokens * attention.q_lora_rank, tokens)
        saved.inputs(("q_b_proj",), attention.q_lora_rank)
    else:
        saved.inputs(("q_proj", "kv_a_proj_with_mqa"), hidden)
    saved.norm("kv_a_layernorm", tokens * attention.kv_lora_rank, tokens)
    saved.inputs(("kv_b_proj",), attention.kv_lora_rank)
    saved.add("q, k", 2 * BF16 * tokens * heads * key)
    saved.add("v, attention output", 2 * BF16 * tokens * heads * attention.v_head_dim)
    saved.add("softmax statistics", FP32 * tokens * heads)
    saved.inputs(("o_proj",), heads * attention.v_head_dim, is_kept_anyway=True)


def _mlp(saved: _Saved, hidden: int, width: float, *, gated: bool, tokens: float, is_expert: bool = False) -> float:
    """A feed-forward block without its norm. Returns the gradients at the worst moment of its backward, in bytes."""
    names = () if is_expert else ("gate_proj", "up_proj") if gated else ("up_proj",)
    if names:
        saved.inputs(names, hidden)
    if gated:
        saved.add("gate, up", 2 * BF16 * tokens * width)
        # Liger's kernel works the activation out again in backward.
        saved.add("activation", 0 if saved.use.fused else BF16 * tokens * width)
    else:
        saved.add("up", BF16 * tokens * width)
    if saved.use.trains_weights:
        saved.add("down_proj input", BF16 * tokens * width)
    if "down_proj" in saved.use.adapted and not is_expert:
        saved.add("down_proj adapter's input", BF16 * tokens * width)
    # Of the output, of the product, and of its factors.
    return BF16 * tokens * (hidden + width * (3 if gated else 2))


def _moe(saved: _Saved, hidden: int, moe: Moe) -> float:
    tokens = saved.use.tokens
    routed = tokens * moe.experts_per_token
    saved.add("router logits, probabilities", 2 * FP32 * tokens * moe.experts)
    saved.add("router input", BF16 * tokens * hidden if saved.use.trains_weights else 0)
    saved.add("experts' input", BF16 * routed * hidden if saved.use.trains_weights else 0)
    backward = _mlp(saved, hidden, moe.intermediate_size, gated=moe.gated, tokens=routed, is_expert=True)
    saved.add("experts' output", BF16 * routed * hidden)
    if moe.shared_intermediate_size:
        _mlp(saved, hidden, moe.shared_intermediate_size, gated=moe.gated, tokens=tokens)
    return backward + BF16 * routed * hidden


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
        saved.norm("input_layernorm", tokens * hidden, tokens)
        saved.inputs(("in_proj_qkvz", "in_proj_ba"), hidden)
        saved.add("convolution's input and output", 2 * BF16 * tokens * (2 * key + value))
        saved.add("normed q, k", BF16 * tokens * 2 * key)
        saved.add("decay and beta", 2 * FP32 * tokens * attention.value_heads)
        saved.add("chunk products, output and gate", 4 * BF16 * tokens * value)
        saved.inputs(("out_proj",), value)
    saved.norm("post_attention_layernorm", tokens * hidden, tokens)
    if isinstance(layer.ffn, Mlp):
        backward = _mlp(saved, hidden, layer.ffn.intermediate_size, gated=layer.ffn.gated, tokens=tokens)
    else:
        backward = _moe(saved, hidden, layer.ffn)
    if model.hidden_dropout:
        saved.add("dropout masks", 2 * tokens * hidden)
    return EagerActivations(saved=tuple(saved.tensors), input_bytes=BF16 * tokens * hidden, backward_bytes=backward)
