"""What transformers hard-codes for a model_type, and the model types that the cost formulas do not cover.

From `transformers/models/*/configuration_*.py` and `modeling_*.py` (5.6).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the transformers class of a model_type hard-codes. None means that the config's keys decide."""

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    attention_bias: bool = False
    """Default of `attention_bias` if the config lacks it."""
    qk_norm: bool = False
    output_gate: bool = False
    sinks: bool = False
    mlp_bias: bool | None = None
    gated: bool | None = None
    norm: Literal["rmsnorm", "layernorm"] | None = None
    tied: bool = False
    """Default of `tie_word_embeddings` if the config lacks it."""
    shared_gate: bool = False
    expert_bias: bool = False
    expert_groups: tuple[int, int] = (1, 1)
    """Default number of expert groups, and of groups that a token may use."""
    intermediate_divisor: int = 1
    """Divisor of `intermediate_size`: first-generation Qwen counts both halves of the gated MLP."""
    learned_positions: int = 0
    """Default number of rows in a learned position table."""
    dropout: float = 0.0
    """Default dropout after attention and MLP."""
    window_layers: Literal["none", "all", "alternate", "from_max_window_layers"] = "none"
    """The layers that use `sliding_window` if there is no `layer_types`."""
    linear_interval: int = 0
    """Every n-th layer has full attention if the config has neither `layer_types` nor `full_attention_interval`."""


_LLAMA = Family(gated=True, norm="rmsnorm")
_DEEPSEEK = replace(_LLAMA, mlp_bias=False)
_GLM = replace(_DEEPSEEK, out_bias=False)
_MISTRAL = replace(_GLM, qkv_bias=False, window_layers="all")
_QWEN = replace(_GLM, qkv_bias=True)
_QWEN2 = replace(_QWEN, window_layers="from_max_window_layers")
_QWEN3 = replace(_DEEPSEEK, qk_norm=True, window_layers="from_max_window_layers")
_QWEN3_NEXT = replace(_DEEPSEEK, qk_norm=True, output_gate=True, shared_gate=True, linear_interval=4)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": _MISTRAL,
    "qwen": replace(_QWEN, intermediate_divisor=2),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_moe": replace(_QWEN2, shared_gate=True),
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
    "glm": _GLM,
    "glm4_moe": _GLM,
    "gpt_oss": replace(_LLAMA, attention_bias=True, sinks=True, expert_bias=True, window_layers="alternate"),
    "gpt2": Family(
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
SEQ2SEQ = "an encoder-decoder"
_BLOCK = "its transformer block (norms, parallel branches, caps or biases) is not modelled"
_SPARSE = "its sparse or hybrid attention is not modelled"
MULTIMODAL = "its vision or audio tower is not modelled"

_UNSUPPORTED_TYPES: dict[str, str] = {
    _HYBRID: "mamba mamba2 falcon_mamba jamba bamba nemotron_h falcon_h1 zamba zamba2 granitemoehybrid lfm2 lfm2_moe "
    "plamo2 recurrent_gemma olmo_hybrid rwkv rwkv5 rwkv6 rwkv7 xlstm retnet kimi_linear",
    _ENCODER: "bert roberta xlm-roberta deberta deberta-v2 electra distilbert albert modernbert nomic_bert eurobert",
    SEQ2SEQ: "t5 mt5 umt5 longt5 switch_transformers bart mbart pegasus marian m2m_100 nllb-moe whisper blenderbot "
    "encoder-decoder speech-encoder-decoder vision-encoder-decoder t5gemma t5gemma2",
    _BLOCK: "gemma gemma2 gemma3_text gemma3n_text gemma4_text vaultgemma cohere cohere2 phi phimoe falcon gptj "
    "gpt_neo gpt_neox gpt_bigcode bloom opt mpt stablelm starcoder2 dbrx olmo olmo2 olmo3 olmoe flex_olmo exaone4 "
    "exaone_moe glm4 chatglm nemotron granite granitemoe persimmon codegen jais jais2 helium apertus arcee "
    "longcat_flash hunyuan_v1_dense hunyuan_v1_moe smollm3 afmoe nanochat",
    _SPARSE: "deepseek_v32 deepseek_v4 glm_moe_dsa minimax minimax_text_01 minimax_m1 minimax_m2 llama4 llama4_text "
    "bitnet diffllama doge",
    MULTIMODAL: "llava llava_next llava_onevision mllama paligemma gemma3 gemma3n gemma4 internvl internvl_chat "
    "kimi_vl kimi_k25 glm4v glm4v_moe glm46v mistral3 pixtral idefics2 idefics3 smolvlm minicpmv minicpmo qwen2_audio "
    "qwen2_5_omni qwen2_5_omni_thinker qwen3_omni_moe qwen3_omni_moe_thinker deepseek_vl deepseek_vl_v2 "
    "phi4_multimodal phi3_v ernie4_5_vl_moe",
}
UNSUPPORTED = {model_type: reason for reason, types in _UNSUPPORTED_TYPES.items() for model_type in types.split()}

# Keys found only in architectures outside the formulas; they catch a new or missing model_type.
UNSUPPORTED_KEYS: dict[str, str] = {
    "ssm_state_size": _HYBRID,
    "mamba_d_state": _HYBRID,
    "mamba_num_heads": _HYBRID,
    "hybrid_override_pattern": _HYBRID,
    "layers_block_type": _HYBRID,
    "linear_attn_config": _HYBRID,
    "encoder_layers": SEQ2SEQ,
    "num_decoder_layers": SEQ2SEQ,
    "final_logit_softcapping": _BLOCK,
    "attn_logit_softcapping": _BLOCK,
    "index_topk": _SPARSE,
    "audio_config": MULTIMODAL,
}
