"""train.yaml for `megatron sft`."""

from dataclasses import replace
from typing import Any

import pytest

from tests.bundle.samples import B200, CLUSTER, DEEPSEEK, QWEN3_8B, QWEN3_30B, QWEN3_VL_8B
from tests.trainers.swift.plans import files_for
from tests.trainers.swift.plans import values_for as any_values_for
from topoplan.errors import InputError
from topoplan.layout.layout import Recompute
from topoplan.trainers.swift.arguments import arguments_of

ON_B200 = replace(CLUSTER, gpu=B200)
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "context": {"tp": 2, "cp": 2},
    "all-to-all": {"tp": 2, "cp": 2, "cp_comm_type": "a2a", "backend": "megatron"},
    "uneven": {"tp": 1, "pp": 2, "pipeline_layout": "Et*17|t*19,L"},
    "moe": {"model": QWEN3_30B, "tp": 2, "pp": 4, "vpp": 2, "ep": 4},
    "latent": {"model": DEEPSEEK, "tp": 1, "ep": 8, "backend": "megatron", "moe_token_dispatcher_type": "alltoall"},
    "flex": {"model": QWEN3_30B, "ep": 8, "tp": 1, "moe_token_dispatcher_type": "flex", "backend": "megatron"},
    "vision": {"model": QWEN3_VL_8B},
    "selective": {"recompute": Recompute(granularity="selective", modules=("core_attn", "mlp"))},
    "block": {"pp": 2, "recompute": Recompute(granularity="full", method="block", num_layers=3)},
    "offload": {"optimizer_offload_fraction": 0.5},
    "fp8": {"job": {"precision": "fp8"}},
    "mxfp8": {"job": {"precision": "mxfp8"}, "cluster": ON_B200, "fp8_param": True},
    "nvfp4": {"job": {"precision": "nvfp4"}, "cluster": ON_B200},
    "fp16": {"job": {"precision": "fp16"}},
    "part-of-an-epoch": {"job": {"epochs": 0.5}},
    "lora": {"job": {"finetuning": "lora"}, "backend": "megatron"},
    "lora-experts": {
        **{"model": QWEN3_30B, "tp": 2, "ep": 4, "backend": "megatron", "moe_token_dispatcher_type": "alltoall"},
        "job": {"finetuning": "lora", "lora_rank": 32, "lora_target": ("linear_qkv", "linear_fc1")},
    },
    "lora-vision": {
        **{"model": QWEN3_VL_8B, "backend": "megatron"},
        "job": {"finetuning": "lora", "freeze_vision_tower": True, "freeze_multi_modal_projector": True},
    },
}


def values_for(**what: Any) -> dict[str, Any]:
    return any_values_for(**{"backend": "mca", "model": QWEN3_8B, **what})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_key_is_an_argument_of_the_command(case: str) -> None:
    assert set(values_for(**CASES[case])) <= set(arguments_of("megatron sft").types)


def test_the_degrees_are_those_of_the_plan() -> None:
    values = values_for(**CASES["moe"])
    assert values["tensor_model_parallel_size"] == 2
    assert values["pipeline_model_parallel_size"] == 4
    assert values["virtual_pipeline_model_parallel_size"] == 2
    assert values["expert_model_parallel_size"] == 4
    assert values["expert_tensor_parallel_size"] == 1
    assert values["sequence_parallel"] is True
    assert values["global_batch_size"] == 64
    assert values["moe_token_dispatcher_type"] == "alltoall"
    assert values_for(**CASES["context"])["context_parallel_size"] == 2
    assert "expert_model_parallel_size" not in values_for()


def test_stages_of_a_layout_string_are_counted_by_the_trainer() -> None:
    values = values_for(tp=1, pp=2, vpp=2, pipeline_layout="Et*9|t*9|t*9|t*9L")
    assert values["pipeline_model_parallel_layout"] == "Et*9|t*9|t*9|t*9L"
    assert "virtual_pipeline_model_parallel_size" not in values


