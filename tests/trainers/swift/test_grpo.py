"""ms-swift's GRPO: its policy update is predicted if nothing else stays on the GPUs."""

from dataclasses import replace

import pytest

from tests.reading.setups import setup_of
from topoplan.lint.translate import Translation, translate
from topoplan.planner.predict import predict
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
