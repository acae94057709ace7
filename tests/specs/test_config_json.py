"""Building a model from a config.json."""

from collections.abc import Callable
from typing import Any

import pytest

from topoplan import catalog
from topoplan.errors import ModelError
from topoplan.specs import known
from topoplan.specs.config_json import model_from_config
from topoplan.specs.model import Attention, LatentAttention, LinearAttention, Mlp, Model, Moe

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MLA = {**LLAMA, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}


def read(config: dict[str, Any], **changes: Any) -> Model:
    return model_from_config({**config, **changes}, name="test", where="config.json")


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def attention(model: Model, layer: int = 0) -> Attention:
    found = model.layers[layer].attention
    assert isinstance(found, Attention)
    return found


def moe(model: Model, layer: int = -1) -> Moe:
    found = model.layers[layer].ffn
    assert isinstance(found, Moe)
    return found


def error_of(config: Any, **changes: Any) -> str:
    with pytest.raises(ModelError) as caught:
        model_from_config({**config, **changes}, name="test", where="config.json")
    assert str(caught.value).startswith("config.json")
    return str(caught.value)


def groups(model: Model) -> tuple[int, int]:
    return moe(model).groups, moe(model).groups_per_token


def biases(model: Model) -> tuple[bool, bool, bool]:
    found = attention(model)
    return found.qkv_bias, found.out_bias, found.qk_norm


def ffn(model: Model) -> Mlp | Moe:
    return model.layers[0].ffn


MIXTRAL = {**without(MOE, "moe_intermediate_size"), "model_type": "mixtral"}
DEEPSEEK = {**MOE, **MLA, "model_type": "deepseek_v3", "num_experts": 256, "num_experts_per_tok": 8}


@pytest.mark.parametrize(
    ("config", "changes", "fact", "expected"),
    [
        (LLAMA, {}, attention, Attention(heads=8, kv_heads=2, head_dim=64)),
        (LLAMA, {}, ffn, Mlp(intermediate_size=1536, gated=True, bias=False)),
        (LLAMA, {"head_dim": 128}, lambda model: attention(model).head_dim, 128),
        # what the class of a model_type hard-codes: query and output biases, norms
        (LLAMA, {}, biases, (False, False, False)),
        (LLAMA, {"model_type": "mistral"}, biases, (False, False, False)),
        (LLAMA, {"model_type": "qwen"}, biases, (True, False, False)),
        (LLAMA, {"model_type": "qwen2"}, biases, (True, False, False)),
        (LLAMA, {"model_type": "qwen3"}, biases, (False, False, True)),
        (LLAMA, {"model_type": "qwen3_moe"}, biases, (False, False, True)),
        (LLAMA, {"model_type": "glm4_moe"}, biases, (False, False, False)),
        (LLAMA, {"model_type": "glm4_moe", "use_qk_norm": True}, biases, (False, False, True)),
        (LLAMA, {"model_type": "gpt_oss"}, biases, (True, True, False)),
        (LLAMA, {"attention_bias": True}, biases, (True, True, False)),
        (LLAMA, {"attention_bias": True, "model_type": "glm4_moe"}, biases, (True, False, False)),
        # silu means a gated MLP whatever the model_type; first-generation Qwen counts both halves of the gated MLP
        (LLAMA, {"model_type": "brand_new", "hidden_act": "silu"}, ffn, Mlp(intermediate_size=1536, gated=True)),
        (LLAMA, {"model_type": "brand_new", "hidden_act": "swiglu"}, ffn, Mlp(intermediate_size=1536, gated=True)),
        (LLAMA, {"model_type": "brand_new", "hidden_act": "gelu"}, ffn, Mlp(intermediate_size=1536, gated=False)),
        (LLAMA, {"model_type": "qwen3_moe", "hidden_act": "silu"}, ffn, Mlp(intermediate_size=1536, gated=True)),
        (LLAMA, {"model_type": "qwen3_moe", "hidden_act": "gelu"}, ffn, Mlp(intermediate_size=1536, gated=False)),
        (LLAMA, {"model_type": "qwen"}, ffn, Mlp(intermediate_size=768)),
        # experts under each of their names; without a width of their own, they are as wide as the MLP
        *(
            (without(MOE, "num_experts"), {name: 8}, lambda model: moe(model).experts, 8)
            for name in ("num_experts", "n_routed_experts", "num_local_experts")
        ),
        (MIXTRAL, {}, lambda model: moe(model).intermediate_size, 1536),
        (MOE, {"shared_expert_intermediate_size": 640}, lambda model: moe(model).shared_intermediate_size, 640),
        (MOE, {"shared_expert_intermediate_size": 0}, lambda model: moe(model).shared_intermediate_size, 0),
        (MOE, {"n_shared_experts": 2}, lambda model: moe(model).shared_intermediate_size, 512),
        (MOE, {"n_shared_experts": 2}, lambda model: moe(model).shared_gate, False),
        (MOE, {"n_shared_experts": 2, "model_type": "qwen2_moe"}, lambda model: moe(model).shared_gate, True),
        # groups of experts; using all groups is no limit, and a default that does not divide them is ignored
        (MOE, {}, groups, (1, 1)),
        (MOE, {"n_group": 4, "topk_group": 2}, groups, (4, 2)),
        (MOE, {"moe_router_num_groups": 4, "moe_router_group_topk": 1}, groups, (4, 1)),
        (MOE, {"n_group": 4, "topk_group": 4}, groups, (1, 1)),
        (MOE, {"n_group": 4}, groups, (1, 1)),
        (DEEPSEEK, {}, groups, (8, 4)),
        (DEEPSEEK, {"num_experts": 20}, groups, (1, 1)),
        (DEEPSEEK, {"n_group": 1, "topk_group": 1}, groups, (1, 1)),
    ],
)
def test_a_fact_is_read_from_its_keys_and_its_type(
    config: dict[str, Any], changes: dict[str, Any], fact: Callable[[Model], Any], expected: Any
) -> None:
    assert fact(read(config, **changes)) == expected


