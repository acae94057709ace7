"""Build a `Model` from a Hugging Face config.json.

Each fact is looked up under all of its common names, whatever the model_type. The model_type decides only what the
transformers classes hard-code (`model_families`). What the cost formulas do not cover is refused by name, never
approximated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from topoplan.errors import ModelError
from topoplan.specs.config_fields import Fields, is_number
from topoplan.specs.model import (
    MOST_LAYERS,
    AnyAttention,
    Attention,
    FeedForward,
    LatentAttention,
    Layer,
    LinearAttention,
    Mlp,
    Model,
    Moe,
    VisionTower,
)
from topoplan.specs.model_families import FAMILIES, MULTIMODAL, SEQ2SEQ, UNSUPPORTED, UNSUPPORTED_KEYS, Family

VISION_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})


def _widths(fields: Fields, model_type: str, hidden: int) -> tuple[int, int, int]:
    """Return the width of the patches, of their MLP, and of the merged tokens."""
    if model_type != "qwen2_vl":
        width, inner = fields.integer("hidden_size"), fields.integer("intermediate_size")
        return width, inner, fields.integer("out_hidden_size", default=hidden)
    # Qwen2-VL's `hidden_size` is the width of the merged tokens, and `embed_dim` the width of the patches.
    width = fields.integer("embed_dim")
    ratio = 4 if fields.raw("mlp_ratio") is None else fields.raw("mlp_ratio")
    if not is_number(ratio, 1e-9, 1e9):
        raise fields.wrong("mlp_ratio", "a positive number")
    return width, int(width * ratio), fields.integer("hidden_size", default=hidden)


def vision_tower(config: Mapping[str, Any], model_type: str, hidden: int, where: str) -> VisionTower:
    """Return the vision tower of a language model with hidden size `hidden`. Raises ModelError.

    Sources: Qwen2VisionTransformerPretrainedModel, Qwen2_5_VisionTransformerPretrainedModel, Qwen3VLVisionModel and
    Qwen3_5VisionModel in transformers/models/*/modeling_*.py (5.6).
    """
    fields = Fields(config, f"{where}: vision_config")
    depth = fields.integer("depth", "num_hidden_layers", most=MOST_LAYERS)
    channels = fields.integer("in_channels", "in_chans", default=3)
    patch = fields.integer("patch_size", "spatial_patch_size")
    temporal = fields.integer("temporal_patch_size", default=2)
    merge = fields.integer("spatial_merge_size", default=2)
    heads = fields.integer("num_attention_heads", "n_head", "n_heads", "num_heads")
    width, inner, out = _widths(fields, model_type, hidden)
    if out != hidden:
        what = f"the vision tower puts out {out} values a token and the language model takes {hidden}"
        raise Fields({}, where).refusal(what, "vision_config.out_hidden_size to equal hidden_size")
    merged = width * merge * merge
    merger_mlp = (merged * merged + merged) + (merged * out + out)
    gated = model_type == "qwen2_5_vl"
    attention = (width * 3 * width + 3 * width) + (width * width + width)
    mlp = 3 * width * inner + 2 * inner + width if gated else 2 * width * inner + inner + width
    norm = width if gated else 2 * width  # RMSNorm, or LayerNorm with its bias
    encoder = channels * temporal * patch * patch * width + depth * (2 * norm + attention + mlp)
    if model_type not in ("qwen2_vl", "qwen2_5_vl"):  # Qwen3-VL adds a patch bias and learned positions
        encoder += width + fields.integer("num_position_embeddings") * width
    deepstack = len(fields.indices("deepstack_visual_indexes"))
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
        projector_parameters=norm + merger_mlp,
        # Each deepstack merger normalizes the merged patches instead of the single ones.
        deepstack_parameters=deepstack * (2 * merged + merger_mlp),
        min_first_stage_layers=deepstack,
    )


_EXPERT_GROUPS = ("n_group", "moe_router_num_groups")
_TOKEN_GROUPS = ("topk_group", "moe_router_group_topk")
_INTERMEDIATE = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "seq_length")
_ACTIVATION = ("hidden_act", "activation_function", "hidden_activation")
_PLAIN_ACTIVATIONS = ("gelu", "relu", "squared_relu")
_GATED_ACTIVATIONS = frozenset({"silu", "swish", "swiglu", "geglu", "gated_silu"})


def _refuse(model_type: str, reason: str, where: str) -> ModelError:
    what = f"model_type {model_type!r} is not supported" if model_type else "this architecture is not supported"
    expected = f"supported are {', '.join(sorted(FAMILIES))} and models built like Llama"
    return ModelError(f"{what}: {reason}", where=where, expected=expected)


def _attentions(fields: Fields, family: Family, layers: int, hidden: int) -> list[AnyAttention]:
    heads = fields.integer("num_attention_heads", "n_head", "n_heads", "num_heads")
    if fields.has("kv_lora_rank"):
        return [_latent(fields, heads)] * layers
    kinds = _attention_kinds(fields, family, layers)
    full = _softmax(fields, family, heads, hidden, 0)
    made: dict[str, AnyAttention] = {"full_attention": full}
    if "sliding_attention" in kinds:
        made["sliding_attention"] = _softmax(fields, family, heads, hidden, fields.integer("sliding_window"))
    if "linear_attention" in kinds:
        made["linear_attention"] = LinearAttention(
            key_heads=fields.integer("linear_num_key_heads"),
            value_heads=fields.integer("linear_num_value_heads"),
            key_head_dim=fields.integer("linear_key_head_dim"),
            value_head_dim=fields.integer("linear_value_head_dim"),
            conv_kernel=fields.integer("linear_conv_kernel_dim", default=4),
        )
    return [made[kind] for kind in kinds]


def _latent(fields: Fields, heads: int) -> LatentAttention:
    if fields.boolean("attention_bias", default=False):
        raise fields.refusal(
            "attention_bias is true together with kv_lora_rank",
            "latent attention without biases, as in every published DeepSeek and Kimi model",
        )
    return LatentAttention(
        heads=heads,
        q_lora_rank=fields.integer("q_lora_rank", default=0, least=0),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
    )


def _softmax(fields: Fields, family: Family, heads: int, hidden: int, window: int) -> Attention:
    kv_heads = fields.integer("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_query_groups", default=heads)
    if heads % kv_heads:
        what = f"{heads} attention heads % {kv_heads} key-value heads = {heads % kv_heads}"
        raise fields.refusal(what, "num_attention_heads to be a multiple of num_key_value_heads")
    if not fields.has(*_HEAD_DIM) and hidden % heads:
        what = f"head_dim is missing, and hidden_size {hidden} % {heads} heads = {hidden % heads}"
        raise fields.refusal(what, "head_dim")
    head_dim = fields.integer(*_HEAD_DIM, default=hidden // heads)
    if head_dim % 2 and not family.learned_positions:
        raise fields.refusal(f"head_dim {head_dim} is odd", "an even one, as rotary positions turn pairs")
    bias = fields.boolean("attention_bias", "use_bias", default=family.attention_bias)
    qkv_bias = fields.boolean("qkv_bias", "use_qkv_bias", "add_qkv_bias", default=bias)
    out_bias = fields.boolean("attention_out_bias", default=bias)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=qkv_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=out_bias if family.out_bias is None else family.out_bias,
        qk_norm=fields.boolean("use_qk_norm", "qk_layernorm", "qk_norm", default=family.qk_norm),
        output_gate=fields.boolean("attn_output_gate", "attention_output_gate", default=family.output_gate),
        sinks=family.sinks,
        window=window,
    )


def _attention_kinds(fields: Fields, family: Family, layers: int) -> tuple[str, ...]:
    """Return `full_attention`, `sliding_attention` or `linear_attention` for each layer."""
    window = fields.integer("sliding_window", default=0, least=0)
    if family.window_layers == "from_max_window_layers" and not fields.boolean("use_sliding_window", default=False):
        window = 0
    if kinds := fields.words("layer_types", layers):
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention", "linear_attention"):
                raise fields.refusal(
                    f"layer_types has {kind!r}", "full_attention, sliding_attention or linear_attention"
                )
        # Qwen2 and Qwen3 write layer_types even if use_sliding_window is off.
        return kinds if window else tuple("full_attention" if k == "sliding_attention" else k for k in kinds)
    interval = fields.integer("full_attention_interval", default=family.linear_interval, least=0)
    if interval and fields.has("linear_num_key_heads", "linear_num_value_heads"):
        return tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers))
    if family.linear_interval:
        raise fields.missing("linear_num_key_heads")
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


def _moe_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return whether each layer is a mixture of experts.

    DeepSeek counts from layer 0 and after `first_k_dense_replace` (modeling_deepseek.py, DeepseekV3DecoderLayer); Qwen
    counts `decoder_sparse_step` from layer 1 and lists exceptions (modeling_qwen3_moe.py, Qwen3MoeDecoderLayer).
    """
    if words := fields.words("mlp_layer_types", layers):
        return tuple(word != "dense" for word in words)
    first = fields.integer("first_k_dense_replace", "moe_first_k_dense_replace", default=0, least=0)
    frequency = fields.raw("moe_layer_freq")
    if isinstance(frequency, list | tuple):
        if len(frequency) != layers or any(bit not in (0, 1) for bit in frequency):
            raise fields.wrong("moe_layer_freq", f"an integer or a list of {layers} zeros and ones")
        return tuple(bool(bit) for bit in frequency)
    every = fields.integer("moe_layer_freq", default=1)
    step = fields.integer("decoder_sparse_step", default=1)
    dense = frozenset(fields.indices("mlp_only_layers"))
    return tuple(i >= first and i % every == 0 and (i + 1) % step == 0 and i not in dense for i in range(layers))


def _expert_groups(fields: Fields, family: Family, experts: int, top_k: int) -> tuple[int, int]:
    """Return the number of expert groups and how many of them a token may use; (1, 1) if routing is not limited.

    From DeepseekV3TopkRouter in modeling_deepseek_v3.py. A class default that does not fit the experts is ignored.
    """
    usual, usual_chosen = family.expert_groups
    groups = fields.integer(*_EXPERT_GROUPS, default=usual)
    chosen = fields.integer(*_TOKEN_GROUPS, default=usual_chosen if groups == usual else groups)
    said, said_chosen = fields.find(*_EXPERT_GROUPS), fields.find(*_TOKEN_GROUPS)
    if experts % groups:
        if said is None:
            return 1, 1
        raise fields.wrong(said, f"a divisor of the {experts} experts")
    if chosen > groups or top_k * groups > chosen * experts:
        if said_chosen is None:
            return 1, 1
        raise fields.wrong(said_chosen, f"at most the {groups} groups, and as many as hold {top_k} experts")
    return (groups, chosen) if chosen < groups else (1, 1)


def _moe(fields: Fields, family: Family, experts: int, gated: bool) -> Moe:
    top_k = fields.integer(
        *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_router_topk", "moe_topk")
    )
    if top_k > experts:
        what = f"num_experts_per_tok {top_k} is more than the {experts} experts"
        raise fields.refusal(what, "at most num_experts")
    groups, token_groups = _expert_groups(fields, family, experts, top_k)
    width = fields.integer("moe_intermediate_size", "moe_ffn_hidden_size", "expert_intermediate_size", *_INTERMEDIATE)
    shared = fields.integer(*_SHARED_WIDTH, default=0, least=0)
    if not fields.has(*_SHARED_WIDTH):
        shared = fields.integer("n_shared_experts", "num_shared_experts", default=0, least=0) * width
    return Moe(
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


def _feed_forwards(fields: Fields, family: Family, layers: int, hidden: int) -> list[FeedForward]:
    activation = fields.text(*_ACTIVATION, default="silu")
    gated = activation.lower() in _GATED_ACTIVATIONS if family.gated is None else family.gated
    experts = fields.integer(
        *("num_experts", "n_routed_experts", "num_local_experts", "num_moe_experts", "moe_num_experts"),
        default=0,
        least=0,
    )
    moe = _moe(fields, family, experts, gated) if experts else None
    routed = _moe_layers(fields, layers) if experts else (False,) * layers
    if moe is not None and all(routed):
        return [moe] * layers
    width = fields.integer(*_INTERMEDIATE, default=None if gated else 4 * hidden)
    if width % family.intermediate_divisor:
        raise fields.wrong("intermediate_size", f"a multiple of {family.intermediate_divisor}")
    bias = fields.boolean("mlp_bias", default=False) if family.mlp_bias is None else family.mlp_bias
    mlp = Mlp(intermediate_size=width // family.intermediate_divisor, gated=gated, bias=bias)
    return [moe if is_moe and moe else mlp for is_moe in routed]


def _layers(fields: Fields, family: Family, count: int, hidden: int) -> tuple[Layer, ...]:
    attentions = _attentions(fields, family, count, hidden)
    feed_forwards = _feed_forwards(fields, family, count, hidden)
    shared: dict[Layer, Layer] = {}
    layers = (Layer(attention=attention, ffn=ffn) for attention, ffn in zip(attentions, feed_forwards, strict=True))
    return tuple(shared.setdefault(layer, layer) for layer in layers)


def _family(top: Fields, fields: Fields, where: str) -> Family:
    """Return what the model's class hard-codes. Raises ModelError for an architecture the formulas do not cover."""
    outer, own = top.text("model_type"), fields.text("model_type")
    name = own.removesuffix("_text")
    for known_as in (outer, own, name):
        if known_as in UNSUPPORTED:
            raise _refuse(known_as, UNSUPPORTED[known_as], where)
    for key, reason in UNSUPPORTED_KEYS.items():
        if fields.has(key):
            raise _refuse(outer, f"{reason} (it has {key})", where)
    if top.boolean("is_encoder_decoder", default=False):
        raise _refuse(outer, SEQ2SEQ, where)
    if top.mapping("vision_config") is not None and outer not in VISION_TYPES:
        raise _refuse(outer, MULTIMODAL, where)
    family = FAMILIES.get(name, Family())
    if name == "qwen3_moe" and fields.text(*_ACTIVATION, default="silu") in _PLAIN_ACTIVATIONS:
        # Not a real Qwen3, whose activation is silu, but Megatron's own GPT with experts, written as a run document.
        family = replace(family, gated=False, qk_norm=False)
    return family


_MOST_STRETCHED = 1_000_000
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "su", "llama3", "mrope", "proportional")
"""The keys of transformers' ROPE_INIT_FUNCTIONS, and names that transformers maps to one of them."""


def _check_rope(fields: Fields, name: str) -> None:
    """Refuse RoPE settings that transformers would reject; all accepted ones cost the same."""
    told = fields.mapping(name)
    if told is None:
        return
    inner = Fields(told, f"{fields.where}: {name}")
    kind = inner.text("rope_type", "type", default="default")
    if kind not in _ROPE_TYPES and not fields.has("auto_map"):  # the model's own code may define others
        raise inner.wrong(inner.find("rope_type", "type") or "", f"one of {', '.join(_ROPE_TYPES)}")
    if inner.has("factor") and not is_number(told["factor"], 1, _MOST_STRETCHED):
        raise inner.wrong("factor", f"a number from 1 to {_MOST_STRETCHED:,}")


def _quantization(top: Fields) -> str:
    """Return the quantization method of the checkpoint's weights, or an empty string."""
    told = top.mapping("quantization_config")
    return (
        Fields(told, f"{top.where}: quantization_config").text("quant_method", default="a method of its own")
        if told
        else ""
    )


def model_from_config(
    config: Mapping[str, Any],
    *,
    name: str,
    where: str,
    default_positions: int | None = None,
    config_path: str | None = None,
) -> Model:
    """Return the model that a Hugging Face config describes.

    `where` names the config in messages (a file, or a key of a run document). `default_positions` is the number of rows
    of GPT-2's learned position table if the config has none, such as the job's sequence length, to which Megatron's
    GPT recipes set --max-position-embeddings. `config_path` is the local directory, if there is one. Raises ModelError
    for a field that is missing, of the wrong type, zero or negative, and for an architecture that the cost formulas do
    not cover.
    """
    if not isinstance(config, Mapping):
        expected = "expected a JSON object of config.json's keys"
        raise ModelError("the config is not an object", where=where, expected=expected)
    top = Fields(config, where)
    nested = top.mapping("text_config")
    fields = top if nested is None else Fields({**config, **nested}, where)
    family = _family(top, fields, where)
    for positions_of in ("rope_scaling", "rope_parameters"):
        _check_rope(fields, positions_of)
    model_type, vision = top.text("model_type"), top.mapping("vision_config")
    hidden = fields.integer("hidden_size", "n_embd", "d_model")
    count = fields.integer("num_hidden_layers", "num_layers", "n_layer", "n_layers", most=MOST_LAYERS)
    has_bias = fields.has("layer_norm_epsilon", "layer_norm_eps") and not fields.has("rms_norm_eps")
    norm = family.norm or ("layernorm" if has_bias else "rmsnorm")
    positions = 0
    if family.learned_positions:
        positions = fields.integer(*_POSITIONS, default=default_positions or family.learned_positions)
    # transformers reads this key from the outer config of a vision-language model; the inner config may lack it.
    ties = top if top.has("tie_word_embeddings") else fields
    return Model(
        name=name,
        model_type=model_type or "unknown",
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size", "padded_vocab_size"),
        layers=_layers(fields, family, count, hidden),
        tie_word_embeddings=ties.boolean("tie_word_embeddings", default=family.tied),
        norm=norm,
        norm_bias=norm == "layernorm",
        learned_positions=positions,
        hidden_dropout=fields.fraction("resid_pdrop", "hidden_dropout", "hidden_dropout_prob", default=family.dropout),
        max_position_embeddings=positions or fields.integer(*_POSITIONS, default=0, least=0),
        mtp_layers=fields.integer(
            "num_nextn_predict_layers", "mtp_num_layers", "mtp_num_hidden_layers", default=0, least=0
        ),
        vision=None if vision is None else vision_tower(vision, model_type, hidden, where),
        quantization=_quantization(top),
        config_path=config_path,
    )
