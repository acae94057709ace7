"""What a layer keeps for its backward pass, tensor by tensor, on one rank and for one micro batch.

Source: what the autograd functions of Transformer Engine save (`pytorch/module/layernorm_linear.py`, `linear.py`,
`grouped_linear.py`, `attention/`: `ctx.save_for_backward`) in the modules that megatron-core builds for
`transformer_impl: transformer_engine` (`core/models/gpt/gpt_layer_specs.py`). The shape of the argument is that of
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, section 4), with
flash attention, gated MLPs, MoE and MLA in place of GPT-3's layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from topoplan.layout.layout import Recompute
from topoplan.operators.shard import Shard
from topoplan.specs.model import Attention, LatentAttention, Layer, LinearAttention, Mlp, Model, Moe, VisionTower

BF16 = 2
FP32 = 4
QUANTISED_BYTES = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Bytes of a quantised value: mxfp8 has a scale byte for 32 values, nvfp4 one for 16."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor that backward needs."""

    name: str
    saved_bytes: float
    freed_by: tuple[str, ...] = ()
    """Megatron recompute modules that drop it."""


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Memory of one layer and one micro batch besides its weights, in bytes."""

    saved: tuple[SavedTensor, ...]
    input_bytes: float
    """The layer's input: all that full recomputation keeps. A multi-token-prediction layer has two."""
    backward_bytes: float
    """Gradients alive at the worst moment of the layer's own backward, less what has been freed by then."""
    weight_shapes: tuple[tuple[int, int], ...]
    """Shapes of this rank's weight matrices. Transformer Engine keeps one dummy gradient for each distinct shape
    (`pytorch/module/base.py::get_dummy_wgrad`) when weight gradients are accumulated in place."""

    @property
    def saved_bytes(self) -> float:
        """All of `saved` together."""
        return sum(tensor.saved_bytes for tensor in self.saved)


def _linear_input_bytes(shard: Shard) -> float:
    """Bytes an element of a saved GEMM input: low-precision layers keep the quantised copy."""
    return QUANTISED_BYTES.get(shard.precision, BF16)


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear layer as a rank has it: what its backward needs of its input."""

    name: str
    """As Megatron-core calls it."""
    rows: float
    """Of its input, where that is saved."""
    inputs: float
    outputs: float
    freed_by: tuple[str, ...] = ()
    """Recompute modules that run all of it again."""
    label: str = ""
    """What its input is called; empty for its own name's."""
    is_shared: bool = False
    """Its input is saved by something else too, so that it costs nothing where the weight is trained."""
    input_freed_by: tuple[str, ...] | None = None
    """Recompute modules that bring back its input, where they are others."""
    is_normed: bool = False
    """Its norm is fused into it (`pytorch/module/layernorm_linear.py`)."""

    def saved(self, shard: Shard) -> list[SavedTensor]:
        """The input for the weight's gradient or, where an adapter is trained beside a frozen weight, what that needs.

        With `weight.requires_grad` false Transformer Engine saves no input, but that a layer which hands the norm's
        output to an adapter saves it all the same (`layernorm_linear.py`: ln_out_to_save). The adapter drops out parts
        of its input: A saves the result, dropout a byte of mask, B what A makes of it (mcore_bridge
        `tuners/lora.py::LoraParallelLinear.forward`).
        """
        adapters, elements = shard.adapters, self.rows * self.inputs
        if adapters is None:
            freed = self.freed_by if self.input_freed_by is None else self.input_freed_by
            label = self.label or f"{self.name} input"
            return [] if self.is_shared else [SavedTensor(label, _linear_input_bytes(shard) * elements, freed)]
        if not adapters.on(self.name):
            return []
        narrow = self.rows if self.name.startswith("experts.") else shard.local_tokens
        saved = [SavedTensor(f"{self.name} norm output", BF16 * elements, self.freed_by)] if self.is_normed else []
        return [
            *saved,
            SavedTensor(f"{self.name} adapter input, mask", (BF16 + 1) * elements, self.freed_by),
            SavedTensor(f"{self.name} adapter, between A and B", BF16 * narrow * adapters.rank, self.freed_by),
        ]

    def shapes(self, shard: Shard) -> list[tuple[int, int]]:
        """Of the weights that are trained."""
        inputs, outputs, adapters = int(self.inputs), int(self.outputs), shard.adapters
        if adapters is None:
            return [(outputs, inputs)]
        return [(adapters.rank, inputs), (outputs, adapters.rank)] if adapters.on(self.name) else []


def _saved(shard: Shard, *linears: _Linear) -> list[SavedTensor]:
    return [tensor for linear in linears for tensor in linear.saved(shard)]


def _shapes(shard: Shard, *linears: _Linear) -> list[tuple[int, int]]:
    return [shape for linear in linears for shape in linear.shapes(shard)]


