"""LLaMA-Factory with Megatron Bridge: the meaning of its keys."""

import pytest

from tests.reading.setups import setup_of
from topoplan.errors import InputError
from topoplan.lint.translate import Translation, translate
from topoplan.specs.load import load_cluster

TRAIN = """\
model_name_or_path: Qwen/Qwen3-8B
stage: sft
finetuning_type: {method}
cutoff_len: 4096
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
tensor_model_parallel_size: 2
sequence_parallel: true
use_packed_sequences: true
{more}
"""


def translated(method: str = "full", more: str = "") -> Translation:
    script = "export USE_MEGATRON_BRIDGE=1\nllamafactory-cli train train.yaml\n"
    setup = setup_of(script, train_yaml=TRAIN.format(method=method, more=more))
    (one,) = setup.complete_configurations
    return translate(one, setup, load_cluster("cluster_specs/a100-1x8.yaml"))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_keys_are_a_layout_of_megatron(method: str) -> None:
    found = translated(method)
    layout, job = found.layout, found.spec.job
    assert (layout.backend, layout.tp, layout.dp, layout.micro_batch_size) == ("megatron", 2, 4, 2)
    # Enabled by default, unlike in Megatron itself.
    assert (layout.distributed_optimizer, layout.overlap_grad_reduce, layout.grad_reduce_in_fp32) == (True, True, True)
    assert (job.finetuning, job.global_batch_size, job.packing) == (method, 32, True)


@pytest.mark.parametrize("more", ["quantization_bit: 4", "mixed_precision: fp16_mixed", "extra_config: '{}'"])
def test_what_is_not_predicted_says_so(more: str) -> None:
    with pytest.raises(InputError, match="is not predicted"):
        translated(more=more)
