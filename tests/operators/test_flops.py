"""Model FLOPs against 6 N D and against Megatron-LM's own count."""

from dataclasses import replace
from typing import Any

import pytest

from tests.engines.samples import DENSE, LATENT, MIXED, VISION, spec_of
from tests.operators.test_params import active_parameter_count
from topoplan.operators.flops import flops_per_sequence, model_flops_per_step
from topoplan.operators.vision import patches_per_image
from topoplan.specs import known
from topoplan.specs.model import Attention


def megatron_flops(
    *,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocabulary: int,
    seq_len: int,
) -> float:
    """`num_floating_point_operations` of Megatron-LM `training/training.py` for a dense SwiGLU model with GQA."""
    query, key_value = heads * head_dim, kv_heads * head_dim
    mlp = 3 * 2 * hidden * ffn * 3
    attention = 3 * 2 * (hidden * (query + 2 * key_value) + query * hidden)
    scores = 3 * 2 * query / 2 * 2
    logits = 3 * 2 * hidden * vocabulary
    return seq_len * (layers * (mlp + attention) + logits) + seq_len**2 * layers * scores


@pytest.mark.parametrize("seq_len", [512, 8192, 131_072])
def test_llama_3_8b_has_the_flops_of_megatrons_formula(seq_len: int) -> None:
    expected = megatron_flops(
        layers=32,
        hidden=4096,
        ffn=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocabulary=128_256,
        seq_len=seq_len,
    )
    assert flops_per_sequence(known.model("meta-llama/Meta-Llama-3-8B"), seq_len) == pytest.approx(expected, rel=1e-9)


def test_llama_3_8b_at_8192_tokens_by_hand() -> None:
    # 32 layers of 218,103,808 matrix weights and an output layer of 525,336,576: 7,504,658,432 weights, 6 FLOPs each
    # per token; attention 6 * 8192 * 4096 per layer and token.
    per_token = 6 * 7_504_658_432 + 32 * 6 * 8192 * 4096
    found = flops_per_sequence(known.model("meta-llama/Meta-Llama-3-8B"), 8192)
    assert found == pytest.approx(8192 * per_token, rel=1e-9)


def test_deepseek_v3_has_the_flops_of_megatrons_formula_and_its_router() -> None:
    hidden, heads, q_rank, kv_rank, nope, rope, value = 7168, 128, 1536, 512, 128, 64, 128
    attention = q_rank * (hidden + heads * (nope + rope)) + kv_rank * (hidden + heads * (nope + value))
    attention += hidden * rope + heads * value * hidden
    experts = 3 * hidden * 2048 * (8 + 1)
    weights = 61 * attention + 3 * 3 * hidden * 18432 + 58 * (experts + hidden * 256) + hidden * 129_280
    scores = 61 * heads * (nope + rope + value) / 2
    expected = 6 * 4096 * weights + 6 * 4096**2 * scores
    assert flops_per_sequence(known.model(LATENT), 4096) == pytest.approx(expected, rel=1e-9)


def test_token_prediction_adds_a_layer_a_projection_and_the_output_layer_as_in_megatrons_formula() -> None:
    hidden, heads, q_rank, kv_rank, nope, rope, value = 7168, 128, 1536, 512, 128, 64, 128
    attention = q_rank * (hidden + heads * (nope + rope)) + kv_rank * (hidden + heads * (nope + value))
    attention += hidden * rope + heads * value * hidden
    weights = attention + 3 * hidden * 2048 * (8 + 1) + hidden * 256 + 2 * hidden**2 + hidden * 129_280
    expected = 6 * 4096 * weights + 6 * 4096**2 * heads * (nope + rope + value) / 2
    model = known.model(LATENT)
    extra = flops_per_sequence(model, 4096, mtp_layers=2) - flops_per_sequence(model, 4096)
    assert extra == pytest.approx(2 * expected, rel=1e-9)


@pytest.mark.parametrize("name", [DENSE, MIXED, LATENT, "meta-llama/Llama-3.1-70B", "mistralai/Mixtral-8x7B-v0.1"])
def test_short_sequences_need_six_flops_an_active_parameter_and_token(name: str) -> None:
    model = known.model(name)
    expected = 6.0 * active_parameter_count(model) * 256
    assert flops_per_sequence(model, 256) == pytest.approx(expected, rel=0.03)