def _score_matrix(shard: Shard, heads: float) -> list[SavedTensor]:
    """Without flash attention, the softmax's output (`core/transformer/dot_product_attention.py`)."""
    if shard.flash_attention:
        return []
    return [SavedTensor("attention probabilities", BF16 * shard.tokens * shard.seq_len * heads, ("core_attn",))]


def _attention(model: Model, attention: Attention, shard: Shard) -> tuple[list[SavedTensor], list[tuple[int, int]]]:
    hidden, tokens, local = model.hidden_size, shard.tokens, shard.local_tokens
    heads, kv_heads = attention.heads / shard.tp, max(attention.kv_heads / shard.tp, 1)
    width = attention.head_dim
    query = int(heads * width) * (2 if attention.output_gate else 1)
    qkv = _Linear("linear_qkv", local, hidden, query + int(2 * kv_heads * width), is_normed=True)
    proj = _Linear("linear_proj", tokens, heads * width, hidden, is_shared=not shard.eight_bit)
    saved = [
        SavedTensor("layernorm input", BF16 * local * hidden),
        *qkv.saved(shard),
        SavedTensor("layernorm statistics", FP32 * local),
    ]
    if attention.qk_norm:
        saved.append(SavedTensor("q, k before their norm", BF16 * tokens * (heads + kv_heads) * width))
        saved.append(SavedTensor("q, k norm statistics", FP32 * tokens * (heads + kv_heads)))
    if attention.output_gate:
        saved.append(SavedTensor("output gate", 2 * BF16 * tokens * heads * width))
    saved += [
        SavedTensor("q", BF16 * tokens * heads * width),
        SavedTensor("k, v", 2 * BF16 * tokens * kv_heads * width),
        SavedTensor("attention output", BF16 * tokens * heads * width),
        SavedTensor("softmax statistics", FP32 * tokens * heads, ("core_attn",)),
    ]
    saved += _score_matrix(shard, heads)
    if not shard.flash_attention and kv_heads < heads:
        saved.append(SavedTensor("k, v repeated for every head", 2 * BF16 * tokens * heads * width, ("core_attn",)))
    saved += proj.saved(shard)
    return saved, _shapes(shard, qkv, proj)


def _latent_attention(
    model: Model, attention: LatentAttention, shard: Shard
) -> tuple[list[SavedTensor], list[tuple[int, int]]]:
    hidden, tokens, local = model.hidden_size, shard.tokens, shard.local_tokens
    heads = attention.heads // shard.tp
    key = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    q_rank, kv_rank, rope = attention.q_lora_rank, attention.kv_lora_rank, attention.qk_rope_head_dim
    values, up = heads * attention.v_head_dim, ("mla_up_proj",)
    into_values = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    down = _Linear(
        "linear_kv_down_proj",
        local,
        hidden,
        kv_rank + rope,
        label="down projection input",
        input_freed_by=("layernorm",),
    )
    kv_up = _Linear("linear_kv_up_proj", local, kv_rank, into_values, up, label="kv compressed, normed", is_normed=True)
    proj = _Linear("linear_proj", tokens, values, hidden, is_shared=not shard.eight_bit)
    # The queries' first matrix has the same input as that of keys and values.
    queries = [_Linear("linear_q_proj", local, hidden, heads * key, up, is_shared=True)]
    if q_rank:
        queries = [
            _Linear("linear_q_down_proj", local, hidden, q_rank, is_shared=True),
            _Linear("linear_q_up_proj", local, q_rank, heads * key, up, label="q compressed, normed", is_normed=True),
        ]
    saved = [
        SavedTensor("layernorm input", BF16 * local * hidden),
        *down.saved(shard),
        SavedTensor("kv compressed", BF16 * local * (kv_rank + rope)),
        *kv_up.saved(shard),
        SavedTensor("q", BF16 * tokens * heads * key, up),
        SavedTensor("k", BF16 * tokens * heads * key, up),
        SavedTensor("v", BF16 * tokens * heads * attention.v_head_dim, up),
        SavedTensor("attention output", BF16 * tokens * heads * attention.v_head_dim),
        SavedTensor("softmax statistics", FP32 * tokens * heads, ("core_attn",)),
        SavedTensor("norm statistics", 3 * FP32 * local),
    ]
    if q_rank:
        saved.append(SavedTensor("q compressed", BF16 * local * q_rank))
    saved += [*_saved(shard, *queries), *_score_matrix(shard, heads), *proj.saved(shard)]
    return saved, _shapes(shard, down, kv_up, proj, *queries)