def test_switches_are_said_where_the_default_is_another() -> None:
    values = values_for()
    assert values["cross_entropy_loss_fusion"] is False
    assert values["overlap_grad_reduce"] is values["overlap_param_gather"] is True
    fused = values_for(cross_entropy_fusion=True, cross_entropy_fusion_impl="te")
    assert (fused["cross_entropy_loss_fusion"], fused["cross_entropy_fusion_impl"]) == (True, "te")
    assert values_for(**CASES["offload"])["use_precision_aware_optimizer"] is True
    assert values_for(**CASES["flex"])["moe_enable_deepep"] is True
    assert values_for(**CASES["latent"])["apply_rope_fusion"] is False
    assert values_for(**CASES["vision"])["apply_rope_fusion"] is False


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("fp8", {"fp8_format": "e4m3", "fp8_recipe": "blockwise", "fp8_param_gather": False}),
        ("mxfp8", {"fp8_recipe": "mxfp8", "fp8_param_gather": True}),
        ("nvfp4", {"fp4_format": "e2m1", "torch_dtype": "bfloat16"}),
        ("fp16", {"torch_dtype": "float16", "accumulate_allreduce_grads_in_fp32": True}),
    ],
)
def test_the_precision_is_the_one_of_the_job(case: str, wanted: dict[str, Any]) -> None:
    values = values_for(**CASES[case])
    assert {key: values[key] for key in wanted} == wanted


def test_dtypes_and_overlap_are_said_in_the_trainers_words() -> None:
    low = {"main_params_dtype": "fp16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    form = {"backend": "megatron", "tp": 2, "precision_aware_optimizer": True, "grad_reduce_in_fp32": False, **low}
    values = values_for(tp_comm_overlap=True, attention_backend="fused", **form)
    wanted = {**low, "main_grads_dtype": "bf16", "tp_comm_overlap": True, "attention_backend": "fused"}
    assert {key: values[key] for key in wanted} == wanted
    assert not {*wanted} & {*values_for(tp=2)}


def test_epochs_that_are_no_whole_number_become_steps() -> None:
    assert values_for()["num_train_epochs"] == 3
    values = values_for(job={"epochs": 0.5})
    assert values["train_iters"] == 781
    assert "num_train_epochs" not in values


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"job": {"stage": "dpo"}}, "stage dpo"),
        ({"job": {"trainer": {"recompute_granularity": "full"}}}, "was made for 'none'"),
        ({"job": {"trainer": {"learning_rate": 1e-5}}}, "one of `swift sft`"),
        ({"job": {"trainer": {"save": "x"}}}, "write output_dir"),
    ],
)
def test_nothing_is_written_that_it_refuses_or_that_contradicts_the_plan(what: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        files_for(**{"backend": "mca", **what})
    assert message in str(error.value)


def test_adapters_are_those_that_were_predicted() -> None:
    values = values_for(**CASES["lora"])
    assert (values["tuner_type"], values["lora_rank"], values["lora_alpha"]) == ("lora", 8, 32)
    assert values["target_modules"] == ["all-linear"]
    assert values["lora_dropout"] == 0.05
    assert values["merge_lora"] is False
    some = values_for(**CASES["lora-experts"])
    assert (some["lora_rank"], some["target_modules"]) == (32, ["linear_qkv", "linear_fc1"])
    assert "lora_rank" not in values_for()
    assert values_for()["tuner_type"] == "full"


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"lora_rank": 64}, "set job.lora_rank"),
        ({"target_modules": ["linear_qkv"]}, "set job.lora_target"),
        ({"modules_to_save": ["output_layer"]}, "leaves it out"),
        ({"tuner_type": "full"}, "set job.finetuning"),
    ],
)
def test_what_adapters_were_predicted_with_is_not_changed_behind_the_plan(trainer: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        values_for(job={"finetuning": "lora", "trainer": trainer}, backend="megatron")
    assert message in f"{caught.value}"


def test_dropout_and_merging_are_the_users() -> None:
    values = values_for(
        job={"finetuning": "lora", "trainer": {"lora_dropout": 0.0, "merge_lora": True}}, backend="megatron"
    )
    assert (values["lora_dropout"], values["merge_lora"]) == (0.0, True)
