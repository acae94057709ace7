from dataclasses import replace
from typing import Any

import pytest
import yaml

from tests.bundle.samples import (
    B200,
    CLUSTER,
    DEEPSEEK,
    QWEN3_8B,
    QWEN3_30B,
    QWEN3_VL_8B,
    V100,
    make_spec_and_layout,
    make_spec_and_plan,
)
from topoplan.errors import LayoutError, ModelError, SpecError
from topoplan.layout.layout import Recompute
from topoplan.trainers.llamafactory.key_list import known_keys
from topoplan.trainers.llamafactory.mca import MEGATRON
from topoplan.trainers.llamafactory.mca_yaml import trainer_file
from topoplan.trainers.model_directory import model_directory
from topoplan.trainers.steps import megatron_steps

REFUSED_SOMEWHERE = {
    "overwrite_output_dir",
    "evaluation_strategy",
    "warmup_ratio",
    "save_safetensors",
    "logging_dir",
    "deepspeed",
    "gradient_checkpointing",
}


def written(**what: Any) -> dict[str, Any]:
    """Return train.yaml as a YAML parser reads it."""
    trainer = trainer_file(*make_spec_and_layout(**what))
    read: dict[str, Any] = yaml.safe_load(trainer.text)
    assert read == dict(trainer.values)
    return read


def refused(**what: Any) -> str:
    with pytest.raises((LayoutError, SpecError, ModelError)) as caught:
        MEGATRON.written(*make_spec_and_layout(**what))
    return str(caught.value)


