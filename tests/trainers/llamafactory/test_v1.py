"""LLaMA-Factory's new engine (USE_V1=1): the job and the layout that its keys describe."""

import pytest

from tests.reading.setups import setup_of
from topoplan.lint.translate import Translation, translate
from topoplan.planner.predict import predict
from topoplan.specs.load import load_cluster

FULL = """\
model: Qwen/Qwen3-8B
model_class: llm
kernel_config: {name: auto}
quant_config: null
dist_config: {name: fsdp2, dcp_path: null}
train_dataset: data/v1_sft_demo.yaml
micro_batch_size: 2
cutoff_len: 4096
"""
LORA = f"{FULL}peft_config: {{name: lora, r: 16, target_modules: [q_proj, v_proj]}}\n"


def translated(text: str) -> Translation:
    setup = setup_of(text, name="a.yaml")
    (one,) = setup.complete_configurations
    return translate(one, setup, load_cluster("cluster_specs/a100-1x8.yaml"))


def test_all_weights_on_fsdp2_are_fp32_and_reduced_in_fp32_after_each_micro_batch() -> None:
    found = translated(f"{FULL}global_batch_size: 64\n")
    layout, job = found.layout, found.spec.job
    assert (layout.backend, layout.dp, layout.micro_batch_size, layout.gradient_accumulation_steps) == (
        "fsdp2",
        8,
        2,
        4,
    )
    assert (layout.grad_reduce_in_fp32, layout.sync_each_batch, layout.recompute.granularity) == (True, True, "full")
    assert (job.seq_len, job.global_batch_size, job.finetuning, job.pure_bf16) == (4096, 64, "full", False)
    weights = predict(found.spec, layout).memory.by_stage[0].parts_bytes["weights"]
    assert weights == pytest.approx(4 * 8.19e9 / 8, rel=0.01)


@pytest.mark.parametrize(
    ("text", "finetuning", "frozen"),
    [(LORA, "lora", 2), (f"{LORA.replace('quant_config: null', 'quant_config: {name: bnb}')}", "qlora", 0.7)],
)
def test_adapters_leave_the_model_as_its_checkpoint_has_it(text: str, finetuning: str, frozen: float) -> None:
    found = translated(text)
    assert (found.spec.job.finetuning, found.spec.job.lora_rank) == (finetuning, 16)
    assert found.spec.job.lora_target == ("q_proj", "v_proj")
    weights = predict(found.spec, found.layout).memory.by_stage[0].parts_bytes["weights"]
    assert weights == pytest.approx(frozen * 8.19e9 / 8, rel=0.1)
