"""Hugging Face's config.json -> `Model`.

Each fact is read under any of its usual names, whatever the model_type. The model_type decides only what the classes of
transformers hard-code without a key of their own (biases, query and key norms, defaults); it comes from
`transformers/models/*/configuration_*.py` and `modeling_*.py` (5.6). What the cost formulas do not know is refused by
name, never approximated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from topoplan.errors import ModelError
from topoplan.specs.model import (
    AnyAttention,
    Attention,
    LatentAttention,
    Layer,
    LinearAttention,
    Mlp,
    Model,
    Moe,
    VisionTower,
)

# Above these, a number is a slip of the keyboard, and a layer tuple of that length would not fit the host's memory.
_MOST_LAYERS = 4096
_MOST = 2**31 - 1

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_query_groups")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
_INTERMEDIATE = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
_VOCAB = ("vocab_size", "padded_vocab_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "seq_length")
_ACTIVATION = ("hidden_act", "activation_function", "hidden_activation")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "num_moe_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_router_topk", "moe_topk")
_EXPERT_WIDTH = ("moe_intermediate_size", "moe_ffn_hidden_size", "expert_intermediate_size")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts")
_EXPERT_GROUPS = ("n_group", "moe_router_num_groups")
_TOKEN_GROUPS = ("topk_group", "moe_router_group_topk")
_FIRST_DENSE = ("first_k_dense_replace", "moe_first_k_dense_replace")
_DROPOUT = ("resid_pdrop", "hidden_dropout", "hidden_dropout_prob")
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_layers", "mtp_num_hidden_layers")
_QK_NORM = ("use_qk_norm", "qk_layernorm", "qk_norm")

_GATED_ACTIVATIONS = frozenset({"silu", "swish", "swiglu", "geglu", "gated_silu"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What transformers' class of a model_type fixes in code. None: the config's keys decide."""

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    attention_bias: bool = False
    """Value of `attention_bias` when the config does not have it."""
    qk_norm: bool = False
    output_gate: bool = False
    sinks: bool = False
    mlp_bias: bool | None = None
    gated: bool | None = None
    norm: Literal["rmsnorm", "layernorm"] | None = None
    tied: bool = False
    """Value of `tie_word_embeddings` when the config does not have it."""
    shared_gate: bool = False
    expert_bias: bool = False
    expert_groups: tuple[int, int] = (1, 1)
    """Groups of experts, and how many of them a token may choose from, when the config does not say."""
    intermediate_divisor: int = 1
    """First-generation Qwen writes the width of both gate halves together."""
    learned_positions: int = 0
    """Rows of a learned position table when the config does not say."""
    dropout: float = 0.0
    """Dropout behind attention and MLP when the config does not say."""
    window_layers: Literal["none", "all", "alternate", "from_max_window_layers"] = "none"
    """Which layers use `sliding_window` when there is no `layer_types`."""
    linear_interval: int = 0
    """Every n-th layer is full attention when there is neither `layer_types` nor `full_attention_interval`."""


_LLAMA = _Family(gated=True, norm="rmsnorm")
_QWEN2 = _Family(
    qkv_bias=True, out_bias=False, mlp_bias=False, gated=True, norm="rmsnorm", window_layers="from_max_window_layers"
)
_QWEN2_MOE = _Family(
    qkv_bias=True,
    out_bias=False,
    mlp_bias=False,
    gated=True,
    norm="rmsnorm",
    shared_gate=True,
    window_layers="from_max_window_layers",
)
_QWEN3 = _Family(qk_norm=True, mlp_bias=False, gated=True, norm="rmsnorm", window_layers="from_max_window_layers")
_QWEN3_NEXT = _Family(
    qk_norm=True, output_gate=True, shared_gate=True, mlp_bias=False, gated=True, norm="rmsnorm", linear_interval=4
)
_MISTRAL = _Family(qkv_bias=False, out_bias=False, mlp_bias=False, gated=True, norm="rmsnorm", window_layers="all")
_DEEPSEEK = _Family(mlp_bias=False, gated=True, norm="rmsnorm")