CASES: dict[str, dict[str, Any]] = {
    "dense": {"model": QWEN3_8B},
    "vision": {"model": QWEN3_VL_8B, "tp": 2, "pp": 2, "vpp": 2},
    "moe": {"model": QWEN3_30B, "tp": 2, "pp": 4, "ep": 4},
    "latent attention": {"model": DEEPSEEK, "tp": 1, "ep": 8},
    "context": {"model": QWEN3_8B, "tp": 2, "cp": 4},
    "selective": {"recompute": Recompute(granularity="selective", modules=("core_attn", "mlp"))},
    "uniform": {"recompute": Recompute(granularity="full", method="uniform", num_layers=2)},
    "block": {"pp": 2, "recompute": Recompute(granularity="full", method="block", num_layers=3)},
    "uneven": {"pp": 2, "tp": 1, "pipeline_layout": "Et*17|t*19,L"},
    "offload": {"optimizer_offload_fraction": 0.5},
    "pretraining": {"job": {"stage": "pt"}},
    "preference": {"model": QWEN3_8B, "job": {"stage": "dpo"}},
    "fp8": {"job": {"precision": "fp8"}},
    "no packing": {"job": {"packing": False}},
    "nothing known": {"job": {"dataset": None, "samples": None}},
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_key_is_in_the_list_and_of_its_type(case: str) -> None:
    for name, value in written(**CASES[case]).items():
        key = known_keys()[name]
        assert not key.ignored, name
        assert not key.since, f"{name} is not known to every version"
        if key.types == ("int",):
            assert type(value) is int, name
        if key.types == ("bool",):
            assert type(value) is bool, name
        if key.choices:
            assert value in key.choices, name
        assert name not in REFUSED_SOMEWHERE


def test_the_layout_is_written_in_full() -> None:
    read = written(model=QWEN3_30B, tp=2, pp=4, vpp=2, ep=4, micro_batch_size=2)
    assert read["tensor_model_parallel_size"] == 2
    assert read["pipeline_model_parallel_size"] == 4
    assert read["virtual_pipeline_model_parallel_size"] == 2
    assert read["context_parallel_size"] == 1
    assert read["expert_model_parallel_size"] == 4
    assert read["expert_tensor_parallel_size"] == 1
    assert read["sequence_parallel"] is True
    assert read["per_device_train_batch_size"] == 2
    assert read["gradient_accumulation_steps"] == 8
    assert read["moe_token_dispatcher_type"] == "alltoall"
    assert read["moe_grouped_gemm"] is True
    assert read["use_distributed_optimizer"] is True
    assert read["overlap_grad_reduce"] is read["overlap_param_gather"] is True


def test_a_dense_model_has_no_expert_keys_and_no_vpp_of_one() -> None:
    read = written(model=QWEN3_8B)
    assert not [
        key for key in read if key.startswith(("moe_", "expert_", "virtual_", "recompute_", "freeze_", "image_"))
    ]
    assert read["tensor_model_parallel_size"] == 4
    assert read["pipeline_model_parallel_size"] == 1  # training_args.py compares it with 1: None would fail


def test_frozen_parts_and_image_size_are_written_for_vision_models() -> None:
    read = written(model=QWEN3_VL_8B, job={"freeze_vision_tower": False, "image_max_pixels": 451584})
    assert read["freeze_vision_tower"] is False
    assert read["freeze_multi_modal_projector"] is True
    assert read["freeze_language_model"] is False
    assert read["image_max_pixels"] == 451584


def test_numbers_are_numbers_and_warm_up_is_a_whole_number_of_steps() -> None:
    read = written()
    assert read["learning_rate"] == 2e-5
    assert read["num_train_epochs"] == 3.0
    assert type(read["warmup_steps"]) is int
    assert read["warmup_steps"] == round(0.03 * 3 * (100_000 // 64))
    assert read["bf16"] is True


def test_every_comment_is_a_comment_to_any_reader() -> None:
    text = trainer_file(*make_spec_and_layout()).text
    assert yaml.safe_load("\n".join(line.split("  # ")[0] for line in text.splitlines())) == yaml.safe_load(text)
    assert max(len(line) for line in text.splitlines()) <= 120


def test_the_output_directory_is_of_this_plan_and_these_settings_only() -> None:
    directories = {
        written(**what)["output_dir"]
        for what in ({}, {"tp": 2}, {"job": {"learning_rate": 1e-5}}, {"job": {"seq_len": 8192}}, {"model": QWEN3_8B})
    }
    assert len(directories) == 5
    assert written()["output_dir"] == written()["output_dir"]
    assert all(directory.startswith("saves/") for directory in directories)


def test_packing_is_left_to_its_default_in_pretraining() -> None:
    # An explicit value would subtract one from cutoff_len (DataArguments.__post_init__) after run_pt has added one.
    assert "packing" not in written(job={"stage": "pt"})
    assert written(job={"stage": "pt", "packing": False})["packing"] is False
    assert "packing" not in written(model=QWEN3_8B, job={"stage": "dpo"})
    assert written()["packing"] is True


def test_rope_fusion_is_on_only_where_megatron_has_it() -> None:
    assert written(model=QWEN3_8B)["apply_rope_fusion"] is True
    assert written(model=QWEN3_VL_8B)["apply_rope_fusion"] is True
    assert written(model=QWEN3_VL_8B, micro_batch_size=2)["apply_rope_fusion"] is False
    assert written(model=DEEPSEEK, tp=1, ep=8)["apply_rope_fusion"] is False
    assert written(cluster=replace(CLUSTER, gpu=V100), job={"precision": "fp16"})["apply_rope_fusion"] is False


def test_precision_follows_the_card() -> None:
    assert written(job={"precision": "fp8"})["fp8_recipe"] == "blockwise"
    blackwell = replace(CLUSTER, gpu=B200)
    assert written(cluster=blackwell, job={"precision": "fp8"})["fp8_recipe"] == "mxfp8"
    assert written(cluster=blackwell, job={"precision": "mxfp8"})["fp8_recipe"] == "mxfp8"
    half = written(cluster=replace(CLUSTER, gpu=V100), job={"precision": "fp16"})
    assert half["fp16"] is True
    assert "bf16" not in half
    assert half["transformer_impl"] == "local"
    assert "nvfp4" in refused(cluster=blackwell, job={"precision": "nvfp4"})
    assert "mxfp8" in refused(job={"precision": "mxfp8"})


def test_a_hub_id_becomes_a_directory_and_a_given_directory_stays() -> None:
    assert model_directory(QWEN3_8B) == "models/Qwen/Qwen3-8B"
    assert model_directory(replace(QWEN3_8B, config_path="/data/qwen")) == "/data/qwen"
    assert model_directory(replace(QWEN3_8B, config_path="/data/qwen/config.json")) == "/data/qwen"
    assert model_directory(replace(QWEN3_8B, config_path="config.json")) == "."


def test_steps_are_counted_as_the_trainer_does() -> None:
    spec, _ = make_spec_and_plan(job={"samples": 1000, "epochs": 2.5})
    assert megatron_steps(spec.job) == 38  # ceil(floor(1000 / 64) * 2.5)
    assert megatron_steps(spec.job, max_steps=7) == 7
    assert megatron_steps(spec.job, max_steps=-1) == 38
    assert megatron_steps(replace(spec.job, samples=None)) is None


# The user's own keys


def with_keys(**keys: Any) -> dict[str, Any]:
    return {"job": {"trainer": keys}}


def test_keys_of_the_user_come_through() -> None:
    read = written(
        **with_keys(
            weight_decay=0.1, learning_rate="1e-5", eval_strategy="no", additional_configs={"moe_z_loss_coeff": 1e-3}
        )
    )
    assert read["weight_decay"] == 0.1
    assert read["learning_rate"] == 1e-5
    assert read["eval_strategy"] == "no"
    assert "per_device_eval_batch_size" not in read
    assert read["additional_configs"] == {"moe_z_loss_coeff": 1e-3}


def test_a_ratio_of_warm_up_becomes_steps_where_the_steps_are_known() -> None:
    assert written(**with_keys(warmup_ratio=0.1))["warmup_steps"] == 469
    assert "write warmup_steps" in refused(job={"samples": None, "trainer": {"warmup_ratio": 0.1}})


def test_variable_lengths_bring_the_dispatcher_that_they_need() -> None:
    read = written(model=QWEN3_8B, **with_keys(variable_seq_lengths=True))
    assert read["moe_token_dispatcher_type"] == "alltoall"


def test_a_key_that_agrees_with_the_plan_is_no_contradiction() -> None:
    read = written(**with_keys(tensor_model_parallel_size=4, virtual_pipeline_model_parallel_size=None, bf16=True))
    assert read["tensor_model_parallel_size"] == 4


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"tensor_model_parallel_size": 8}, "tensor_model_parallel_size is 8, and the plan was made for 4"),
        ({"recompute_granularity": "full"}, "job.pin"),
        ({"virtual_pipeline_model_parallel_size": 2}, "the plan was made for None"),
        ({"account_for_loss_in_pipeline_split": True}, "job.pin"),
        ({"cutoff_len": 8192}, "set job.seq_len"),
        ({"num_train_epochs": 1}, "set job.epochs"),
        ({"stage": "kto"}, "set job.stage"),
        ({"finetuning_type": "lora"}, "set job.finetuning"),
        ({"fp16": True}, "set job.precision"),
        ({"freeze_vision_tower": False}, "set job.freeze_vision_tower"),
        ({"additional_configs": {"tensor_model_parallel_size": 8}}, "decided by the plan"),
        ({"additional_configs": {"num_layers_in_first_pipeline_stage": 3}}, "pipeline_layout"),
        ({"model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct"}, "hub id"),
        ({"sequence_paralel": True}, "did you mean 'sequence_parallel'"),
        ({"moe_token_dispatcher_type": "allgather", "variable_seq_lengths": True}, "alltoall"),
    ],
)
def test_a_key_that_contradicts_the_plan_is_refused_with_the_reason(keys: dict[str, Any], part: str) -> None:
    message = refused(**with_keys(**keys))
    assert part in message
    assert "job.trainer." in message