def test_limits_of_the_catalogs_models_are_those_of_their_configs() -> None:
    assert groups(known.model("deepseek-ai/DeepSeek-V3")) == (8, 4)
    assert groups(known.model("moonshotai/Moonlight-16B-A3B")) == (1, 1)


def test_layers_of_a_llama_are_one_shared_object() -> None:
    model = read(LLAMA)
    assert (model.num_layers, len({id(layer) for layer in model.layers})) == (4, 1)
    assert (model.norm, model.norm_bias, model.tie_word_embeddings) == ("rmsnorm", False, False)


def test_fields_are_read_under_their_other_names() -> None:
    renamed = {
        "n_layer": 4,
        "n_embd": 512,
        "n_head": 8,
        "num_kv_heads": 2,
        "kv_channels": 64,
        "ffn_hidden_size": 1536,
        "padded_vocab_size": 1000,
    }
    assert read(renamed).layers == read(LLAMA).layers


def test_a_config_without_a_model_type_or_with_a_new_one_is_read_by_its_fields() -> None:
    assert read(without(LLAMA, "model_type")).layers == read(LLAMA).layers
    assert read(LLAMA, model_type="brand_new").layers == read(LLAMA).layers
    assert read(LLAMA, model_type="brand_new").model_type == "brand_new"


def test_gpt2_is_the_classic_gpt() -> None:
    gpt = read({"model_type": "gpt2", "n_embd": 512, "n_layer": 2, "n_head": 8, "vocab_size": 1000, "n_positions": 256})
    assert (gpt.norm, gpt.norm_bias, gpt.learned_positions, gpt.tie_word_embeddings) == ("layernorm", True, 256, True)
    assert attention(gpt) == Attention(heads=8, kv_heads=8, head_dim=64, qkv_bias=True, out_bias=True)
    assert gpt.layers[0].ffn == Mlp(intermediate_size=2048, gated=False, bias=True)


def test_positions_that_a_gpt_config_does_not_give_come_from_the_job() -> None:
    config = {**LLAMA, "model_type": "gpt2", "tie_word_embeddings": False}
    gpt = model_from_config(config, name="gpt", where="model", default_positions=4096)
    assert gpt.learned_positions == 4096
    assert not gpt.tie_word_embeddings
    assert read(config).learned_positions == 1024  # the default of the class


