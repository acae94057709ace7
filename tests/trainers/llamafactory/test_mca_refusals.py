from dataclasses import replace

import pytest

from tests.layout.specs import DENSE, LINEAR, VISION, make_spec
from topoplan.errors import ModelError, SpecError
from topoplan.trainers.llamafactory.mca_refusals import job_refusals
from topoplan.trainers.refusal import FP8_RECIPES, missing_precision, refuse
from topoplan.trainers.traits import MCA, MEGATRON


def test_the_usual_job_is_fine() -> None:
    refuse(job_refusals(make_spec(DENSE)))


@pytest.mark.parametrize("name", ["openai/gpt-oss-20b", "moonshotai/Kimi-K2-Instruct", "deepseek-ai/DeepSeek-V2"])
def test_an_unsupported_model_type_is_named_with_the_ones_that_are(name: str) -> None:
    with pytest.raises(ModelError, match=r"does not support model_type .*; expected one of deepseek_v3, glm4_moe"):
        refuse(job_refusals(make_spec(name)))


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3", "zai-org/GLM-4.5"])
def test_token_prediction_of_the_types_whose_weights_the_adapter_loads_is_fine(name: str) -> None:
    refuse(job_refusals(make_spec(name, mtp_num_layers=1)))


@pytest.mark.parametrize(
    ("name", "count", "said"),
    [
        (DENSE, 1, r"loads no multi-token-prediction layers of qwen3; expected 0, or a model_type of deepseek_v3"),
        (LINEAR, 1, "loads no multi-token-prediction layers of qwen3_next"),
        ("deepseek-ai/DeepSeek-V3", 2, r"has 1, and the MCA trainer loads all of them or none; expected 0 or 1"),
    ],
)
def test_other_token_prediction_is_refused(name: str, count: int, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        refuse(job_refusals(make_spec(name, mtp_num_layers=count)))


def test_preferences_are_learned_by_text_models_alone() -> None:
    refuse(job_refusals(make_spec(DENSE, stage="dpo")))
    with pytest.raises(SpecError, match=r"cannot find the images in it; expected stage pt or sft"):
        refuse(job_refusals(make_spec(VISION, stage="dpo")))


def test_pre_training_of_a_vision_language_model_freezes_nothing() -> None:
    trained = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
    refuse(job_refusals(make_spec(VISION, stage="pt", **trained)))
    refuse(job_refusals(make_spec(DENSE, stage="pt")))
    with pytest.raises(SpecError, match=r"expected freeze_vision_tower and freeze_multi_modal_projector false; set"):
        refuse(job_refusals(make_spec(VISION, stage="pt")))
    with pytest.raises(SpecError, match=r"expected freeze_language_model false; set"):
        refuse(job_refusals(make_spec(VISION, stage="pt", freeze_language_model=True, **trained)))


@pytest.mark.parametrize("finetuning", ["freeze", "lora", "qlora"])
def test_only_full_fine_tuning_reaches_the_trainer(finetuning: str) -> None:
    with pytest.raises(
        SpecError, match=f"finetuning '{finetuning}' with backend mca: .* trains all weights all the same"
    ):
        refuse(job_refusals(make_spec(finetuning=finetuning)))


@pytest.mark.parametrize(
    ("gpu", "precision"),
    [
        ("h100-sxm-80gb", "bf16"),
        ("h100-sxm-80gb", "fp8"),
        ("b200-sxm-180gb", "fp8"),
        ("b200-sxm-180gb", "mxfp8"),
        ("v100-sxm-32gb", "fp16"),
    ],
)
def test_a_precision_with_a_recipe_is_fine(gpu: str, precision: str) -> None:
    refuse(job_refusals(make_spec(gpu=gpu, precision=precision)))


@pytest.mark.parametrize(
    ("gpu", "precision", "said"),
    [
        ("v100-sxm-32gb", "bf16", "v100-sxm-32gb has no bf16 tensor cores; set precision: fp16"),
        ("a100-sxm-80gb", "fp8", "a100-sxm-80gb has no fp8 tensor cores"),
        ("h100-sxm-80gb", "mxfp8", "h100-sxm-80gb has no mxfp8; Blackwell does"),
        ("h100-sxm-80gb", "nvfp4", "h100-sxm-80gb has no fp4 tensor cores"),
    ],
)
def test_a_precision_that_the_card_lacks_is_refused(gpu: str, precision: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        refuse(missing_precision(make_spec(gpu=gpu, precision=precision)))


@pytest.mark.parametrize(
    ("gpu", "precision", "said"),
    [
        ("l40s-48gb", "fp8", r"no fp8 recipe for l40s-48gb \(ada\); expected bf16, fp8 on Hopper"),
        ("b200-sxm-180gb", "nvfp4", r"no nvfp4 recipe for b200-sxm-180gb \(blackwell\)"),
    ],
)
def test_a_precision_that_only_the_adapter_lacks_is_refused(gpu: str, precision: str, said: str) -> None:
    spec = make_spec(gpu=gpu, precision=precision)
    refuse(missing_precision(spec))
    with pytest.raises(SpecError, match=said):
        refuse(job_refusals(spec))


def test_linear_attention_needs_kernels_that_volta_lacks() -> None:
    with pytest.raises(ModelError, match="needs Transformer Engine, which has no kernels for v100-sxm-32gb"):
        refuse(job_refusals(make_spec(LINEAR, gpu="v100-sxm-32gb", precision="fp16")))


def test_a_message_starts_with_the_file() -> None:
    with pytest.raises(SpecError, match=r"^cluster\.yaml: finetuning"):
        refuse(job_refusals(replace(make_spec(finetuning="lora"), path="cluster.yaml")))


def test_the_adapter_neither_pads_the_vocabulary_nor_splits_one_that_does_not_divide() -> None:
    assert (MCA.vocab_multiple, MCA.vocab_must_divide) == (1, True)
    assert (MEGATRON.dispatcher, MEGATRON.dispatcher_across_nodes) == ("alltoall", "flex")
    assert (MCA.dispatcher, MCA.dispatcher_across_nodes) == ("alltoall", "alltoall")
    assert (MEGATRON.vocab_multiple, MEGATRON.vocab_must_divide) == (128, False)
    assert set(FP8_RECIPES) == {"hopper", "blackwell"}