_FAMILIES: dict[str, _Family] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": _MISTRAL,
    "qwen": _Family(qkv_bias=True, out_bias=False, mlp_bias=False, gated=True, norm="rmsnorm", intermediate_divisor=2),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_moe": _QWEN2_MOE,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": _QWEN3_NEXT,
    "qwen3_5_moe": _QWEN3_NEXT,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": replace(_DEEPSEEK, expert_groups=(8, 4)),
    "kimi_k2": _DEEPSEEK,
    "glm": _Family(out_bias=False, mlp_bias=False, gated=True, norm="rmsnorm"),
    "glm4_moe": _Family(out_bias=False, mlp_bias=False, gated=True, norm="rmsnorm"),
    "gpt_oss": _Family(
        attention_bias=True, sinks=True, expert_bias=True, gated=True, norm="rmsnorm", window_layers="alternate"
    ),
    "gpt2": _Family(
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated=False,
        norm="layernorm",
        tied=True,
        learned_positions=1024,
        dropout=0.1,
    ),
}

_HYBRID = "a state-space, recurrent or convolution hybrid"
_ENCODER = "an encoder without a causal decoder"
_SEQ2SEQ = "an encoder-decoder"
_BLOCK = "its transformer block (norms, parallel branches, caps or biases) is not modelled"
_SPARSE = "its sparse or hybrid attention is not modelled"
_MULTIMODAL = "its vision or audio tower is not modelled"

_UNSUPPORTED_TYPES: dict[str, str] = {
    _HYBRID: "mamba mamba2 falcon_mamba jamba bamba nemotron_h falcon_h1 zamba zamba2 granitemoehybrid lfm2 lfm2_moe "
    "plamo2 recurrent_gemma olmo_hybrid rwkv rwkv5 rwkv6 rwkv7 xlstm retnet kimi_linear",
    _ENCODER: "bert roberta xlm-roberta deberta deberta-v2 electra distilbert albert modernbert nomic_bert eurobert",
    _SEQ2SEQ: "t5 mt5 umt5 longt5 switch_transformers bart mbart pegasus marian m2m_100 nllb-moe whisper blenderbot "
    "encoder-decoder speech-encoder-decoder vision-encoder-decoder t5gemma t5gemma2",
    _BLOCK: "gemma gemma2 gemma3_text gemma3n_text gemma4_text vaultgemma cohere cohere2 phi phimoe falcon gptj "
    "gpt_neo gpt_neox gpt_bigcode bloom opt mpt stablelm starcoder2 dbrx olmo olmo2 olmo3 olmoe flex_olmo exaone4 "
    "exaone_moe glm4 chatglm nemotron granite granitemoe persimmon codegen jais jais2 helium apertus arcee "
    "longcat_flash hunyuan_v1_dense hunyuan_v1_moe smollm3 afmoe nanochat",
    _SPARSE: "deepseek_v32 deepseek_v4 glm_moe_dsa minimax minimax_text_01 minimax_m1 minimax_m2 llama4 llama4_text "
    "bitnet diffllama doge",
    _MULTIMODAL: "llava llava_next llava_onevision mllama paligemma gemma3 gemma3n gemma4 internvl internvl_chat "
    "kimi_vl kimi_k25 glm4v glm4v_moe glm46v mistral3 pixtral idefics2 idefics3 smolvlm minicpmv minicpmo qwen2_audio "
    "qwen2_5_omni qwen2_5_omni_thinker qwen3_omni_moe qwen3_omni_moe_thinker deepseek_vl deepseek_vl_v2 "
    "phi4_multimodal phi3_v ernie4_5_vl_moe",
}
_UNSUPPORTED = {model_type: reason for reason, types in _UNSUPPORTED_TYPES.items() for model_type in types.split()}

# Keys that only architectures outside the formulas have; they catch a model_type that is new or missing.
_UNSUPPORTED_KEYS: dict[str, str] = {
    "ssm_state_size": _HYBRID,
    "mamba_d_state": _HYBRID,
    "mamba_num_heads": _HYBRID,
    "hybrid_override_pattern": _HYBRID,
    "layers_block_type": _HYBRID,
    "linear_attn_config": _HYBRID,
    "encoder_layers": _SEQ2SEQ,
    "num_decoder_layers": _SEQ2SEQ,
    "final_logit_softcapping": _BLOCK,
    "attn_logit_softcapping": _BLOCK,
    "index_topk": _SPARSE,
    "audio_config": _MULTIMODAL,
}