def _linear_attention(
    model: Model, attention: LinearAttention, shard: Shard
) -> tuple[list[SavedTensor], list[tuple[int, int]]]:
    hidden, tokens, local = model.hidden_size, shard.tokens, shard.local_tokens
    key = attention.key_heads * attention.key_head_dim // shard.tp
    value = attention.value_heads * attention.value_head_dim // shard.tp
    heads = attention.value_heads / shard.tp
    into = _Linear("in_proj", local, hidden, 2 * key + 2 * value + int(2 * heads), is_normed=True)
    out = _Linear("out_proj", tokens, value, hidden)
    saved = [
        SavedTensor("layernorm input", BF16 * local * hidden),
        *into.saved(shard),
        SavedTensor("convolution input", BF16 * tokens * (2 * key + value)),
        SavedTensor("convolution output (q, k, v)", BF16 * tokens * (2 * key + value)),
        SavedTensor("decay and beta", 2 * FP32 * tokens * heads),
        SavedTensor("normed q, k", BF16 * tokens * 2 * key),
        SavedTensor("chunk products", 2 * BF16 * tokens * value),
        SavedTensor("output and gate", 2 * BF16 * tokens * value),
        *out.saved(shard),
    ]
    return saved, _shapes(shard, into, out)


def _mlp(model: Model, mlp: Mlp, shard: Shard) -> tuple[list[SavedTensor], float, list[tuple[int, int]]]:
    hidden, tokens, local = model.hidden_size, shard.tokens, shard.local_tokens
    width = mlp.intermediate_size / shard.tp
    first = width * (2 if mlp.gated else 1)
    freed = ("mlp",)
    fc1 = _Linear("linear_fc1", local, hidden, first, freed, is_normed=True)
    fc2 = _Linear("linear_fc2", tokens, width, hidden, freed)
    saved = [
        SavedTensor("mlp layernorm input", BF16 * local * hidden),
        *fc1.saved(shard),
        SavedTensor("mlp layernorm statistics", FP32 * local),
        SavedTensor("linear_fc1 output", BF16 * tokens * first, freed),
        *fc2.saved(shard),
    ]
    # At the activation's backward: the layer's output gradient, and the gradients of fc2's input (whose saved copy is
    # freed) and of fc1's output.
    backward = BF16 * tokens * (hidden + width + first) - sum(tensor.saved_bytes for tensor in fc2.saved(shard))
    return saved, backward, _shapes(shard, fc1, fc2)


def _moe(model: Model, moe: Moe, shard: Shard) -> tuple[list[SavedTensor], float, list[tuple[int, int]]]:
    hidden, tokens, local = model.hidden_size, shard.tokens, shard.local_tokens
    routed = shard.routed_tokens(moe)
    width = moe.intermediate_size / shard.etp
    first = width * (2 if moe.gated else 1)
    fc1 = _Linear("experts.linear_fc1", routed, hidden, first, ("moe",))
    fc2 = _Linear("experts.linear_fc2", routed, width, hidden, ("moe",), input_freed_by=("moe", "moe_act"))
    saved = [
        SavedTensor("mlp layernorm input", BF16 * local * hidden),
        # The router saves it for a frozen weight too (`moe/moe_utils.py::RouterGatingLinearFunction`).
        SavedTensor("router and dispatch input", BF16 * local * hidden, ("layernorm",)),
        SavedTensor("router logits, probabilities, map", (2 * FP32 + 1) * local * moe.experts, ("moe",)),
        *fc1.saved(shard),
        SavedTensor("experts.linear_fc1 output", BF16 * routed * first, ("moe",)),
        *fc2.saved(shard),
        SavedTensor("routing weights and row maps", 2 * FP32 * routed, ("moe",)),
    ]
    shapes = _shapes(shard, fc1, fc2)
    if moe.shared_intermediate_size:
        shared = moe.shared_intermediate_size / shard.tp
        shared_first = shared * (2 if moe.gated else 1)
        freed = ("moe", "shared_experts")
        shared_fc1 = _Linear("shared_experts.linear_fc1", local, hidden, shared_first, freed, is_shared=True)
        shared_fc2 = _Linear("shared_experts.linear_fc2", tokens, shared, hidden, freed)
        saved += [
            *shared_fc1.saved(shard),
            SavedTensor("shared_experts.linear_fc1 output", BF16 * tokens * shared_first, freed),
            *shared_fc2.saved(shard),
        ]
        shapes += _shapes(shard, shared_fc1, shared_fc2)
    # Gradients on their way back through combine: the layer's output gradient, its permuted copy before and after the
    # all-to-all and after the sort by expert, then the experts' own.
    backward = BF16 * (local * hidden + routed * (4 * hidden + first))
    return saved, backward, shapes