@pytest.mark.parametrize(
    ("changes", "routed"),
    [
        ({}, [True, True, True, True]),
        ({"first_k_dense_replace": 1}, [False, True, True, True]),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"mlp_only_layers": [0, 3]}, [False, True, True, False]),
        ({"moe_layer_freq": 2}, [True, False, True, False]),
        ({"moe_layer_freq": [0, 1, 1, 0]}, [False, True, True, False]),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, [False, True, True, True]),
        ({"num_experts": 0}, [False] * 4),
    ],
)
def test_which_layers_are_routed(changes: dict[str, Any], routed: list[bool]) -> None:
    assert [isinstance(layer.ffn, Moe) for layer in read(MOE, **changes).layers] == routed


def test_latent_attention_is_read_with_and_without_a_query_rank() -> None:
    expected = LatentAttention(
        heads=8, q_lora_rank=0, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
    )
    assert read(MLA).layers[0].attention == expected
    assert read(MLA, q_lora_rank=None).layers[0].attention == expected
    with_rank = read(MLA, q_lora_rank=96).layers[0].attention
    assert isinstance(with_rank, LatentAttention)
    assert with_rank.q_lora_rank == 96


def test_linear_attention_takes_three_layers_of_four() -> None:
    model = known.model("Qwen/Qwen3-Next-80B-A3B-Instruct")
    kinds = [isinstance(layer.attention, LinearAttention) for layer in model.layers]
    assert kinds == [True, True, True, False] * 12
    full = attention(model, 3)
    assert full.output_gate
    assert full.qk_norm
    assert moe(model).shared_gate


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 128}, [128] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [0] * 4),
        ({"model_type": "gpt_oss", "sliding_window": 128}, [128, 0, 128, 0]),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False}, [0] * 4),
        (
            {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3},
            [0, 0, 0, 128],
        ),
        (
            {"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"] * 2},
            [0, 128, 0, 128],
        ),
    ],
)
def test_which_layers_see_a_window_only(changes: dict[str, Any], windows: list[int]) -> None:
    model = read(LLAMA, **changes)
    assert [attention(model, i).window for i in range(4)] == windows


def test_gpt_oss_has_sinks_and_biases_in_experts_and_router() -> None:
    model = known.model("openai/gpt-oss-20b")
    assert attention(model).sinks
    assert (moe(model).bias, moe(model).router_bias, moe(model).gated) == (True, True, True)
    assert [attention(model, i).window for i in range(2)] == [128, 0]


def test_prediction_layers_are_kept_apart_from_the_others() -> None:
    model = known.model("deepseek-ai/DeepSeek-V3")
    assert (model.mtp_layers, model.num_layers) == (1, 61)


def test_a_vision_tower_is_read_from_flat_and_from_nested_configs() -> None:
    flat, nested = known.model("Qwen/Qwen2.5-VL-7B-Instruct"), known.model("Qwen/Qwen3-VL-8B-Instruct")
    assert (flat.vision.gated, flat.vision.layers, flat.vision.min_first_stage_layers) == (True, 32, 0)
    assert (nested.vision.gated, nested.vision.layers, nested.vision.min_first_stage_layers) == (False, 27, 3)
    assert nested.model_type == "qwen3_vl"
    assert attention(nested).qk_norm
    assert flat.model_type == "qwen2_5_vl"
    assert attention(flat).qkv_bias


@pytest.mark.parametrize(
    ("name", "encoder", "projector", "deepstack"),
    [
        ("Qwen/Qwen2-VL-7B-Instruct", 631_183_360, 44_575_744, 0),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 631_975_680, 44_574_464, 0),
        ("Qwen/Qwen3-VL-8B-Instruct", 415_891_440, 40_119_040, 120_377_856),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", 415_891_440, 30_679_808, 92_060_160),
    ],
)
def test_the_parts_of_a_vision_tower_have_the_parameters_of_their_modules(
    name: str, encoder: int, projector: int, deepstack: int
) -> None:
    # Summed over the parameters of transformers' modules (5.6) by name: merger, deepstack_merger_list, all others.
    tower = known.model(name).vision
    found = (tower.encoder_parameters, tower.projector_parameters, tower.deepstack_parameters)
    assert found == (encoder, projector, deepstack)


