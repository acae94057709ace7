"""What layers keep for backward, compared with counts of saved tensors, and the switches that change it."""

from dataclasses import replace
from typing import Any

import pytest

from tests.engines.samples import DENSE, LATENT, MIXED, VISION, full_recompute, layout_of, spec_of
from topoplan.layout.layout import Recompute
from topoplan.operators.activations import KeptActivations, LayerActivations, kept_activations, layer_activations
from topoplan.operators.adapters import Adapters
from topoplan.operators.layers import mtp_layer
from topoplan.operators.shard import Shard, shard_of
from topoplan.operators.vision import vision_activation_bytes
from topoplan.specs import known
from topoplan.specs.layout_parts import RECOMPUTE_MODULES
from topoplan.specs.model import Attention, Layer, Mlp, Moe
from topoplan.trainers.case import case_of

FULL = Recompute(granularity="full", method="uniform", num_layers=1)


def shard(**changes: Any) -> Shard:
    plain = Shard(tokens=4096, seq_len=4096, tp=1, cp=1, ep=1, etp=1, sequence_parallel=False, precision="bf16")
    return plain._replace(**changes)


def layer(name: str, changed: Shard, index: int = -1) -> LayerActivations:
    model = known.model(name)
    return layer_activations(model, model.layers[index], changed)


def kept(name: str, recompute: Recompute, changed: Shard | None = None) -> KeptActivations:
    model = known.model(name)
    return kept_activations(model, model.layers[-1], changed or shard(), recompute)


def selective(*modules: str) -> Recompute:
    return Recompute(granularity="selective", modules=modules)


def bytes_of(activations: LayerActivations) -> dict[str, float]:
    return {tensor.name: tensor.saved_bytes for tensor in activations.saved}


# Saved tensors of one Qwen3-8B layer, 4096 tokens in bf16, counted by unique storage with saved_tensors_hooks on meta
# tensors; Transformer Engine's modules are replaced by functions that save what its own modules do.
@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "counted_bytes"),
    [(1, False, 596_803_608), (4, False, 249_888_792), (4, True, 149_200_920)],
)
def test_a_dense_layer_keeps_what_was_counted_less_the_second_copy_of_q(
    tp: int, sequence_parallel: bool, counted_bytes: int
) -> None:
    found = layer(DENSE, shard(tp=tp, sequence_parallel=sequence_parallel))
    # The count includes q twice: the copy that its norm saves, and the fused projection that a view of v keeps alive.
    # Transformer Engine makes v contiguous, which frees the projection. The remaining difference is a random state.
    q_bytes = 2 * 4096 * 32 * 128 / tp
    assert found.saved_bytes + q_bytes == pytest.approx(counted_bytes, abs=64)
    assert found.saved_bytes == pytest.approx(counted_bytes, rel=0.06)


def test_the_gpt3_layer_keeps_34_sbh_less_the_dropout_masks_and_the_scores() -> None:
    # Korthikanti et al., equation (1): sbh * (34 + 5as/h). Without dropout its two masks of one byte per element drop
    # out, and with flash attention the scores; their statistics stay.
    spec = spec_of(DENSE)
    attention = spec.model.layers[0].attention
    assert isinstance(attention, Attention)
    gpt3 = Layer(
        attention=replace(attention, kv_heads=32, qk_norm=False), ffn=Mlp(intermediate_size=4 * 4096, gated=False)
    )
    found = layer_activations(spec.model, gpt3, shard())
    sbh = 4096 * 4096
    assert found.saved_bytes / sbh == pytest.approx(32, rel=0.01)


@pytest.mark.parametrize("name", [DENSE, MIXED, LATENT])
def test_sequence_parallelism_leaves_a_tp_th_of_every_tensor_of_a_layer(name: str) -> None:
    whole = bytes_of(layer(name, shard()))
    split = bytes_of(layer(name, shard(tp=4, sequence_parallel=True, etp=1)))
    for tensor, size in whole.items():
        assert split[tensor] == pytest.approx(size / 4), tensor


@pytest.mark.parametrize("name", [DENSE, MIXED, LATENT, "Qwen/Qwen3-Next-80B-A3B-Instruct"])
def test_context_parallelism_divides_everything(name: str) -> None:
    whole, half = layer(name, shard()), layer(name, shard(tokens=2048, cp=2))
    assert half.saved_bytes == pytest.approx(whole.saved_bytes / 2)
    assert half.input_bytes == whole.input_bytes / 2


def test_context_parallelism_by_all_to_all_keeps_the_output_on_either_side_of_it() -> None:
    ring, exchanged = (bytes_of(layer(DENSE, shard(tokens=2048, cp=2, cp_all_to_all=way))) for way in (False, True))
    assert exchanged.pop("attention output before its all-to-all") == ring["attention output"]
    assert exchanged == ring