class _Fields:
    """A config's values, checked as they are read. A key whose value is null counts as missing, as in transformers."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self.where = config, where

    def find(self, names: Sequence[str]) -> str | None:
        """The first of `names` that the config has a value for."""
        return next((name for name in names if self._config.get(name) is not None), None)

    def has(self, *names: str) -> bool:
        return self.find(names) is not None

    def raw(self, name: str) -> Any:
        return self._config.get(name)

    def wrong(self, name: str, expected: str) -> ModelError:
        value = repr(self._config.get(name))
        shown = value if len(value) <= 60 else f"{value[:57]}..."
        return ModelError(f"{name} is {shown}", where=self.where, expected=f"expected {expected}")

    def missing(self, names: Sequence[str]) -> ModelError:
        others = f", which may also be named {', '.join(names[1:])}" if names[1:] else ""
        return ModelError(
            f"{names[0]} is missing",
            where=self.where,
            expected=f"expected a positive integer{others}",
            remedy="add it, or name a model of the catalog (`topoplan models`)",
        )

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
        """An integer within bounds. Without a default a missing one is an error that lists its names."""
        name = self.find(names)
        if name is None:
            if default is None:
                raise self.missing(names)
            return default
        value = self._config[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, "an integer")
        if not least <= value <= most:
            raise self.wrong(name, f"an integer from {least:,} to {most:,}")
        return value

    def fraction(self, *names: str, default: float) -> float:
        """A number from 0 to 1."""
        name = self.find(names)
        if name is None:
            return default
        value = self._config[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise self.wrong(name, "a number from 0 to 1")
        return float(value)

    def boolean(self, *names: str, default: bool) -> bool:
        name = self.find(names)
        if name is None:
            return default
        value = self._config[name]
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, *names: str, default: str = "") -> str:
        name = self.find(names)
        if name is None:
            return default
        value = self._config[name]
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def indices(self, name: str) -> tuple[int, ...]:
        """A list of layer numbers; empty when missing."""
        value = self._config.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise self.wrong(name, "a list of layer numbers")
        return tuple(value)

    def words(self, name: str, length: int) -> tuple[str, ...] | None:
        """A list of one word a layer; None when missing."""
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(not isinstance(word, str) for word in value):
            raise self.wrong(name, "a list of one word a layer")
        if len(value) != length:
            raise ModelError(
                f"{name} has {len(value)} entries and num_hidden_layers is {length}",
                where=self.where,
                expected="expected one entry a layer",
            )
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return value


def _refuse(model_type: str, reason: str, where: str) -> ModelError:
    return ModelError(
        f"model_type {model_type!r} is not supported: {reason}"
        if model_type
        else f"this architecture is not supported: {reason}",
        where=where,
        expected=f"supported are {', '.join(sorted(_FAMILIES))} and models built like Llama",
    )


def _attentions(fields: _Fields, family: _Family, layers: int, hidden: int) -> list[AnyAttention]:
    """The attention of each layer."""
    heads = fields.integer(*_HEADS)
    if fields.has("kv_lora_rank"):
        if fields.boolean("attention_bias", default=False):
            raise ModelError(
                "attention_bias is true together with kv_lora_rank",
                where=fields.where,
                expected="expected latent attention without biases, as in every published DeepSeek and Kimi model",
            )
        latent = LatentAttention(
            heads=heads,
            q_lora_rank=fields.integer("q_lora_rank", default=0, least=0),
            kv_lora_rank=fields.integer("kv_lora_rank"),
            qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
            qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
            v_head_dim=fields.integer("v_head_dim"),
        )
        return [latent] * layers

    kv_heads = fields.integer(*_KV_HEADS, default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"{heads} attention heads % {kv_heads} key-value heads = {heads % kv_heads}",
            where=fields.where,
            expected="expected num_attention_heads to be a multiple of num_key_value_heads",
        )
    if not fields.has(*_HEAD_DIM) and hidden % heads:
        raise ModelError(
            f"head_dim is missing, and hidden_size {hidden} % {heads} heads = {hidden % heads}",
            where=fields.where,
            expected="expected head_dim",
        )
    attention_bias = fields.boolean("attention_bias", "use_bias", default=family.attention_bias)
    qkv_bias = fields.boolean("qkv_bias", "use_qkv_bias", "add_qkv_bias", default=attention_bias)
    out_bias = fields.boolean("attention_out_bias", default=attention_bias)

    def softmax(window: int) -> Attention:
        return Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=fields.integer(*_HEAD_DIM, default=hidden // heads),
            qkv_bias=qkv_bias if family.qkv_bias is None else family.qkv_bias,
            out_bias=out_bias if family.out_bias is None else family.out_bias,
            qk_norm=fields.boolean(*_QK_NORM, default=family.qk_norm),
            output_gate=fields.boolean("attn_output_gate", "attention_output_gate", default=family.output_gate),
            sinks=family.sinks,
            window=window,
        )

    kinds = _attention_kinds(fields, family, layers)
    made: dict[str, AnyAttention] = {}
    if "full_attention" in kinds:
        made["full_attention"] = softmax(0)
    if "sliding_attention" in kinds:
        made["sliding_attention"] = softmax(fields.integer("sliding_window"))
    if "linear_attention" in kinds:
        made["linear_attention"] = LinearAttention(
            key_heads=fields.integer("linear_num_key_heads"),
            value_heads=fields.integer("linear_num_value_heads"),
            key_head_dim=fields.integer("linear_key_head_dim"),
            value_head_dim=fields.integer("linear_value_head_dim"),
            conv_kernel=fields.integer("linear_conv_kernel_dim", default=4),
        )
    return [made[kind] for kind in kinds]


def _attention_kinds(fields: _Fields, family: _Family, layers: int) -> tuple[str, ...]:
    """`full_attention`, `sliding_attention` or `linear_attention` for each layer."""
    window = fields.integer("sliding_window", default=0, least=0)
    if family.window_layers == "from_max_window_layers" and not fields.boolean("use_sliding_window", default=False):
        window = 0
    if kinds := fields.words("layer_types", layers):
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention", "linear_attention"):
                raise ModelError(
                    f"layer_types has {kind!r}",
                    where=fields.where,
                    expected="expected full_attention, sliding_attention or linear_attention",
                )
        # Qwen2 and Qwen3 write layer_types even where use_sliding_window is off.
        return kinds if window else tuple("full_attention" if k == "sliding_attention" else k for k in kinds)
    interval = fields.integer("full_attention_interval", default=family.linear_interval, least=0)
    if interval and fields.has("linear_num_key_heads", "linear_num_value_heads"):
        return tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers))
    if family.linear_interval:
        raise fields.missing(("linear_num_key_heads",))
    if not window:
        return ("full_attention",) * layers
    if family.window_layers == "alternate":
        return tuple("full_attention" if i % 2 else "sliding_attention" for i in range(layers))
    if family.window_layers == "from_max_window_layers":
        first = fields.integer("max_window_layers", default=28, least=0)
        return tuple("sliding_attention" if i >= first else "full_attention" for i in range(layers))
    if family.window_layers == "all" or fields.boolean("use_sliding_window", default=False):
        return ("sliding_attention",) * layers
    return ("full_attention",) * layers


def _moe_layers(fields: _Fields, layers: int) -> tuple[bool, ...]:
    """Which layers are routed.

    DeepSeek counts from layer 0 and after `first_k_dense_replace` (modeling_deepseek.py, DeepseekV3DecoderLayer); Qwen
    counts `decoder_sparse_step` from layer 1 and lists exceptions (modeling_qwen3_moe.py, Qwen3MoeDecoderLayer).
    """
    if words := fields.words("mlp_layer_types", layers):
        return tuple(word != "dense" for word in words)
    first = fields.integer(*_FIRST_DENSE, default=0, least=0)
    frequency = fields.raw("moe_layer_freq")
    if isinstance(frequency, list | tuple):
        if len(frequency) != layers or any(bit not in (0, 1) for bit in frequency):
            raise fields.wrong("moe_layer_freq", f"an integer or a list of {layers} zeros and ones")
        return tuple(bool(bit) for bit in frequency)
    every = fields.integer("moe_layer_freq", default=1)
    step = fields.integer("decoder_sparse_step", default=1)
    dense = frozenset(fields.indices("mlp_only_layers"))
    return tuple(i >= first and i % every == 0 and (i + 1) % step == 0 and i not in dense for i in range(layers))


def _expert_groups(fields: _Fields, family: _Family, experts: int, top_k: int) -> tuple[int, int]:
    """Groups of experts, and how many of them a token chooses from; (1, 1) where routing is not limited.

    DeepseekV3TopkRouter in modeling_deepseek_v3.py. A default of the class that does not fit the experts is left out.
    """
    usual, usual_chosen = family.expert_groups
    groups = fields.integer(*_EXPERT_GROUPS, default=usual)
    chosen = fields.integer(*_TOKEN_GROUPS, default=usual_chosen if groups == usual else groups)
    said, said_chosen = fields.find(_EXPERT_GROUPS), fields.find(_TOKEN_GROUPS)
    if experts % groups:
        if said is None:
            return 1, 1
        raise fields.wrong(said, f"a divisor of the {experts} experts")
    if chosen > groups or top_k * groups > chosen * experts:
        if said_chosen is None:
            return 1, 1
        raise fields.wrong(said_chosen, f"at most the {groups} groups, and as many as hold {top_k} experts")
    return (groups, chosen) if chosen < groups else (1, 1)


def _feed_forwards(fields: _Fields, family: _Family, layers: int, hidden: int) -> list[Mlp | Moe]:
    """The feed-forward block of each layer."""
    gated = family.gated
    if gated is None:
        gated = fields.text(*_ACTIVATION, default="silu").lower() in _GATED_ACTIVATIONS
    mlp_bias = fields.boolean("mlp_bias", default=False) if family.mlp_bias is None else family.mlp_bias

    def dense() -> Mlp:
        width = fields.integer(*_INTERMEDIATE, default=None if gated else 4 * hidden)
        if width % family.intermediate_divisor:
            raise fields.wrong("intermediate_size", f"a multiple of {family.intermediate_divisor}")
        return Mlp(intermediate_size=width // family.intermediate_divisor, gated=gated, bias=mlp_bias)

    experts = fields.integer(*_EXPERTS, default=0, least=0)
    if not experts:
        return [dense()] * layers
    top_k = fields.integer(*_TOP_K)
    if top_k > experts:
        raise ModelError(
            f"num_experts_per_tok {top_k} is more than the {experts} experts",
            where=fields.where,
            expected="expected at most num_experts",
        )
    groups, token_groups = _expert_groups(fields, family, experts, top_k)
    width = fields.integer(*_EXPERT_WIDTH, *_INTERMEDIATE)
    shared = fields.integer(*_SHARED_WIDTH, default=0, least=0)
    if not fields.has(*_SHARED_WIDTH):
        shared = fields.integer(*_SHARED_EXPERTS, default=0, least=0) * width
    moe = Moe(
        experts=experts,
        experts_per_token=top_k,
        intermediate_size=width,
        shared_intermediate_size=shared,
        shared_gate=family.shared_gate and shared > 0,
        gated=gated,
        bias=family.expert_bias,
        router_bias=family.expert_bias,
        groups=groups,
        groups_per_token=token_groups,
    )
    routed = _moe_layers(fields, layers)
    mlp = None if all(routed) else dense()
    return [moe if is_moe or mlp is None else mlp for is_moe in routed]


def _layers(fields: _Fields, family: _Family, count: int, hidden: int) -> tuple[Layer, ...]:
    shared: dict[Layer, Layer] = {}
    layers = []
    for attention, ffn in zip(
        _attentions(fields, family, count, hidden), _feed_forwards(fields, family, count, hidden), strict=True
    ):
        layer = Layer(attention=attention, ffn=ffn)
        layers.append(shared.setdefault(layer, layer))
    return tuple(layers)


def _vision(config: Mapping[str, Any], model_type: str, hidden: int, where: str) -> VisionTower:
    """The vision tower with its exact parameter counts.

    Sources: Qwen2VisionTransformerPretrainedModel, Qwen2_5_VisionTransformerPretrainedModel, Qwen3VLVisionModel and
    Qwen3_5VisionModel in transformers/models/*/modeling_*.py (5.6).
    """
    fields = _Fields(config, f"{where}: vision_config")
    depth = fields.integer("depth", "num_hidden_layers", most=_MOST_LAYERS)
    channels = fields.integer("in_channels", "in_chans", default=3)
    patch = fields.integer("patch_size", "spatial_patch_size")
    temporal = fields.integer("temporal_patch_size", default=2)
    merge = fields.integer("spatial_merge_size", default=2)
    heads = fields.integer(*_HEADS)
    if model_type == "qwen2_vl":
        # Qwen2-VL's `hidden_size` is the width of the merged tokens and `embed_dim` that of the patches.
        width = fields.integer("embed_dim")
        out = fields.integer("hidden_size", default=hidden)
        ratio = fields.raw("mlp_ratio")
        if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, int | float) or ratio <= 0):
            raise fields.wrong("mlp_ratio", "a positive number")
        inner = int(width * (4 if ratio is None else ratio))
    else:
        width = fields.integer("hidden_size")
        out = fields.integer("out_hidden_size", default=hidden)
        inner = fields.integer("intermediate_size")
    if out != hidden:
        raise ModelError(
            f"the vision tower puts out {out} values a token and the language model takes {hidden}",
            where=where,
            expected="expected vision_config.out_hidden_size to equal hidden_size",
        )

    merged = width * merge * merge
    attention = (width * 3 * width + 3 * width) + (width * width + width)
    patch_embedding = channels * temporal * patch * patch * width
    merger_mlp = (merged * merged + merged) + (merged * out + out)
    deepstack = fields.indices("deepstack_visual_indexes")
    gated = model_type == "qwen2_5_vl"
    if gated:
        block = 2 * width + attention + (3 * width * inner + 2 * inner + width)
        encoder = patch_embedding + depth * block
        projector = width + merger_mlp
    else:
        block = 4 * width + attention + (2 * width * inner + inner + width)
        encoder = patch_embedding + depth * block
        projector = 2 * width + merger_mlp
        if model_type != "qwen2_vl":  # Qwen3-VL: a bias on the patches, and learned positions
            encoder += width + fields.integer("num_position_embeddings") * width
    return VisionTower(
        layers=depth,
        hidden_size=width,
        heads=heads,
        intermediate_size=inner,
        gated=gated,
        out_hidden_size=out,
        patch_size=patch,
        spatial_merge_size=merge,
        encoder_parameters=encoder,
        projector_parameters=projector,
        # Each deepstack merger norms the merged patches instead of the single ones.
        deepstack_parameters=len(deepstack) * (2 * merged + merger_mlp),
        min_first_stage_layers=len(deepstack),
    )


_VISION_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})


def model_from_config(
    config: Mapping[str, Any],
    *,
    name: str,
    where: str,
    default_positions: int | None = None,
    config_path: str | None = None,
) -> Model:
    """The model that a Hugging Face config describes.

    `where` names the config in messages (a file, or a key of a run document). `default_positions` is the number of rows
    of GPT-2's learned position table when the config has none, such as the job's sequence length, to which Megatron's
    GPT recipes set --max-position-embeddings. `config_path` is the local directory, when there is one. Raises
    ModelError for a field that is missing, of the wrong type, zero or negative, and for an architecture that the cost
    formulas do not know.
    """
    if not isinstance(config, Mapping):
        raise ModelError(
            "the config is not an object", where=where, expected="expected a JSON object of config.json's keys"
        )
    top = _Fields(config, where)
    model_type = top.text("model_type")
    nested = top.mapping("text_config")
    fields = _Fields({**config, **nested}, where) if nested is not None else top
    family_name = fields.text("model_type").removesuffix("_text")
    for known_as in (model_type, fields.text("model_type"), family_name):
        if known_as in _UNSUPPORTED:
            raise _refuse(known_as, _UNSUPPORTED[known_as], where)
    for key, reason in _UNSUPPORTED_KEYS.items():
        if fields.has(key):
            raise _refuse(model_type, f"{reason} (it has {key})", where)
    if top.boolean("is_encoder_decoder", default=False):
        raise _refuse(model_type, _SEQ2SEQ, where)
    family = _FAMILIES.get(family_name, _Family())

    hidden = fields.integer(*_HIDDEN)
    count = fields.integer(*_LAYERS, most=_MOST_LAYERS)
    vision_config = top.mapping("vision_config")
    if vision_config is not None and model_type not in _VISION_TYPES:
        raise _refuse(model_type, _MULTIMODAL, where)
    norm = family.norm
    if norm is None:
        layer_norm = fields.has("layer_norm_epsilon", "layer_norm_eps") and not fields.has("rms_norm_eps")
        norm = "layernorm" if layer_norm else "rmsnorm"
    positions = 0
    if family.learned_positions:
        positions = fields.integer(*_POSITIONS, default=default_positions or family.learned_positions)
    # transformers ties by the outer config of a vision-language model; the inner one may lack the key.
    ties = top if top.has("tie_word_embeddings") else fields
    return Model(
        name=name,
        model_type=model_type or "unknown",
        hidden_size=hidden,
        vocab_size=fields.integer(*_VOCAB),
        layers=_layers(fields, family, count, hidden),
        tie_word_embeddings=ties.boolean("tie_word_embeddings", default=family.tied),
        norm=norm,
        norm_bias=norm == "layernorm",
        learned_positions=positions,
        hidden_dropout=fields.fraction(*_DROPOUT, default=family.dropout),
        max_position_embeddings=positions or fields.integer(*_POSITIONS, default=0, least=0),
        mtp_layers=fields.integer(*_MTP_LAYERS, default=0, least=0),
        vision=_vision(vision_config, model_type, hidden, where) if vision_config is not None else None,
        config_path=config_path,
    )
