"""ms-swift classifiers: the model's last layer has one output per label, and there are no logits."""

import pytest

from tests.reading.setups import setup_of
from topoplan.lint.translate import Translation, translate
from topoplan.operators.params import parameter_count
from topoplan.planner.predict import predict
from topoplan.specs.load import load_cluster

MODEL = "--model Qwen/Qwen2.5-7B-Instruct --dataset a --max_length 8192 --tuner_type full"
LABELS = "--task_type seq_cls --num_labels 265"


def translated(command: str) -> Translation:
    setup = setup_of(f"NPROC_PER_NODE=8 {command}\n")
    (one,) = setup.complete_configurations
    return translate(one, setup, load_cluster("cluster_specs/a100-1x8.yaml"))


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
