"""LLaMA-Factory without Megatron: the meaning of its keys, and of missing keys."""

from typing import Any

import pytest

from tests.reading.setups import all_of, configuration, launch
from topoplan.layout.layout import Layout, Recompute
from topoplan.lint.translate import Translation, translate
from topoplan.reading.setup import Launch
from topoplan.reading.values import NotPredictedError
from topoplan.specs.cluster import Cluster

FULL_RECOMPUTE = Recompute(granularity="full", method="uniform", num_layers=1)


def translated(cluster: Cluster, start: Launch | None = None, **keys: Any) -> Translation:
    lines = {"model_name_or_path": "Qwen/Qwen3-8B", "stage": "sft", "dataset": "identity", "bf16": "true"} | keys
    one = configuration("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return translate(one, all_of(one, launches=() if start is None else (start,)), cluster)


def test_what_is_left_out_is_llamafactorys_own(a100s: Cluster) -> None:
    found = translated(a100s)
    job = found.spec.job

    assert (job.finetuning, job.lora_rank, job.lora_target, job.seq_len) == ("lora", 8, ("all",), 2048)
    assert (job.packing, job.optimizer, job.precision) == (False, "adamw", "bf16")
    # transformers' default batch of 8, checkpointing on, and the allocator that llamafactory-cli sets for several GPUs
    assert found.layout == Layout.of(
        backend="ddp",
        dp=8,
        micro_batch_size=8,
        gradient_accumulation_steps=1,
        distributed_optimizer=False,
        recompute=FULL_RECOMPUTE,
        expandable_segments=True,
    )
    assert job.global_batch_size == 64


@pytest.mark.parametrize(
    ("keys", "job", "layout"),
    [
        (
            {"finetuning_type": "full", "deepspeed": "ds_z3_offload_config.json"},
            {"finetuning": "full"},
            {"backend": "deepspeed", "zero_stage": 3, "offload_optimizer": True, "offload_param": True},
        ),
        ({"quantization_bit": 4}, {"finetuning": "qlora", "quantization_bit": 4}, {"backend": "ddp"}),
        ({"lora_rank": 64, "lora_target": "q_proj,v_proj"}, {"lora_rank": 64, "lora_target": ("q_proj", "v_proj")}, {}),
        ({"finetuning_type": "freeze", "freeze_trainable_layers": -3}, {"freeze_trainable_layers": -3}, {}),
        ({"finetuning_type": "full", "pure_bf16": "true"}, {"pure_bf16": True}, {"backend": "ddp"}),
        ({"optim": "adamw_bnb_8bit"}, {"optimizer": "adamw_8bit"}, {}),
        ({"bf16": "false", "fp16": "true"}, {"precision": "fp16"}, {}),
        ({"stage": "pt"}, {"packing": True}, {}),
        ({"neat_packing": "true"}, {"packing": True, "keeps_samples_apart": True}, {}),
        ({"disable_gradient_checkpointing": "true"}, {}, {"recompute": Recompute()}),
        ({"enable_liger_kernel": "true"}, {}, {"fused_linear_cross_entropy": True}),
        ({"stage": "kto"}, {"stage": "sft", "reference_forwards": 3}, {}),
        ({"stage": "dpo", "pref_loss": "simpo"}, {"stage": "dpo", "forwards_beside": 0, "sequences_per_sample": 2}, {}),
        ({"enable_liger_kernel": "true", "stage": "dpo"}, {"stage": "dpo"}, {"fused_linear_cross_entropy": False}),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, {"global_batch_size": 64}, {}),
    ],
)
def test_keys_become_the_job_and_the_layout(
    a100s: Cluster, keys: dict[str, Any], job: dict[str, Any], layout: dict[str, Any]
) -> None:
    found = translated(a100s, **keys)

    assert {key: getattr(found.spec.job, key) for key in job} == job
    assert {key: getattr(found.layout, key) for key in layout} == layout


@pytest.mark.parametrize(
    ("keys", "key", "words"),
    [
        ({"use_galore": "true", "finetuning_type": "full"}, "use_galore", "use_galore true is not predicted"),
        (
            {"use_unsloth": "true", "fp8": "true"},
            "use_unsloth",
            "use_unsloth true and fp8 true is not predicted",
        ),
        ({"optim": "adafactor"}, "optim", "optim 'adafactor' is not predicted"),
        ({"finetuning_type": "oft"}, "finetuning_type", "'oft'"),
        ({"stage": "ppo"}, "stage", "'ppo'"),
        ({"do_train": "false", "do_predict": "true"}, "do_predict", "a run that does not train"),
        ({"ray_num_workers": 4}, "ray_num_workers", "training under Ray"),
        ({"bf16": "false"}, "bf16", "neither bf16 nor fp16"),
        ({"quantization_bit": 3}, "quantization_bit", "quantization_bit 3"),
    ],
)
def test_what_has_no_formula_is_not_predicted(a100s: Cluster, keys: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(NotPredictedError, match=words) as error:
        translated(a100s, **keys)
    assert error.value.key == key


def test_merging_an_adapter_is_no_training(a100s: Cluster) -> None:
    one = configuration("model_name_or_path: Qwen/Qwen3-8B\nadapter_name_or_path: saves/lora\nexport_dir: merged\n")

    with pytest.raises(NotPredictedError, match="a run that does not train is not predicted"):
        translate(one, all_of(one), a100s)


def test_ray_is_told_by_its_variable_where_a_command_is_known(a100s: Cluster) -> None:
    plain = launch("llamafactory-cli", "train", "train.yaml", starter="")
    under_ray = launch("llamafactory-cli", "train", "train.yaml", starter="", variables={"USE_RAY": "1"})

    assert translated(a100s, plain, ray_num_workers=4).layout.dp == 8
    with pytest.raises(NotPredictedError, match="under Ray"):
        translated(a100s, under_ray, ray_num_workers=4)


def test_the_allocator_is_the_commands(a100s: Cluster) -> None:
    torchrun = launch("src/train.py", "train.yaml", options={"nproc_per_node": "8"})
    own = launch("llamafactory-cli", "train", "train.yaml", starter="")
    said = launch("src/train.py", "train.yaml", variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})

    assert not translated(a100s, torchrun).layout.expandable_segments
    assert translated(a100s, own).layout.expandable_segments
    assert translated(a100s, said).layout.expandable_segments


def test_fsdp_with_a_mixed_precision_keeps_fp32_whatever_pure_bf16_says(a100s: Cluster) -> None:
    text = (
        "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: full\npure_bf16: true\n"
        "per_device_train_batch_size: 1\n"
    )
    one = configuration(text)
    for precision, pure in (("bf16", False), ("'no'", True)):
        accelerate = f"distributed_type: FSDP\nmixed_precision: {precision}\nfsdp_config: {{fsdp_version: 2}}\n"
        told = configuration(accelerate, trainer="accelerate", name="fsdp.yaml")
        assert translate(one, all_of(one, told), a100s).spec.job.pure_bf16 is pure