def _mtp(model: Model, shard: Shard) -> tuple[list[SavedTensor], float, list[tuple[int, int]]]:
    """What a multi-token-prediction layer saves around its block, what its backward adds, and its weights' shapes.

    Source: megatron-core 0.16 `core/transformer/multi_token_prediction.py` (MultiTokenPredictionLayer).
    """
    hidden, local = model.hidden_size, shard.local_tokens
    joint = _Linear("eh_proj", local, 2 * hidden, hidden // shard.tp)
    saved = [
        SavedTensor("enorm input", BF16 * local * hidden),
        SavedTensor("hnorm input", BF16 * local * hidden),
        *joint.saved(shard),
        SavedTensor("mtp final_layernorm input", BF16 * local * hidden),
        SavedTensor("mtp norm statistics", 3 * FP32 * local),
    ]
    if shard.sequence_parallel:
        # The block's input is a slice of eh_proj's output, gathered over the tensor-parallel group, and keeps it alive.
        saved.append(SavedTensor("eh_proj output, gathered", BF16 * (shard.tokens - local) * hidden))
    # At the block's own worst moment the input of the norm behind it is freed.
    return saved, -BF16 * local * hidden, joint.shapes(shard)


@lru_cache(maxsize=1 << 16)
def layer_activations(model: Model, layer: Layer, shard: Shard) -> LayerActivations:
    """Everything that one layer keeps for one micro batch."""
    if isinstance(layer.attention, LatentAttention):
        saved, shapes = _latent_attention(model, layer.attention, shard)
    elif isinstance(layer.attention, LinearAttention):
        saved, shapes = _linear_attention(model, layer.attention, shard)
    else:
        saved, shapes = _attention(model, layer.attention, shard)
    ffn_saved, backward, ffn_shapes = (
        _mlp(model, layer.ffn, shard) if isinstance(layer.ffn, Mlp) else _moe(model, layer.ffn, shard)
    )
    if model.hidden_dropout:
        # One byte an element behind attention and one behind the MLP (`core/fusions/fused_bias_dropout.py`).
        ffn_saved.append(SavedTensor("dropout masks", 2 * shard.local_tokens * model.hidden_size))
    inputs = 1
    if layer.predicts_next:
        mtp_saved, freed, mtp_shapes = _mtp(model, shard)
        saved, backward, inputs = [*mtp_saved, *saved], backward + freed, 2
        shapes = [*mtp_shapes, *shapes]
    return LayerActivations(
        saved=(*saved, *ffn_saved),
        input_bytes=inputs * BF16 * shard.local_tokens * model.hidden_size,
        backward_bytes=backward,
        weight_shapes=(*shapes, *ffn_shapes),
    )


@dataclass(frozen=True, slots=True)
class KeptActivations:
    """Memory of one layer under a recompute mode, in bytes a micro batch."""

    kept_bytes: float
    """From forward to backward, when the layer is recomputed or not as its mode says."""
    plain_bytes: float
    """The same for a layer that full recomputation leaves alone (method block)."""
    recomputed_bytes: float
    """Brought back for the layer's own backward."""
    backward_bytes: float
    """Gradients at the worst moment of that backward, less what has been freed by then."""

    @property
    def peak_bytes(self) -> float:
        """What the layer's own backward adds to what is kept."""
        return self.recomputed_bytes + self.backward_bytes


@lru_cache(maxsize=1 << 16)
def kept_activations(model: Model, layer: Layer, shard: Shard, recompute: Recompute) -> KeptActivations:
    """What a layer keeps and what its backward adds, with selective or full recomputation."""
    activations = layer_activations(model, layer, shard)
    everything, backward = activations.saved_bytes, activations.backward_bytes
    if recompute.granularity == "full":
        if layer.predicts_next and recompute.method == "block":
            # `MultiTokenPredictionLayer._checkpointed_forward` warns and recomputes nothing.
            return KeptActivations(everything, everything, 0.0, backward)
        # A recomputed layer holds all its activations again, beside the input that was kept.
        inputs = activations.input_bytes
        return KeptActivations(inputs, everything, everything - inputs, backward)
    dropped = sum(t.saved_bytes for t in activations.saved if set(t.freed_by) & set(recompute.modules))
    return KeptActivations(everything - dropped, everything - dropped, dropped, backward)


def vision_activation_bytes(tower: VisionTower, patches: int, *, recompute: bool) -> float:
    """What the Hugging Face vision tower keeps for `patches` patches: unsplit, SDPA, elementwise kernels unfused.

    Per block: two norms (input and output), q, k, v before and after rotation, attention output, fc1 output and its
    activation. With gradient checkpointing each block keeps its input.
    """
    hidden, width = tower.hidden_size, tower.intermediate_size
    block = BF16 * (12 * hidden + (3 if tower.gated else 2) * width)
    if recompute:
        return patches * (tower.layers * BF16 * hidden + block)
    return patches * tower.layers * block
