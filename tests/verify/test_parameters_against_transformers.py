"""Compare parameter counts with the model classes of transformers, built without storage on the meta device."""

import json
from importlib.resources import files
from typing import Any

import pytest

from topoplan import catalog
from topoplan.operators.params import parameter_count
from topoplan.specs.config_json import model_from_config

pytestmark = pytest.mark.verify

# Models published with their own code: the class of transformers with the same weights, or None.
REMOTE_CODE = {"kimi_k2": "deepseek_v3", "qwen": None}

# Read only from the config, and not part of the catalog.
OTHER_TYPES = ("gpt2", "qwen3_5", "qwen3_5_moe", "phi3", "glm", "seed_oss", "ernie4_5", "glm4_moe_lite", "ministral3")


def one_name_per_architecture() -> list[str]:
    table = json.loads(files("topoplan").joinpath("catalog", "models.json").read_text(encoding="utf-8"))
    return [next(iter(entry["names"])) for entry in table.values()]


def hugging_face_config(model_type: str, values: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (the verify extra has it)")
    try:
        return transformers.AutoConfig.for_model(model_type, **values)
    except ValueError as error:
        pytest.skip(f"transformers {transformers.__version__} does not know {model_type}: {error}")


def parameters_of_transformers(config: Any) -> int:
    torch = pytest.importorskip("torch", reason="torch is not installed (the verify extra has it)")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (the verify extra has it)")
    multimodal = hasattr(config, "vision_config")
    auto = transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in auto.from_config(config).parameters())


@pytest.mark.parametrize("name", one_name_per_architecture())
def test_catalog_parameters_equal_those_of_transformers(name: str) -> None:
    values = catalog.model_config(name)
    published_type = values.pop("model_type")
    model_type = REMOTE_CODE.get(published_type, published_type)
    if model_type is None:
        pytest.skip(f"transformers has no class for model_type {published_type}")
    config = hugging_face_config(model_type, values)
    assert parameters_of_transformers(config) == catalog.model_parameters(name)


@pytest.mark.parametrize("model_type", OTHER_TYPES)
def test_parameters_from_the_default_config_of_a_class_equal_those_of_the_class(model_type: str) -> None:
    config = hugging_face_config(model_type, {})
    if hasattr(config, "vision_config"):  # the defaults of tower and language model do not match
        config.vision_config.out_hidden_size = config.text_config.hidden_size
    model = model_from_config(config.to_dict(), name=model_type, where=model_type)
    assert parameters_of_transformers(config) == parameter_count(model)
