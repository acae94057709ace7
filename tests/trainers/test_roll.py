"""ROLL documents: which role trains, on how many GPUs, and the job and layout that its keys describe."""

from typing import Any

import pytest

from tests.reading.setups import setup_of
from topoplan.errors import InputError
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


def test_its_training_role_on_megatron_is_that_of_mcore_adapter() -> None:
    found = translated()
    layout, job = found.layout, found.spec.job
    assert (layout.backend, layout.tp, layout.dp, layout.sequence_parallel) == ("mca", 2, 8, True)
    assert layout.recompute.granularity == "full"
    assert (job.seq_len, job.global_batch_size, job.precision) == (6144, 2 * 8 * 8, "bf16")
    assert (found.spec.cluster.nodes, found.spec.cluster.gpus_per_node) == (2, 8)
    # ROLL asserts that overlap_param_gather is off, so no better plan may turn it on.
    assert job.pin["overlap_param_gather"] is False


def test_its_training_role_on_fsdp2() -> None:
    found = translated(**ON_FSDP, of_model="ulysses_size: 4, lora_target: 'q_proj,v_proj'")
    layout, job = found.layout, found.spec.job
    assert (layout.backend, layout.ulysses, layout.dp, layout.offload) == ("fsdp2", 4, 4, True)
    assert (job.finetuning, job.lora_target, job.pure_bf16) == ("lora", ("q_proj", "v_proj"), False)
    assert translated(**ON_FSDP).spec.job.pure_bf16


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


@pytest.mark.parametrize("strategy", [{}, ON_FSDP])
@pytest.mark.parametrize(
    ("said", "tokens", "each", "count"),
    [
        (["use_dynamic_batching_in_train: true", "max_tokens_per_microbatch_in_train: 20000"], 6144, 3, 6),
        (["use_dynamic_batching_in_train: true", "max_tokens_per_microbatch_in_train: 6144"], 6144, 1, 16),
        (["use_sequence_packing: true", f"sequence_packing_args: {PACKS}"], 8192, 1, 12),
        (["use_sequence_packing: true"], 6144, 2, 8),
    ],
)
def test_micro_batches_that_are_cut_by_their_tokens(
    strategy: dict[str, str], said: list[str], tokens: int, each: int, count: int
) -> None:
    more = "".join(f"\n  {line}" for line in said)
    found = translated(**strategy, devices=f"list(range(0,16)){more}")
    assert (found.spec.job.seq_len, found.layout.micro_batch_size) == (tokens, each)
    assert found.layout.gradient_accumulation_steps == count
    assert found.spec.job.keeps_samples_apart is (PACKS in said[-1])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"config": "overlap_param_gather: true"}, "which ROLL stops at"),
        ({"of_model": "additional_target: embed_tokens"}, "additional_target 'embed_tokens' is not predicted"),
        ({"of_model": "freeze_module_prefix: model.layers"}, "freeze_module_prefix 'model.layers' is not predicted"),
        ({**ON_FSDP, "config": "ep_size: 8"}, "ep_size 8 is not predicted"),
        ({**ON_FSDP, "config": "fsdp_size: 4"}, "fsdp_size 4 of 16 GPUs is not predicted"),
        ({"devices": "open('x')"}, "expected list"),
    ],
)
def test_what_is_not_predicted_says_why(said: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        translated(**said)


@pytest.mark.parametrize(
    ("devices", "predicted", "said"),
    [
        ("'[0, 1, 2]'", 3, "on the 1 x 3 GPUs that it is for"),
        ("list(range(8,16)) + list(range(8))", 16, "on the 2 x 8 GPUs that it is for"),
        ("list(range(0,64))", 32, "and the file is for 64"),
    ],
)
def test_gpus_are_those_of_the_device_mapping(devices: str, predicted: int, said: str) -> None:
    found = translated(devices=devices, config="")
    assert found.spec.cluster.world_size == predicted
    assert said in " ".join(found.assumptions)


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