def test_ties_of_a_vision_language_model_stand_in_its_outer_config() -> None:
    assert known.model("Qwen/Qwen3-VL-4B-Instruct").tie_word_embeddings
    assert not known.model("Qwen/Qwen3-VL-8B-Instruct").tie_word_embeddings


@pytest.mark.parametrize("missing", ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"])
def test_latent_attention_needs_all_its_dimensions(missing: str) -> None:
    assert f"{missing} is missing" in error_of(without(MLA, missing))


def test_experts_need_the_number_that_a_token_takes() -> None:
    assert "num_experts_per_tok is missing" in error_of(without(MOE, "num_experts_per_tok"))


def test_an_empty_config_is_refused() -> None:
    message = "hidden_size is missing; expected a positive integer, which may also be named n_embd, d_model"
    assert message in error_of({})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": -512}, "hidden_size is -512"),
        ({"hidden_size": 512.0}, "hidden_size is 512.0; expected an integer"),
        ({"hidden_size": [512] * 100}, "hidden_size is [512, 512"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected an integer from 1 to 4,096"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "hidden_size 512 % 6 heads = 2; expected head_dim"),
        ({**MOE, "n_group": 3, "topk_group": 1}, "n_group is 3; expected a divisor of the 8 experts"),
        ({**MOE, "n_group": 4, "topk_group": 5}, "topk_group is 5; expected at most the 4 groups"),
        (
            {**MOE, "n_group": 8, "topk_group": 1},
            "topk_group is 1; expected at most the 8 groups, and as many as hold 2",
        ),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": ["a"]}, "mlp_only_layers is ['a']"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "moe_layer_freq": [1]}, "moe_layer_freq is [1]"),
        ({"kv_lora_rank": 64, "attention_bias": True}, "attention_bias is true together with kv_lora_rank"),
        ({"model_type": "qwen", "intermediate_size": 1535}, "intermediate_size is 1535; expected a multiple of 2"),
        ({"model_type": "qwen3_next"}, "linear_num_key_heads is missing"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(changes: dict[str, Any], message: str) -> None:
    found = error_of(LLAMA, **changes)
    assert message in found
    assert len(found) < 300


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba2", "state-space"),
        ("jamba", "hybrid"),
        ("nemotron_h", "hybrid"),
        ("rwkv", "recurrent"),
        ("gemma3_text", "not modelled"),
        ("llama4", "attention is not modelled"),
        ("qwen3_omni_moe", "audio tower is not modelled"),
    ],
)
def test_an_architecture_that_the_formulas_do_not_know_is_refused_by_name(model_type: str, reason: str) -> None:
    found = error_of(LLAMA, model_type=model_type)
    assert f"model_type {model_type!r} is not supported" in found
    assert reason in found
    assert "supported are deepseek_v2" in found


@pytest.mark.parametrize(
    "changes",
    [
        {"ssm_state_size": 128},
        {"hybrid_override_pattern": "M-M*"},
        {"is_encoder_decoder": True},
        {"audio_config": {"d_model": 1}},
        {"vision_config": {"hidden_size": 1}},
        {"text_config": {"model_type": "gemma3_text"}},
    ],
)
def test_a_new_type_with_keys_of_an_unknown_architecture_is_refused(changes: dict[str, Any]) -> None:
    assert "not supported" in error_of(LLAMA, model_type="brand_new", **changes)


def test_a_vision_tower_must_fit_its_language_model() -> None:
    config = catalog.model_config("Qwen/Qwen3-VL-8B-Instruct")
    config["vision_config"] = {**config["vision_config"], "out_hidden_size": 3584}
    assert "puts out 3584 values a token and the language model takes 4096" in error_of(config)
    del config["vision_config"]["depth"]
    assert "config.json: vision_config: depth is missing" in error_of(config)


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ModelError, match="not an object"):
        model_from_config([], name="test", where="config.json")  # type: ignore[arg-type]
