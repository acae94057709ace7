"""ROLL documents: which role trains, on how many GPUs, and the job and layout that its keys describe."""

import pytest

from tests.reading.setups import setup_of
from topoplan.lint.translate import Translation, translate
from topoplan.planner.predict import predict
from topoplan.specs.load import load_cluster
from topoplan.trainers.recognizers import codec_of

DOCUMENT = """\
pretrain: {model}
prompt_length: 2048
response_length: 4096
actor_train:
  model_args: {{dtype: bf16, disable_gradient_checkpointing: false, {of_model}}}
  training_args: {{per_device_train_batch_size: 2, gradient_accumulation_steps: 8}}
  strategy_args: {{strategy_name: {strategy}, strategy_config: {{{config}}}}}
  device_mapping: {devices}
actor_infer:
  generating_args: {{max_new_tokens: "${{response_length}}"}}
  strategy_args: {{strategy_name: vllm}}
  device_mapping: list(range(0,16))
"""
USUAL = {
    "model": "Qwen/Qwen3-8B",
    "strategy": "megatron_train",
    "config": "tensor_model_parallel_size: 2, sequence_parallel: true, recompute_granularity: full",
    "devices": "list(range(0,16))",
    "of_model": "",
}
ON_FSDP = {"strategy": "fsdp2_train", "config": "fsdp_size: 16, param_dtype: bf16, offload_policy: true"}

PACKS = "{algorithm: load_balance, max_packed_sequence_length_train: 8192}"


def translated(**said: str) -> Translation:
    setup = setup_of(DOCUMENT.format(**{**USUAL, **said}), name="rlvr.yaml")
    (one,) = setup.configurations
    return translate(one, setup, load_cluster("cluster_specs/h100-4x8.yaml"))


@pytest.mark.parametrize("strategy", [{}, ON_FSDP])
def test_adapters_and_frozen_parts(strategy: dict[str, str]) -> None:
    adapters = translated(**strategy, of_model="lora_target: all-linear, lora_rank: 64")
    job = adapters.spec.job
    assert (job.finetuning, job.lora_rank, job.lora_target) == ("lora", 64, ("all",))
    plain = {**strategy, "config": strategy.get("config", "").replace("offload_policy: true", "")}
    less, more = (translated(**plain, of_model=of_model) for of_model in ("lora_target: all-linear", ""))
    memory = [predict(one.spec, one.layout, is_of_file=True).memory.device_bytes for one in (less, more)]
    assert memory[0] < memory[1]
    tower = "model.visual" if strategy else "vision_model"
    for prefix, is_frozen in (("", False), (f"freeze_module_prefix: {tower}", True)):
        job = translated(**strategy, model="Qwen/Qwen2.5-VL-7B-Instruct", of_model=prefix).spec.job
        assert {job.freeze_vision_tower, job.freeze_multi_modal_projector} == {is_frozen}


def test_a_script_names_its_document_by_directory_and_name() -> None:
    command = "CONFIG_PATH=$(basename $(dirname $0))\npython examples/start_rlvr_pipeline.py \\\n"
    options = "  --config_path $CONFIG_PATH --config_name rlvr\n"
    setup = setup_of(command + options, rlvr_yaml=DOCUMENT.format(**USUAL))
    (launch,) = setup.launches
    assert launch.file_configuration is not None
    assert [one.trainer for one in setup.configurations] == ["roll"]
    assert setup.complete_configurations == [launch.file_configuration]


def test_a_document_that_trains_nothing_is_known_all_the_same() -> None:
    setup = setup_of("pretrain: Qwen/Qwen3-8B\nactor_infer:\n  strategy_args: {strategy_name: vllm}\n", name="a.yaml")
    (one,) = setup.configurations
    assert (one.trainer, codec_of(one, setup)) == ("roll", None)
