"""Which linear layers a model has, and how adapters, freezing and packing treat its parameters."""

from typing import Any

import pytest

from tests.engines.data_parallel.samples import LAYERS, TINY, TINY_ELEMENTS, TINY_LAYER_ELEMENTS
from topoplan import catalog
from topoplan.errors import SpecError
from topoplan.operators.adapters import target_of
from topoplan.operators.finetuning import (
    Elements,
    adapted,
    elements_of,
    layer_linears,
    linear_names,
    megatron_linears,
    target_names,
    trained_layers,
)
from topoplan.operators.params import parameter_count
from topoplan.specs import known
from topoplan.specs.job import Job

# r * (inputs + outputs) of q, k, v, o, gate, up and down.
TINY_PAIRS = (64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 160)


def job(**keys: Any) -> Job:
    return Job(seq_len=4096, global_batch_size=8, **keys)


def elements(model: Any = TINY, **keys: Any) -> Elements:
    return elements_of(model, job(**keys))


def test_all_is_trained_with_full_fine_tuning() -> None:
    assert elements() == Elements(trained=TINY_ELEMENTS, frozen=0)


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_an_adapter_has_rank_times_inputs_and_outputs(rank: int) -> None:
    found = elements(finetuning="lora", lora_rank=rank)
    assert found.trained == found.adapters == LAYERS * rank * TINY_PAIRS
    assert (found.frozen, found.quantised) == (TINY_ELEMENTS, 0)


def test_the_usual_rank_is_8() -> None:
    assert elements(finetuning="lora") == elements(finetuning="lora", lora_rank=8)


def test_an_adapter_is_on_the_named_layers_alone() -> None:
    found = elements(finetuning="lora", lora_rank=4, lora_target=("q_proj", "v_proj"))
    assert found.adapters == LAYERS * 4 * ((64 + 64) + (64 + 32))


def test_adapters_on_layers_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(
        SpecError, match=r"job.lora_target: tiny has no linear layer called q_prj; expected all, or"
    ) as e:
        elements(finetuning="lora", lora_target=("q_prj",))
    assert "q_proj" in str(e.value).rsplit(";", 1)[-1]
    assert elements(finetuning="lora", lora_target=("q_proj", "elsewhere")).adapters == LAYERS * 8 * 128


# Trainable parameters that published runs print: peft's on q_proj and v_proj of Llama-2-7B with rank 8, and
# LLaMA-Factory's on all linear layers of Llama-3-8B with rank 8.
@pytest.mark.parametrize(
    ("model", "target", "printed"),
    [
        ("meta-llama/Llama-2-7b-hf", ("q_proj", "v_proj"), 4_194_304),
        ("meta-llama/Meta-Llama-3-8B", ("all",), 20_971_520),
    ],
)
def test_published_counts_of_trainable_parameters(model: str, target: tuple[str, ...], printed: int) -> None:
    found = elements(known.model(model), finetuning="lora", lora_rank=8, lora_target=target)
    assert found.trained == printed


def test_packing_takes_linear_layers_and_leaves_embedding_norms_and_output_layer() -> None:
    found = elements(finetuning="qlora")
    kept = 2 * 1000 * 64 + LAYERS * 2 * 64 + 64
    assert (found.frozen, found.quantised) == (kept, TINY_ELEMENTS - kept)


def test_experts_are_packed_but_have_no_adapter() -> None:
    model = known.model("Qwen/Qwen3-30B-A3B")
    assert set(linear_names(model)) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert elements(model, finetuning="qlora").quantised > 0.95 * parameter_count(model)


@pytest.mark.parametrize(("count", "places"), [(2, {1, 2}), (-1, {0}), (3, {0, 1, 2}), (7, {0, 1, 2})])
def test_freeze_trains_the_last_layers_or_with_a_minus_the_first(count: int, places: set[int]) -> None:
    asked = job(finetuning="freeze", freeze_trainable_layers=count)
    assert trained_layers(TINY, asked) == places
    found = elements_of(TINY, asked)
    assert found.trained == len(places) * TINY_LAYER_ELEMENTS
    assert found.total == TINY_ELEMENTS


@pytest.mark.parametrize("finetuning", ["full", "freeze"])
def test_no_layer_has_an_adapter_without_lora(finetuning: str) -> None:
    asked = job(finetuning=finetuning)
    assert not any(adapted(asked, linear) for linear in layer_linears(TINY, TINY.layers[0]))


def test_a_vision_tower_is_frozen_where_the_job_freezes_it() -> None:
    model = known.model("Qwen/Qwen3-VL-8B-Instruct")
    whole = elements(model, freeze_vision_tower=False, freeze_multi_modal_projector=False)
    assert whole.frozen == 0
    tower = elements(model, freeze_multi_modal_projector=False).frozen
    assert tower == model.vision.encoder_parameters + model.vision.deepstack_parameters
    assert elements(model).frozen == model.vision.parameters


def test_a_frozen_language_model_leaves_the_projector() -> None:
    model = known.model("Qwen/Qwen3-VL-8B-Instruct")
    asked = job(freeze_language_model=True, freeze_multi_modal_projector=False)
    assert elements_of(model, asked).trained == model.vision.projector_parameters
    assert trained_layers(model, asked) == frozenset()


@pytest.mark.parametrize("finetuning", ["full", "freeze", "lora", "qlora"])
@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"])
def test_what_is_trained_frozen_and_packed_is_the_checkpoint_and_the_adapters(name: str, finetuning: str) -> None:
    model = known.model(name)
    found = elements(model, finetuning=finetuning)
    assert found.total == parameter_count(model) + found.adapters
    assert min(found.trained, found.frozen, found.quantised, found.adapters) >= 0


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
