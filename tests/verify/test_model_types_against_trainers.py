"""Parse train.yaml of every supported model type and stage with LLaMA-Factory's parser and the adapter's config."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.bundle.samples import make_plan
from tests.layout.specs import make_layout, make_spec
from tests.verify.llamafactory import need_llamafactory, parse
from topoplan import catalog
from topoplan.bundle.bundle import generate
from topoplan.bundle.draft import draft_of
from topoplan.bundle.warnings import warnings_of
from topoplan.planner.plan import Plan
from topoplan.specs import known
from topoplan.specs.config_json import model_from_config
from topoplan.specs.facts import facts_of
from topoplan.specs.model import Model
from topoplan.specs.spec import Spec
from topoplan.trainers.llamafactory.key_list import templates

SUPPORTED_MODEL_TYPES = frozenset(templates().supported_model_types)

pytestmark = pytest.mark.verify

STAGES = ("pt", "sft", "dpo")
CHECKPOINTS = {
    "deepseek_v3": "moonshotai/Moonlight-16B-A3B",
    "glm4_moe": "zai-org/GLM-4.5-Air",
    "llama": "meta-llama/Llama-3.1-8B",
    "mistral": "mistralai/Mistral-7B-v0.3",
    "mixtral": "mistralai/Mixtral-8x7B-v0.1",
    "qwen2": "Qwen/Qwen2.5-7B",
    "qwen2_5_vl": "Qwen/Qwen2.5-VL-7B-Instruct",
    "qwen2_vl": "Qwen/Qwen2-VL-7B-Instruct",
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
    "qwen3_next": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "qwen3_vl": "Qwen/Qwen3-VL-8B-Instruct",
    "qwen3_vl_moe": "Qwen/Qwen3-VL-30B-A3B-Instruct",
}
FROM_TRANSFORMERS = ("qwen3_5", "qwen3_5_moe")
CASES = [
    (model_type, stage)
    for model_type in (*CHECKPOINTS, *FROM_TRANSFORMERS)
    for stage in STAGES
    if not (stage == "dpo" and ("vl" in model_type or "qwen3_5" in model_type))
]


def config_of(model_type: str) -> dict[str, Any]:
    if model_type in CHECKPOINTS:
        config = catalog.model_config(CHECKPOINTS[model_type])
        # Stored in the checkpoint, and irrelevant to a plan.
        return config | ({"scoring_func": "sigmoid"} if model_type == "deepseek_v3" else {})
    import transformers

    whole: dict[str, Any] = transformers.AutoConfig.for_model(model_type).to_dict()
    text, vision = whole["text_config"], whole["vision_config"]
    # As in the checkpoints: the defaults of both halves do not match, and the adapter needs the interval.
    text = text | {"full_attention_interval": 1 + text["layer_types"].index("full_attention")}
    return whole | {"text_config": text, "vision_config": vision | {"out_hidden_size": text["hidden_size"]}}


def model_of(model_type: str) -> Model:
    if model_type in CHECKPOINTS:
        return known.model(CHECKPOINTS[model_type])
    return model_from_config(config_of(model_type), name=model_type, where=model_type)


def spec_and_plan(model_type: str, stage: str) -> tuple[Spec, Plan]:
    model = model_of(model_type)
    experts = {"ep": 2, "etp": 1} if facts_of(model).is_moe else {}
    pp = 2 if model.num_layers % 2 == 0 else 1
    spec = make_spec(model, nodes=2, stage=stage, samples=100_000, dataset="mine", packing=stage == "sft")
    return spec, make_plan(make_layout(spec, tp=2, pp=pp, **experts))


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], Mapping[str, str]]:
    need_llamafactory()
    adapter = importlib.util.find_spec("mcore_adapter") is not None
    paths: dict[tuple[str, str], Path] = {}
    checkpoints: dict[Path, Path | None] = {}
    for model_type, stage in CASES:
        folder = tmp_path_factory.mktemp(f"{model_type}-{stage}")
        path = paths[model_type, stage] = folder / "train.yaml"
        path.write_text(generate(*spec_and_plan(model_type, stage))["train.yaml"], encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(config_of(model_type)), encoding="utf-8")
        checkpoints[path] = folder if adapter else None
    found = parse(checkpoints, tmp_path_factory.mktemp("parser"))
    return {case: found[str(path)] for case, path in paths.items()}


def test_every_supported_type_is_tried() -> None:
    assert {*CHECKPOINTS, *FROM_TRANSFORMERS} == SUPPORTED_MODEL_TYPES
    assert len(CASES) == 3 * len(SUPPORTED_MODEL_TYPES) - 6


@pytest.mark.parametrize(("model_type", "stage"), CASES)
def test_the_trainer_takes_the_file_and_gets_the_model_that_was_planned(
    model_type: str, stage: str, parsed: Mapping[tuple[str, str], Mapping[str, str]]
) -> None:
    seen, (spec, plan) = parsed[model_type, stage], spec_and_plan(model_type, stage)
    warned = [text for text in warnings_of(draft_of(spec, plan)) if "ends in a TypeError" in text]
    if importlib.util.find_spec("mcore_adapter") is None or not warned:
        assert "error" not in seen, seen.get("error")
        assert seen["stage"] == repr(stage)
    if importlib.util.find_spec("mcore_adapter") is None:
        return
    # Once an adapter has fixed this, the warning is no longer needed.
    assert ("linear_attention_type" in seen.get("error", "")) == bool(warned), seen.get("error")
    if warned:
        return
    facts = facts_of(spec.model)
    assert seen["num_layers"] == repr(spec.model.num_layers)
    assert seen["hidden_size"] == repr(spec.model.hidden_size)
    assert seen["padded_vocab_size"] == repr(spec.model.vocab_size)
    assert seen["num_moe_experts"] == (repr(facts.experts[0]) if facts.is_moe else "None")
    assert seen["tie_embeddings_and_output_weights"] == repr(spec.model.tie_word_embeddings)
    assert seen["sequence_parallel"] == "True"
    if facts.is_moe:
        assert seen["moe_token_dispatcher_type"] == "'alltoall'"
        assert seen["moe_grouped_gemm"] == "True"
        assert seen["expert_tensor_parallel_size"] == "1"