@pytest.mark.parametrize("name", [MIXED, LATENT])
def test_expert_parallelism_does_not_change_the_number_of_tokens_that_experts_see(name: str) -> None:
    assert layer(name, shard(ep=8)).saved_bytes == layer(name, shard()).saved_bytes


def test_expert_tensor_parallelism_gathers_the_tokens_and_splits_the_experts() -> None:
    plain = bytes_of(layer(MIXED, shard(tp=2, sequence_parallel=True, ep=4)))
    gathered = bytes_of(layer(MIXED, shard(tp=2, sequence_parallel=True, ep=4, etp=2)))
    assert gathered["experts.linear_fc1 input"] == 2 * plain["experts.linear_fc1 input"]
    assert gathered["experts.linear_fc1 output"] == plain["experts.linear_fc1 output"]
    assert gathered["experts.linear_fc2 input"] == plain["experts.linear_fc2 input"]


@pytest.mark.parametrize("name", [DENSE, MIXED, LATENT, "Qwen/Qwen3-Next-80B-A3B-Instruct", "openai/gpt-oss-20b"])
def test_more_tokens_keep_more_and_more_ranks_keep_less(name: str) -> None:
    sizes = [layer(name, shard(tokens=tokens)).saved_bytes for tokens in (1024, 2048, 4096, 8192)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == pytest.approx(8 * sizes[0])
    ranks = [layer(name, shard(tp=tp, sequence_parallel=tp > 1)).saved_bytes for tp in (1, 2, 4, 8)]
    assert ranks == sorted(ranks, reverse=True)


def test_full_recomputation_keeps_the_input_and_brings_the_rest_back_for_one_layer() -> None:
    plain = layer(DENSE, shard())
    full = kept(DENSE, FULL)
    assert full.kept_bytes == plain.input_bytes == 2 * 4096 * 4096
    assert full.plain_bytes == plain.saved_bytes
    assert full.kept_bytes + full.peak_bytes == pytest.approx(plain.saved_bytes + plain.backward_bytes)


def test_recomputing_attention_frees_next_to_nothing_with_flash_attention() -> None:
    plain = layer(DENSE, shard())
    assert kept(DENSE, selective("core_attn")).kept_bytes > 0.99 * plain.saved_bytes


@pytest.mark.parametrize(("precision", "bytes_a_value"), [("fp8", 1), ("mxfp8", 1 + 1 / 32), ("nvfp4", 0.5 + 1 / 16)])
def test_low_precision_layers_keep_quantised_inputs(precision: str, bytes_a_value: float) -> None:
    found = bytes_of(layer(DENSE, shard(precision=precision)))
    values = 4096 * 4096
    assert found["linear_qkv input"] == pytest.approx(bytes_a_value * values)
    assert found["linear_fc1 output"] == 2 * 4096 * 2 * 12288  # what the activation needs stays in bf16


def test_shard_of_a_layout_divides_the_sequence_and_not_its_attention() -> None:
    spec = spec_of(MIXED, seq_len=8192)
    found = shard_of(case_of(spec, "megatron"), layout_of(spec, tp=2, cp=2, ep=4, micro_batch_size=2))
    assert found.tokens == 2 * 8192 // 2
    assert found.seq_len == 8192
    assert found.local_tokens == found.tokens / 2
    moe = spec.model.layers[0].ffn
    assert isinstance(moe, Moe)
    assert found.routed_tokens(moe) == found.local_tokens * 8


def test_a_checkpointed_vision_tower_keeps_block_inputs_and_one_block() -> None:
    tower = known.model(VISION).vision
    plain = vision_activation_bytes(tower, 1024, recompute=False)
    short = vision_activation_bytes(tower, 1024, recompute=True)
    assert short == pytest.approx(1024 * tower.layers * 2 * tower.hidden_size + plain / tower.layers)
    assert short < plain / 8


def test_without_flash_attention_the_score_matrix_is_kept_and_core_attn_frees_it() -> None:
    model = known.model("Qwen/Qwen3-8B")
    flash = Shard(tokens=4096, seq_len=4096, tp=2, cp=1, ep=1, etp=1, sequence_parallel=True, precision="fp16")
    unfused = flash._replace(flash_attention=False)
    with_flash, without = (layer_activations(model, model.layers[0], shard) for shard in (flash, unfused))
    # arXiv 2205.05198, equation (1): 2 bytes for each of the a * s * s scores of the softmax's output (no dropout
    # here).
    scores = 2 * 16 * 4096 * 4096
    repeated = 2 * 2 * 4096 * 16 * 128
    assert without.saved_bytes - with_flash.saved_bytes == scores + repeated
    core = Recompute(granularity="selective", modules=("core_attn",))
    kept = [kept_activations(model, model.layers[0], shard, core).kept_bytes for shard in (flash, unfused)]
    assert kept[0] == kept[1]


def test_imbalance_gives_the_busiest_rank_more_tokens_unless_it_has_all_experts() -> None:
    spec = spec_of(MIXED, token_imbalance=1.5)
    layer = spec.model.layers[-1]
    assert isinstance(layer.ffn, Moe)
    for ep, share in ((8, 1.5), (1, 1.0)):
        uneven = shard_of(case_of(spec, "megatron"), layout_of(spec, ep=ep))
        even = uneven._replace(token_imbalance=1.0)
        assert uneven.routed_tokens(layer.ffn) == share * even.routed_tokens(layer.ffn)
        more, less = (layer_activations(spec.model, layer, one) for one in (uneven, even))
        routed = sum(t.saved_bytes for t in less.saved if t.name.startswith(("experts.", "routing weights")))
        assert more.saved_bytes - less.saved_bytes == pytest.approx((share - 1.0) * routed)


def test_token_prediction_is_recomputed_with_method_uniform_alone() -> None:
    spec = spec_of(DENSE, mtp_num_layers=1)
    layouts = {method: layout_of(spec, recompute=full_recompute(method, 1)) for method in ("uniform", "block")}
    layer = mtp_layer(spec.model)
    one = {
        method: kept_activations(spec.model, layer, shard_of(case_of(spec, "megatron"), layout), layout.recompute)
        for method, layout in layouts.items()
    }
    assert one["uniform"].kept_bytes == 2 * 2 * 4096 * 4096
    assert one["block"].kept_bytes == one["uniform"].plain_bytes
    assert one["block"].recomputed_bytes == 0


LORA = Adapters(16, ("all",))


def test_a_frozen_layer_without_an_adapter_saves_no_input_of_a_product() -> None:
    frozen = bytes_of(layer(DENSE, shard(adapters=Adapters(16, ("linear_proj",)))))
    trained = bytes_of(layer(DENSE, shard()))
    assert {"linear_qkv input", "linear_fc1 input", "linear_fc2 input"} <= set(trained) - set(frozen)
    assert set(frozen) - set(trained) == {"linear_proj adapter input, mask", "linear_proj adapter, between A and B"}
    assert frozen["layernorm input"] == trained["layernorm input"]


def test_without_dropout_an_adapter_saves_an_input_that_nothing_else_keeps() -> None:
    dropped, kept = (bytes_of(layer(DENSE, shard(adapters=Adapters(16, ("all",), share)))) for share in (0.05, 0.0))
    assert set(dropped) - set(kept) == {
        *("linear_qkv adapter input, mask", "linear_proj adapter input, mask"),
        *("linear_fc1 adapter input, mask", "linear_fc2 adapter input, mask"),
    }
    # Norms and attention hand on what they have saved themselves.
    assert set(kept) - set(dropped) == {"linear_fc2 adapter input"}
    assert kept["linear_fc2 adapter input"] == dropped["linear_fc2 adapter input, mask"] * 2 / 3


def test_only_trained_weights_have_dummy_gradients() -> None:
    shapes = layer(DENSE, shard(adapters=LORA)).weight_shapes
    assert (16, 4096) in shapes
    assert all(16 in shape for shape in shapes)
    assert not layer(DENSE, shard(adapters=Adapters(16, ()))).weight_shapes


@pytest.mark.parametrize("name", [DENSE, MIXED, LATENT, "Qwen/Qwen3-Next-80B-A3B-Instruct"])
@pytest.mark.parametrize("module", RECOMPUTE_MODULES)
def test_a_recompute_module_drops_its_tensors_and_brings_them_back(name: str, module: str) -> None:
    plain, found = layer(name, shard()), kept(name, selective(module))
    dropped = sum(tensor.saved_bytes for tensor in plain.saved if module in tensor.freed_by)
    held = sum(tensor.saved_bytes for tensor in plain.saved if module in tensor.saved_only_by)
    assert found.kept_bytes == pytest.approx(plain.saved_bytes - dropped + held)
    assert found.peak_bytes == pytest.approx(plain.backward_bytes + dropped)


def test_a_checkpoint_of_attention_keeps_the_product_that_v_is_a_view_of() -> None:
    plain, found = layer(DENSE, shard()), kept(DENSE, selective("core_attn"))
    statistics = bytes_of(plain)["softmax statistics"]
    assert found.kept_bytes == plain.saved_bytes - statistics + 2 * 4096 * (32 + 8) * 128
