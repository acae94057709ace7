"""How ms-swift's `megatron sft` interprets its keys."""

from tests.reading.setups import all_of, configuration
from topoplan.lint.translate import Translation, translate
from topoplan.planner.predict import predict
from topoplan.specs.cluster import Cluster

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