def test_exact_packing_and_context_parallelism_exclude_each_other() -> None:
    assert "neat_packing fails under context parallelism" in refused(tp=2, cp=2, **with_keys(neat_packing=True))
    assert "stage sft" in refused(model=QWEN3_8B, job={"stage": "dpo", "trainer": {"neat_packing": True}})
    assert written(model=QWEN3_8B, **with_keys(neat_packing=True))["neat_packing"] is True


def test_exact_packing_is_refused_where_the_adapter_cannot_do_it() -> None:
    assert "garbles the positions of images" in refused(**with_keys(neat_packing=True))
    with_prediction = {"mtp_num_layers": 1, "trainer": {"sequence_packing": True}}
    assert "exclude each other" in refused(model=DEEPSEEK, tp=1, ep=8, job=with_prediction)


def test_an_evaluation_takes_the_micro_batch_of_the_plan_and_not_every_step() -> None:
    read = written(**with_keys(eval_strategy="steps", val_size=0.1))
    assert read["per_device_eval_batch_size"] == read["per_device_train_batch_size"] == 1
    assert read["eval_steps"] == read["save_steps"]
    read = written(**with_keys(eval_strategy="steps", val_size=0.1, per_device_eval_batch_size=2, eval_steps=50))
    assert (read["per_device_eval_batch_size"], read["eval_steps"]) == (2, 50)
    assert "eval_steps" not in written(**with_keys(eval_strategy="epoch", val_size=0.1))
    assert "eval_steps" not in written(**with_keys(val_size=0.1))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"eval_strategy": "steps"}, "nothing to evaluate on"),
        ({"eval_on_start": True}, "nothing to evaluate on"),
        (
            {"eval_strategy": "steps", "val_size": 63},
            "val_size leaves 63 samples, and an evaluation takes 64 at a time",
        ),
        ({"eval_strategy": "epoch", "val_size": 0.0001}, "val_size leaves 10 samples"),
        ({"eval_strategy": "epoch", "val_size": 100, "per_device_eval_batch_size": 2}, "takes 128 at a time"),
    ],
)
def test_an_evaluation_that_would_end_in_an_error_is_refused(keys: dict[str, Any], said: str) -> None:
    assert said in refused(**with_keys(**keys))
    assert written(**with_keys(eval_strategy="steps", val_size=64))["val_size"] == 64
    assert written(job={"samples": None, "trainer": {"eval_strategy": "steps", "val_size": 0.0001}})["val_size"] == 1e-4


