"""The names by which the linear layers of a model are matched for adapters."""

import pytest

from topoplan import catalog
from topoplan.operators.adapters import target_of
from topoplan.operators.linears import layer_linears, linear_names, megatron_linears, target_names
from topoplan.specs import known


def test_experts_are_found_by_the_names_of_their_layers() -> None:
    assert target_of("experts.linear_fc1") == target_of("shared_experts.linear_fc1") == "linear_fc1"
    assert target_names(known.model("deepseek-ai/DeepSeek-V3")) == (
        *("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"),
        *("linear_fc1", "linear_fc2"),
    )


def test_a_gated_shared_expert_has_four_linear_layers_beside_attention() -> None:
    names = linear_names(known.model("Qwen/Qwen1.5-MoE-A2.7B"))
    assert set(names) - {"q_proj", "k_proj", "v_proj", "o_proj"} == {
        *("gate_proj", "up_proj", "down_proj", "shared_expert_gate")
    }


def test_the_router_of_deepseek_v2_is_a_linear_layer_and_that_of_v3_is_none() -> None:
    assert "gate" in linear_names(known.model("deepseek-ai/DeepSeek-V2-Lite"))
    assert "gate" not in linear_names(known.model("deepseek-ai/DeepSeek-V3"))


@pytest.mark.parametrize("name", catalog.model_names())
def test_both_ways_to_build_a_model_have_as_many_elements_in_linear_layers(name: str) -> None:
    """Without the routed experts; gates and routers are linear layers in only one of the two implementations."""
    model = known.model(name)
    for layer in {id(layer): layer for layer in model.layers}.values():
        megatron = [linear.elements for linear in megatron_linears(model, layer) if not linear.experts]
        eager = [linear.elements for linear in layer_linears(model, layer) if not linear.name.endswith("gate")]
        assert sum(megatron) == sum(eager)
