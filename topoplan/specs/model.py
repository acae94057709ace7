"""A model as the cost formulas see it: layers with attention and MLP, embedding and head, the vision tower."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from topoplan.specs.kinds import SIZE, Count, Number

MOST_LAYERS = 4096
"""Layer limit: more is a typing error, and the tuple of layers would not fit in the host's memory."""
Size = Annotated[int, SIZE]
SizeOrNone = Annotated[int, Count(0, 10**18)]
"""A size, or 0 if the model has no such part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Softmax attention with grouped queries (MHA and MQA are its extremes)."""

    kind: Literal["attention"] = field(default="attention", compare=False)
    heads: Size
    kv_heads: Size
    head_dim: Size
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim on queries and keys (Qwen3)."""
    output_gate: bool = False
    """A gate as wide as the query, projected with it (Qwen3-Next)."""
    sinks: bool = False
    """One learned sink logit per head (gpt-oss)."""
    window: SizeOrNone = 0
    """Sliding window in tokens; 0 is full causal attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention, DeepSeek-V2 (arXiv 2405.04434, section 2.1)."""

    kind: Literal["latent_attention"] = field(default="latent_attention", compare=False)
    heads: Size
    q_lora_rank: SizeOrNone
    """0: queries come from a single full matrix (DeepSeek-V2-Lite, Moonlight)."""
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Gated DeltaNet (Qwen3-Next): linear attention with a short convolution."""

    kind: Literal["linear_attention"] = field(default="linear_attention", compare=False)
    key_heads: Size
    value_heads: Size
    key_head_dim: Size
    value_head_dim: Size
    conv_kernel: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A dense feed-forward block."""

    kind: Literal["mlp"] = field(default="mlp", compare=False)
    intermediate_size: Size
    gated: bool = True
    """Three matrices (SwiGLU) instead of two."""
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """A mixture of experts. Every expert is an MLP of `intermediate_size`."""

    kind: Literal["moe"] = field(default="moe", compare=False)
    experts: Size
    experts_per_token: Size
    intermediate_size: Size
    shared_intermediate_size: SizeOrNone = 0
    """Combined width of the shared (always active) experts; 0 if there are none."""
    shared_gate: bool = False
    """A sigmoid gate with one output on the shared expert (Qwen2-MoE, Qwen3-Next)."""
    gated: bool = True
    bias: bool = False
    """Experts have biases (gpt-oss)."""
    router_bias: bool = False
    """The router's linear layer has a bias parameter (gpt-oss)."""
    groups: Size = 1
    """Equal groups of experts for group-limited routing (arXiv 2412.19437, section 2.1.2)."""
    groups_per_token: Size = 1
    """The number of groups that a token's experts may come from."""


AnyAttention = Attention | LatentAttention | LinearAttention
FeedForward = Mlp | Moe
_BY_KIND = {"discriminator": "kind"}
"""Names pydantic's discriminator of the union members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One transformer block: attention and feed-forward, each preceded by its norm."""

    attention: AnyAttention = field(metadata=_BY_KIND)
    ffn: FeedForward = field(metadata=_BY_KIND)
    predicts_next: bool = False
    """Whether this is a multi-token-prediction layer: the block follows a projection of the hidden state and the
    next token's embedding, each preceded by a norm, and has a final norm of its own (arXiv 2412.19437, section 2.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTower:
    """A ViT with a patch merger in front of the language model (Qwen2.5-VL, Qwen3-VL)."""

    layers: Annotated[int, Count(1, MOST_LAYERS)]
    hidden_size: Size
    heads: Size
    intermediate_size: Size
    gated: bool
    out_hidden_size: Size
    """Width of the merged tokens: the language model's hidden size."""
    patch_size: Size
    spatial_merge_size: Size
    """Patches merged along each side into one token."""
    encoder_parameters: Size
    """Parameters of patch embedding, positions and blocks (what freeze_vision_tower freezes)."""
    projector_parameters: Size
    """Parameters of the patch merger (what freeze_multi_modal_projector freezes)."""
    deepstack_parameters: SizeOrNone = 0
    """Parameters of Qwen3-VL's deepstack mergers. LLaMA-Factory freezes them with the tower, but not in its Megatron
    workflow, whose list of name prefixes leaves them out (train/mca/workflow.py, _freeze_model_parameters)."""
    min_first_stage_layers: SizeOrNone = 0
    """Language layers that must sit with the tower on the first stage (Qwen3-VL's deepstack inputs)."""

    @property
    def parameters(self) -> int:
        """All parameters of the tower."""
        return self.encoder_parameters + self.projector_parameters + self.deepstack_parameters


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """A decoder-only language model, with or without a vision tower.

    Compared and hashed by identity: it is a key of every cache in the search, and hashing a hundred layers would cost
    more than the cached formulas.
    """

    name: str
    """Hugging Face id, or the directory that the config came from."""
    model_type: str
    hidden_size: Size
    vocab_size: Size
    layers: tuple[Layer, ...]
    """One entry per layer; equal layers are one shared object."""
    tie_word_embeddings: bool
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_bias: bool = False
    learned_positions: SizeOrNone = 0
    """Rows of a learned position table (GPT-2); 0 with rotary embeddings."""
    hidden_dropout: Annotated[float, Number(0, 1)] = 0.0
    """Dropout after attention, MLP and embedding, whose masks are kept for the backward pass."""
    max_position_embeddings: SizeOrNone = 0
    """Longest context in the config; 0 if it gives none."""
    mtp_layers: SizeOrNone = 0
    """Multi-token-prediction layers in the checkpoint; 0 if the config gives none. Not counted as parameters: a job
    trains them only on request (`Job.mtp_num_layers`)."""
    num_labels: SizeOrNone = 0
    """For a classifier: outputs of the head that replaces the vocabulary's; 0 for a language model."""
    vision: VisionTower | None = None
    quantization: str = ""
    """Quantization method of the checkpoint's weights (gptq, awq, fp8); empty if the config names none."""
    config_path: str | None = None
    """Local directory of the model, if it was given as one."""

    @property
    def head_size(self) -> int:
        """Outputs of the head per token."""
        return self.num_labels or self.vocab_size

    @property
    def num_layers(self) -> int:
        """Transformer blocks of the language model."""
        return len(self.layers)


def with_labels(model: Model, labels: int) -> Model:
    """Return the model with a head of `labels` classes (transformers' AutoModelForSequenceClassification), if any."""
    return replace(model, num_labels=labels, tie_word_embeddings=False) if labels else model


def layer_kind(layer: Layer) -> str:
    """Return `attention + mlp`, with the size of the sliding window if there is one."""
    words = " + ".join(half.kind.replace("_", " ") for half in (layer.attention, layer.ffn))
    window = getattr(layer.attention, "window", 0)
    words = f"{words}, window {window}" if window else words
    return f"multi-token prediction of {words}" if layer.predicts_next else words