def test_fewer_steps_warm_up_than_there_are() -> None:
    assert [written(job={"samples": 64 * steps, "epochs": 1.0})["warmup_steps"] for steps in (1, 2, 40, 100)] == [
        0,
        1,
        1,
        3,
    ]
    assert written(job={"samples": 100_000, "trainer": {"max_steps": 1}})["warmup_steps"] == 0
    assert "warmup_steps 40 of a run of 40 steps" in refused(
        job={"samples": 64 * 40, "epochs": 1.0, "trainer": {"warmup_steps": 40}}
    )
    assert written(job={"samples": None, "trainer": {"warmup_steps": 40}})["warmup_steps"] == 40


def test_stage_dpo_counts_pairs_and_has_no_key_of_sft() -> None:
    text = trainer_file(*make_spec_and_layout(model=QWEN3_8B, job={"stage": "dpo"})).text
    assert "64 pairs a step" in text
    assert "twice as many sequences" in text
    assert "packing" not in text
    assert written(model=QWEN3_8B, job={"stage": "dpo", "trainer": {"pref_loss": "orpo"}})["pref_loss"] == "orpo"
    assert "pref_loss is 'simpo'" in refused(model=QWEN3_8B, job={"stage": "dpo", "trainer": {"pref_loss": "simpo"}})
    assert "cannot find the images" in refused(job={"stage": "dpo"})


