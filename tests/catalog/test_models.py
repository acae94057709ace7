"""The models of the catalog."""

import json
from importlib.resources import files
from typing import Any

import pytest

from topoplan import catalog
from topoplan.errors import ModelError
from topoplan.operators.params import parameter_count
from topoplan.specs import known

# Published counts (safetensors totals of the hub, or model cards), entered here by hand a second time.
PUBLISHED = {
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen-1_8B": 1_836_828_672,
    "Qwen/Qwen-7B": 7_721_324_544,
    "Qwen/Qwen-14B": 14_167_290_880,
    "Qwen/Qwen-72B": 72_287_920_128,
    "huggyllama/llama-7b": 6_738_415_616,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "openai/gpt-oss-20b": 20_914_757_184,
}

# Models that the project has promised to know.
PROMISED = (
    "Qwen/Qwen3-0.6B Qwen/Qwen3-1.7B Qwen/Qwen3-4B Qwen/Qwen3-14B Qwen/Qwen3-32B Qwen/Qwen3-30B-A3B-Base "
    "Qwen/Qwen3-30B-A3B-Instruct-2507 Qwen/Qwen3-30B-A3B-Thinking-2507 Qwen/Qwen3-Next-80B-A3B-Instruct "
    "Qwen/Qwen2.5-0.5B Qwen/Qwen2.5-1.5B Qwen/Qwen2.5-3B Qwen/Qwen2.5-7B Qwen/Qwen2.5-14B Qwen/Qwen2.5-32B "
    "Qwen/Qwen2-72B meta-llama/Llama-2-7b-hf meta-llama/Llama-2-13b-hf meta-llama/Meta-Llama-3-70B "
    "meta-llama/Llama-3.1-8B meta-llama/Llama-3.1-70B mistralai/Mistral-7B-v0.1 mistralai/Mixtral-8x22B-v0.1 "
    "deepseek-ai/DeepSeek-V2 deepseek-ai/DeepSeek-V3 deepseek-ai/DeepSeek-R1 moonshotai/Moonlight-16B-A3B "
    "moonshotai/Kimi-K2-Instruct zai-org/GLM-4.5 zai-org/GLM-4.5-Air openai/gpt-oss-120b"
)


@pytest.mark.parametrize("name", catalog.model_names())
def test_the_parameter_table_of_a_model_adds_up_to_its_published_count(name: str) -> None:
    assert parameter_count(known.model(name)) == catalog.model_parameters(name)


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_published_counts_are_those_that_we_know(name: str, count: int) -> None:
    assert catalog.model_parameters(name) == count


def test_every_promised_model_is_there() -> None:
    assert set(PROMISED.split()) <= set(catalog.model_names())


def test_every_architecture_file_has_a_name_and_every_name_a_file() -> None:
    folder = files("topoplan").joinpath("catalog")
    table = json.loads(folder.joinpath("models.json").read_text(encoding="utf-8"))
    assert {f"{architecture}.json" for architecture in table} == {
        file.name for file in folder.joinpath("models").iterdir()
    }


def test_equal_layers_of_a_model_are_one_object() -> None:
    deepseek = known.model("deepseek-ai/DeepSeek-V3")
    assert deepseek.num_layers == 61
    assert len({id(layer) for layer in deepseek.layers}) == len(set(deepseek.layers)) == 2


@pytest.mark.parametrize(
    ("asked", "published"),
    [
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("Qwen3-30B-A3B-Base", "Qwen/Qwen3-30B-A3B-Base"),
        ("Qwen/Qwen3-14B-FP8", "Qwen/Qwen3-14B-FP8"),
        ("ZhipuAI/GLM-4.5-Air", "zai-org/GLM-4.5-Air"),
        ("LLM-Research/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("glm-4.5", "zai-org/GLM-4.5"),
        (" Kimi-K2-Instruct ", "moonshotai/Kimi-K2-Instruct"),
    ],
)
def test_a_model_is_found_in_any_case_without_its_organisation_and_by_its_mirrors(asked: str, published: str) -> None:
    assert catalog.knows_model(asked)
    assert known.model(asked).name == published
    assert known.model(asked) is known.model(published)


def test_variants_share_an_architecture_and_keep_their_own_context_length() -> None:
    base, instruct = known.model("Qwen/Qwen3-30B-A3B-Base"), known.model("Qwen/Qwen3-30B-A3B-Instruct-2507")
    assert base.layers == instruct.layers
    assert (base.max_position_embeddings, instruct.max_position_embeddings) == (32768, 262144)


def test_a_short_name_of_two_organisations_must_be_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[str, dict[str, Any]] = {
        "one": {"names": {"first/Model-7B": {}}},
        "other": {"names": {"second/model-7b": {}}},
    }
    monkeypatch.setattr(catalog, "_names", lambda: catalog._Names(table))
    with pytest.raises(ModelError, match="ambiguous; expected one of first/Model-7B, second/model-7b"):
        known.model("model-7b")


def test_an_unknown_model_gets_the_nearest_name_and_the_ways_out() -> None:
    with pytest.raises(ModelError) as caught:
        known.model("Qwen/Qwen3-8C")
    message = str(caught.value)
    assert "model 'Qwen/Qwen3-8C' is not known; did you mean 'Qwen/Qwen3-8B'?" in message
    assert "topoplan show models" in message
    assert "config.json" in message
    assert not catalog.knows_model("Qwen/Qwen3-8C")
    assert "did you mean" not in str(catalog.unknown_model("google/gemma-3-27b-it"))


def test_a_config_is_given_as_a_copy() -> None:
    catalog.model_config("Qwen/Qwen3-8B")["hidden_size"] = 1
    assert catalog.model_config("Qwen/Qwen3-8B")["hidden_size"] == 4096
