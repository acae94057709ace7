"""ms-swift's GRPO: its policy update is predicted if nothing else stays on the GPUs."""

from dataclasses import replace

import pytest

from tests.reading.setups import all_of, configuration, setup_of
from topoplan.lint.translate import Translation, translate
from topoplan.operators.params import parameter_count
from topoplan.planner.predict import predict
from topoplan.specs.cluster import Cluster
from topoplan.specs.load import load_cluster

PLAIN = "swift rlhf --rlhf_type grpo --model Qwen/Qwen3-8B --dataset a --max_length 2048 --deepspeed zero3"
MEGATRON = "megatron rlhf --rlhf_type grpo --model Qwen/Qwen3-8B --dataset a --max_length 2048 --global_batch_size 16"


def translated(command: str) -> Translation:
    setup = setup_of(f"NPROC_PER_NODE=8 {command}\n")
    (one,) = setup.complete_configurations
    return translate(one, setup, load_cluster("cluster_specs/a100-1x8.yaml"))


@pytest.mark.parametrize(
    ("command", "forwards", "model_gb"),
    [
        (f"{PLAIN} --tuner_type full", 1, 16.4 / 8),
        (f"{PLAIN.replace('zero3', 'zero2')} --tuner_type full", 1, 16.4),
        (f"{PLAIN.replace('grpo', 'kto')} --tuner_type full", 3, 16.4 / 8),
        (f"{PLAIN.replace('grpo', 'kto')} --tuner_type full --loss_type apo_zero_unpaired", 1, 16.4 / 8),
        (f"{PLAIN.replace('grpo', 'orpo')} --tuner_type full", 0, 0),
        (f"{PLAIN} --tuner_type lora", 1, 0),
        (f"{MEGATRON.replace('grpo', 'dpo')} --tuner_type lora --padding_free true", 1, 0),
        (f"{MEGATRON.replace('grpo', 'kto')} --tuner_type full --tensor_model_parallel_size 8", 3, 16.4 / 8),
        (f"{MEGATRON} --tuner_type full --tensor_model_parallel_size 8", 1, 16.4 / 8),
    ],
)
def test_the_model_as_it_was_at_first_sees_the_samples_too(command: str, forwards: int, model_gb: float) -> None:
    found = translated(command)
    alone = replace(found.spec, job=replace(found.spec.job, reference_forwards=0))
    both, one = (predict(spec, found.layout) for spec in (found.spec, alone))
    assert found.spec.job.forwards_beside == forwards
    more = both.memory.device_bytes - one.memory.device_bytes  # including the allocator's share
    assert model_gb * 0.99e9 <= more <= model_gb * 1.15e9
    assert both.time.step_s >= one.time.step_s * (1 + 0.15 * forwards)


MODEL = "--model Qwen/Qwen2.5-7B-Instruct --dataset a --max_length 8192 --tuner_type full"
LABELS = "--task_type seq_cls --num_labels 265"


@pytest.mark.parametrize(
    ("command", "logit_bytes"),
    [
        (f"swift sft {MODEL} --deepspeed zero3", 12),
        (f"megatron sft {MODEL} --tensor_model_parallel_size 4 --sequence_parallel true", 10 / 4),
    ],
)
def test_its_last_layer_has_an_output_a_label(command: str, logit_bytes: float) -> None:
    whole, labels = translated(command), translated(f"{command} {LABELS}")
    assert labels.spec.job.num_labels == 265
    assert parameter_count(whole.spec.model) - parameter_count(labels.spec.model) == (152064 - 265) * 3584
    one, other = (predict(each.spec, each.layout) for each in (whole, labels))
    logits = logit_bytes * 8192 * (152064 - 265)
    states = 12 * (152064 - 265) * 3584 / 8
    assert one.memory.device_bytes - other.memory.device_bytes >= 0.9 * states
    assert one.memory.device_bytes - other.memory.device_bytes <= 2.5 * (states + logits)
    assert other.time.step_s < one.time.step_s


MEGATRON_SFT = """\
model: Qwen/Qwen3-30B-A3B
max_length: 8192
tensor_model_parallel_size: 2
expert_model_parallel_size: 8
sequence_parallel: true
micro_batch_size: 1
global_batch_size: 64
"""


def swift(cluster: Cluster, more: str = "") -> Translation:
    one = configuration(MEGATRON_SFT + more, trainer="swift-megatron", from_command=True)
    return translate(one, all_of(one), cluster)


def test_adapters_are_those_of_the_command(h100s: Cluster) -> None:
    found = swift(h100s, "tuner_type: lora\nlora_rank: 32\ntarget_modules: linear_qkv linear_proj\n")
    job = found.spec.job
    assert (job.finetuning, job.lora_rank, job.lora_target) == ("lora", 32, ("linear_qkv", "linear_proj"))
    every = swift(h100s, "train_type: lora\n")
    assert every.spec.job.lora_target == ("all",)
    full, some, all_of_them = (predict(one.spec, one.layout) for one in (swift(h100s), found, every))
    assert some.memory.device_bytes < all_of_them.memory.device_bytes < full.memory.device_bytes
    assert some.time.step_s < all_of_them.time.step_s