def test_a_gated_delta_layer_counts_its_state_as_megatron_does() -> None:
    model = known.model("Qwen/Qwen3-Next-80B-A3B-Instruct")
    linear = model.layers[0].attention
    short, long = flops_per_sequence(model, 4096), flops_per_sequence(model, 8192)
    softmax = sum(isinstance(layer.attention, Attention) for layer in model.layers)
    assert softmax == len(model.layers) // 4
    # Only the softmax layers grow with the square of the sequence length.
    attention = next(layer.attention for layer in model.layers if isinstance(layer.attention, Attention))
    growth = long - 2 * short
    assert growth == pytest.approx(softmax * 6 * attention.heads * attention.head_dim * (8192**2 - 2 * 4096**2))
    assert not isinstance(linear, Attention)


def test_a_sliding_window_bounds_attention() -> None:
    model = known.model(DENSE)
    layer = model.layers[0]
    assert isinstance(layer.attention, Attention)
    narrow = replace(layer, attention=replace(layer.attention, window=1024))
    windowed = replace(model, layers=(narrow,) * len(model.layers))
    full, bounded = flops_per_sequence(model, 65_536), flops_per_sequence(windowed, 65_536)
    scores = 36 * 6 * 32 * 128 * 2 * (65_536 / 2 - 1024 * (1 - 1024 / (2 * 65_536))) * 65_536
    assert full - bounded == pytest.approx(scores, rel=1e-6)
    whole = replace(model, layers=(replace(narrow, attention=replace(layer.attention, window=65_536)),) * 36)
    assert flops_per_sequence(whole, 65_536) == full


def test_a_step_is_its_sequences() -> None:
    spec = spec_of(DENSE, global_batch_size=96)
    assert model_flops_per_step(spec.model, spec.job) == 96 * flops_per_sequence(spec.model, 4096)


def test_frozen_weights_have_no_gradients_as_megatron_bridge_counts_lora() -> None:
    """`training/utils/flop_utils.py`: two thirds of the products with weights, all of attention."""
    full, lora = (spec_of(DENSE, finetuning=how) for how in ("full", "lora"))
    scores = 36 * 6 * 32 * 128 * 2 * (4096 / 2) * 4096 * full.job.global_batch_size
    whole = model_flops_per_step(full.model, full.job)
    assert model_flops_per_step(lora.model, lora.job) == pytest.approx((whole - scores) * 2 / 3 + scores)


def test_layers_below_all_trained_ones_have_no_backward() -> None:
    full, last, first = (
        model_flops_per_step(spec.model, spec.job)
        for spec in (
            spec_of(DENSE),
            spec_of(DENSE, finetuning="freeze", freeze_trainable_layers=4),
            spec_of(DENSE, finetuning="freeze", freeze_trainable_layers=-4),
        )
    )
    model = known.model(DENSE)
    head = 6.0 * model.vocab_size * model.hidden_size * 4096 * spec_of(DENSE).job.global_batch_size
    layers = full - head
    # 32 of 36 layers have a forward only; the output layer has products in forward and for its input gradient.
    assert last == pytest.approx(layers * (32 / 3 + 4) / 36 + head * 2 / 3)
    assert last < first < full


def vision_flops(**job: Any) -> float:
    spec = spec_of(VISION, **job)
    language = flops_per_sequence(spec.model, 4096) * spec.job.global_batch_size
    return model_flops_per_step(spec.model, spec.job) - language


def test_a_frozen_tower_counts_its_forward_alone() -> None:
    frozen = vision_flops()
    assert vision_flops(freeze_vision_tower=False) == pytest.approx(3 * frozen)
    assert vision_flops(freeze_multi_modal_projector=False) == frozen
    assert vision_flops(images_per_sequence=0) == 0


def test_the_tower_is_counted_by_its_patches() -> None:
    tower = known.model(VISION).vision
    patches = patches_per_image(tower, 451_584)
    assert patches == 1764  # 441 tokens of 32 x 32 pixels, four patches each
    one = 2 * tower.encoder_parameters + 4 * tower.layers * patches * tower.hidden_size
    assert vision_flops(image_max_pixels=451_584, images_per_sequence=2) == pytest.approx(64 * 2 * patches * one)
