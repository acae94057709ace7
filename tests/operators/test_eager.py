"""What a layer of a Hugging Face model keeps for backward, tensor by tensor."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.data_parallel.samples import TINY
from topoplan.operators.activations import LayerActivations, eager_activations
from topoplan.operators.eager import LayerUse
from topoplan.operators.finetuning import layer_linears
from topoplan.specs import known
from topoplan.specs.model import Model

MODELS = [
    *("Qwen/Qwen3-8B", "meta-llama/Llama-2-7b-hf", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen1.5-MoE-A2.7B"),
    *("deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-Next-80B-A3B-Instruct", "openai/gpt-oss-20b"),
]
TOKENS = 512


def use(**keys: Any) -> LayerUse:
    usual = {"tokens": TOKENS, "seq_len": TOKENS, "trains_weights": True, "adapted": frozenset(), "fused": False}
    return LayerUse(**usual | keys)


def activations(model: Model, place: int = -1, **keys: Any) -> LayerActivations:
    return eager_activations(model, model.layers[place], use(**keys))


def adapted_activations(model: Model, **keys: Any) -> LayerActivations:
    names = frozenset(linear.name for linear in layer_linears(model, model.layers[-1]))
    return activations(model, trains_weights=False, adapted=names, **keys)


def sizes(found: LayerActivations) -> dict[str, float]:
    """Return bytes per token, by name."""
    return {tensor.name: tensor.saved_bytes / TOKENS for tensor in found.saved}


def test_tensors_of_a_llama_layer_counted_by_hand() -> None:
    # 64 wide, 4 heads and 2 KV heads of 16, MLP 160 wide. Bytes per token.
    norms = 2 * (4 * 64 + 4 + 2 * 64)  # fp32 input, its root mean square, what the weight multiplies
    attention = 2 * 64 + (2 * 64 + 2 * 2 * 32) + 2 * 64 + 4 * 4  # input; q, k, v; output; log-sum-exp of a head
    mlp = 2 * 64 + 4 * 2 * 160  # input; gate, up, activation, product
    found = activations(TINY)
    assert found.saved_bytes == TOKENS * (norms + attention + mlp)
    assert found.input_bytes == TOKENS * 2 * 64


# Counted with saved_tensors_hooks on transformers 5.6 (LlamaForCausalLM, Qwen3MoeForCausalLM), bytes per token.
@pytest.mark.parametrize(
    ("keys", "counted"),
    [({}, 11560), ({"fp32_weights": True, "residual_bytes": 4}, 14120)],
    ids=["16 bits", "fp32 under autocast"],
)
def test_a_layer_keeps_what_was_counted_in_transformers(keys: dict[str, Any], counted: int) -> None:
    attention = replace(TINY.layers[0].attention, heads=8, kv_heads=2, head_dim=32)
    layer = replace(TINY.layers[0], attention=attention, ffn=replace(TINY.layers[0].ffn, intermediate_size=768))
    model = replace(TINY, hidden_size=256, layers=(layer,))
    assert activations(model, **keys).saved_bytes / TOKENS == counted


@pytest.mark.parametrize("name", MODELS)
@given(tokens=st.integers(1, 10_000))
def test_everything_grows_with_the_tokens(name: str, tokens: int) -> None:
    model = known.model(name)
    one, many = activations(model, tokens=1, seq_len=1), activations(model, tokens=tokens, seq_len=tokens)
    assert many.saved_bytes == pytest.approx(tokens * one.saved_bytes)
    assert many.backward_bytes == pytest.approx(tokens * one.backward_bytes)


@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_what_is_kept(name: str) -> None:
    model = known.model(name)
    frozen = activations(model, trains_weights=False).saved_bytes
    shared = adapted_activations(model, adapter_input_bytes=0).saved_bytes
    copied = adapted_activations(model, adapter_input_bytes=2).saved_bytes
    in_fp32 = adapted_activations(model, adapter_input_bytes=4).saved_bytes
    trained, under_autocast = activations(model).saved_bytes, activations(model, fp32_weights=True).saved_bytes
    assert frozen < shared < copied < in_fp32
    assert frozen < shared < trained < under_autocast


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keys", [{}, {"trains_weights": False}, {"fp32_weights": True, "residual_bytes": 4}])
def test_a_checkpoint_is_smaller_than_what_it_stands_for(name: str, keys: dict[str, Any]) -> None:
    found = activations(known.model(name), **keys)
    assert found.input_bytes < found.saved_bytes


@pytest.mark.parametrize("name", MODELS)
def test_fused_kernels_keep_less(name: str) -> None:
    model = known.model(name)
    assert activations(model, fused=True).saved_bytes < activations(model).saved_bytes


def test_an_adapter_on_the_value_alone_keeps_the_common_input_once() -> None:
    found = sizes(activations(TINY, trains_weights=False, adapted=frozenset({"v_proj"}), adapter_input_bytes=0))
    bare = sizes(activations(TINY, trains_weights=False))
    assert sum(found.values()) - sum(bare.values()) == 2 * 64


def test_adapters_of_the_output_projection_share_what_attention_keeps() -> None:
    keys = {"trains_weights": False, "adapted": frozenset({"o_proj"})}
    bare = activations(TINY, trains_weights=False).saved_bytes
    assert activations(TINY, **keys, adapter_input_bytes=0).saved_bytes == bare
    assert activations(TINY, **keys, adapter_input_bytes=2).saved_bytes == bare + TOKENS * 2 * 64


@pytest.mark.parametrize(("copied", "each"), [(0, 2), (2, 2), (4, 4)])
def test_dropout_of_an_adapter_keeps_a_copy_of_its_input_and_a_mask(copied: int, each: int) -> None:
    names = frozenset({"q_proj", "v_proj", "o_proj"})
    keys = {"trains_weights": False, "adapted": names, "adapter_input_bytes": copied, "adapter_dropout": True}
    bare = activations(TINY, trains_weights=False).saved_bytes
    assert activations(TINY, **keys).saved_bytes - bare == TOKENS * 3 * (each + 1) * 64
