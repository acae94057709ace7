"""What a Trinity-RFT configuration means: the trainer's share of the GPUs, its micro-batch, its samples."""

from typing import Any

import pytest
import yaml

from tests.reading.setups import setup_of
from topoplan.errors import InputError
from topoplan.lint.translate import Translation, translate
from topoplan.specs.load import load_cluster

GRPO: dict[str, Any] = {
    "algorithm": {"algorithm_type": "grpo", "repeat_times": 8},
    "model": {"model_path": "${oc.env:MODEL,Qwen/Qwen3-1.7B}", "max_prompt_tokens": 256, "max_response_tokens": 768},
    "cluster": {"node_num": 1, "gpu_per_node": 8},
    "buffer": {"batch_size": 96},
    "explorer": {
        "rollout_model": {"engine_num": 2},
        "auxiliary_models": [{"engine_num": 1, "tensor_parallel_size": 2}],
    },
    "trainer": {"trainer_strategy": "fsdp2", "max_token_len_per_gpu": 4096, "ulysses_sequence_parallel_size": 2},
}


def translated(**blocks: Any) -> Translation:
    document = {name: {**block, **blocks.pop(name, {})} for name, block in GRPO.items()} | blocks
    setup = setup_of(yaml.safe_dump(document), name="grpo.yaml")
    (one,) = setup.complete_configurations
    return translate(one, setup, load_cluster("cluster_specs/a100-1x8.yaml"))


def test_the_trainer_has_what_the_explorer_leaves() -> None:
    found = translated()
    layout, job = found.layout, found.spec.job
    assert (found.spec.model.name, job.seq_len) == ("Qwen/Qwen3-1.7B", 1024)
    assert found.spec.cluster.world_size == 8 - 2 - 2
    # 2 GPUs hold 2 * 4,096 tokens in samples of 1,024; 768 samples per step over two ranks.
    assert (layout.backend, layout.ulysses, layout.dp, layout.micro_batch_size) == ("fsdp2", 2, 2, 8)
    assert (layout.gradient_accumulation_steps, job.global_batch_size) == (48, 768)
    assert layout.recompute.granularity == "full"
    assert translated(mode="train").spec.cluster.world_size == 8


def test_a_micro_batch_may_be_said_in_the_words_of_verl() -> None:
    verl = {"actor_rollout_ref": {"actor": {"ppo_micro_batch_size_per_gpu": 4}}}
    found = translated(trainer={"use_dynamic_bsz": False, "trainer_config": verl}, algorithm={"algorithm_type": "dpo"})
    assert (found.layout.micro_batch_size, found.spec.job.stage) == (4, "dpo")


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"mode": "explore"}, "mode 'explore' is not predicted"),
        ({"algorithm": {"algorithm_type": "ppo"}}, "a critic"),
        ({"trainer": {"trainer_strategy": "megatron"}}, "trainer_strategy 'megatron'"),
        ({"trainer": {"use_dynamic_bsz": False}}, "a micro batch whose size is not said"),
        ({"model": {"lora_configs": [{"name": "lora"}]}}, "lora_configs a list is not predicted"),
        ({"explorer": {"rollout_model": {"engine_num": 8}}}, "none is left to train"),
        ({"buffer": {"batch_size": None}}, "a batch that is not said"),
    ],
)
def test_what_is_not_predicted_says_why(blocks: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        translated(**blocks)