# What the trainer cannot do


def test_what_the_trainer_cannot_do_is_refused() -> None:
    assert "job.finetuning" in refused(job={"finetuning": "lora"})
    assert "expected pt, sft or dpo" in refused(job={"stage": "kto"})
    assert "'gpt2'" in refused(model=replace(QWEN3_8B, model_type="gpt2"))
    assert "wait forever" in refused(job={"samples": 5})
    assert "division by zero after a step" in refused(job={"samples": 63})
    assert written(job={"samples": 64})["warmup_steps"] == 1


def test_lengths_that_the_padding_cannot_bring_about_are_refused() -> None:
    wide = replace(CLUSTER, nodes=16)
    assert "packing: true" in refused(tp=8, cp=16, cluster=wide, job={"packing": False})
    assert "take a multiple of" in refused(tp=8, cp=16, cluster=wide, job={"seq_len": 4160})
    assert written(tp=8, cp=16, cluster=wide)["cutoff_len"] == 4096


def test_warnings_say_what_is_right_to_write_and_may_still_surprise() -> None:
    def warned(**what: Any) -> str:
        return " ".join(trainer_file(*make_spec_and_layout(**what)).warnings)

    assert warned(job={"template": "qwen3_v1"}).endswith("did you mean 'qwen3_vl'?")
    assert "4032 tokens" in warned(job={"seq_len": 4000})
    assert "published quantized" in warned(model=replace(QWEN3_8B, name="Qwen/Qwen3-8B-FP8"))
    assert "published quantized" in warned(model=DEEPSEEK, tp=1, ep=8)
    assert "published quantized" not in warned(model=replace(DEEPSEEK, config_path="/models/v3-bf16"), tp=1, ep=8)
    assert warned(model=replace(QWEN3_8B, name="deepseek-ai/DeepSeek-R1-0528-Qwen3-8B")) == ""
    assert "steps of warm-up are a guess" in warned(job={"samples": None})
    assert warned(job={"samples": None, "trainer": {"max_steps": 500}}) == ""
    assert "linear_attention_type" in warned(model=replace(QWEN3_30B, model_type="qwen3_next"), ep=4, etp=4)
    assert "cannot resume" in warned(model=QWEN3_30B, tp=2, ep=2)
    assert warned(model=QWEN3_30B, tp=2, ep=2, etp=2) == ""
    assert "the Hugging Face weights that it saves lack parts" in warned(
        model=replace(QWEN3_30B, model_type="qwen3_vl_moe"), tp=2, ep=2, etp=2
    )
    assert "needs transformers 4.57.0 or newer" in warned(**with_keys(project="mine"))
    assert warned() == ""


def test_token_prediction_is_asked_for_and_never_left_to_the_checkpoint() -> None:
    assert "mtp_num_layers" not in written(model=DEEPSEEK, tp=1, ep=8)
    assert written(model=DEEPSEEK, tp=1, ep=8, job={"mtp_num_layers": 1})["mtp_num_layers"] == 1
    said = refused(model=DEEPSEEK, tp=1, ep=8, job={"trainer": {"mtp_num_layers": 1}})
    assert "mtp_num_layers is 1, and the plan was made for 0" in said
    assert "set job.mtp_num_layers and leave mtp_num_layers out" in said


def test_hugging_face_weights_are_saved_where_the_adapter_can_export_them() -> None:
    for layout, exports in (({"tp": 2, "dp": 16, "ep": 4}, False), ({"tp": 1, "dp": 32, "ep": 4}, True)):
        files = trainer_file(*make_spec_and_layout(model=QWEN3_30B, **layout))
        assert files.values["save_hf_model"] is exports
        said = [one for one in files.warnings if "no Hugging Face weights are saved" in one]
        assert len(said) == (not exports)
        assert all("convert_checkpoint_to_hf" in one for one in said)
