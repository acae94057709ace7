"""The linear layers of a model as Megatron-core builds them."""

from __future__ import annotations

import pytest

from topoplan import catalog
from topoplan.errors import SpecError
from topoplan.operators.megatron_linears import (
    check_targets,
    megatron_linears,
    side_of,
    target_names,
    target_of,
)
from topoplan.operators.params import layer_tensors, mtp_layer
from topoplan.specs.job import Job
from topoplan.specs.model import Layer, Model

MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-Next-80B-A3B-Instruct")
OTHERS = ("bias", "norm", "router", "gate", "conv1d", "dt_bias+A_log", "softmax_offset")


def weights(model: Model, layer: Layer) -> dict[str, int]:
    """Elements of the weights of a layer that are linear layers."""
    return {
        tensor.name: tensor.elements
        for tensor in layer_tensors(model, layer)
        if not any(word in tensor.name for word in OTHERS)
    }


@pytest.mark.parametrize("name", MODELS)
def test_their_sides_multiply_to_the_weights_of_the_parameter_table(name: str) -> None:
    model = catalog.model(name)
    for layer in (*{id(layer): layer for layer in model.layers}.values(), mtp_layer(model)):
        linears = {one.name: one.inputs * one.outputs * max(1, one.experts) for one in megatron_linears(model, layer)}
        assert linears == weights(model, layer)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_whole_on_every_rank_is_what_the_parameter_table_does_not_split(name: str) -> None:
    model = catalog.model(name)
    splits = {tensor.name: tensor.split for tensor in layer_tensors(model, model.layers[-1])}
    for linear in megatron_linears(model, model.layers[-1]):
        assert (side_of(linear.name) == "replicated") == (splits[linear.name] == "replicated")


def test_experts_are_found_by_the_names_of_their_layers() -> None:
    assert target_of("experts.linear_fc1") == target_of("shared_experts.linear_fc1") == "linear_fc1"
    assert target_names(catalog.model("deepseek-ai/DeepSeek-V3")) == (
        *("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"),
        *("linear_fc1", "linear_fc2"),
    )


def test_an_unknown_layer_is_refused_with_those_that_there_are() -> None:
    model = catalog.model("Qwen/Qwen3-8B")
    check_targets(Job(seq_len=4096, global_batch_size=64, lora_target=("linear_qkv", "linear_fc2")), model)
    with pytest.raises(SpecError, match="no linear layer called q_proj in Megatron-core") as caught:
        check_targets(Job(seq_len=4096, global_batch_size=64, lora_target=("q_proj",)), model)
    assert "linear_qkv, linear_proj, linear_fc1, linear_fc2" in caught.value.expected


def test_the_projection_of_a_token_prediction_layer_is_known_where_one_is_trained() -> None:
    model = catalog.model("deepseek-ai/DeepSeek-V3")
    check_targets(Job(seq_len=4096, global_batch_size=64, lora_target=("eh_proj",), mtp_num_layers=1), model)
    with pytest.raises(SpecError, match="eh_proj"):
        check_targets(Job(seq_len=4096, global_batch_size=64, lora_target=("eh_proj",)), model)
