"""How ms-swift's `megatron sft` interprets its keys."""

from typing import Any

import pytest

from tests.reading.setups import all_of, configuration
from topoplan.errors import SpecError
from topoplan.layout.layout import Recompute
from topoplan.lint.translate import Translation, translate
from topoplan.planner.predict import predict
from topoplan.reading.values import NotPredictedError
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


def test_megatron_sft_of_ms_swift_is_translated_with_its_own_defaults(h100s: Cluster) -> None:
    found = swift(h100s)

    assert found.layout.backend == "megatron"
    assert (found.layout.tp, found.layout.ep, found.layout.etp, found.layout.dp) == (2, 8, 1, 16)
    assert found.layout.gradient_accumulation_steps == 4
    assert found.layout.recompute == Recompute(granularity="selective", modules=("core_attn",))
    assert found.layout.distributed_optimizer
    assert not found.layout.overlap_grad_reduce
    assert found.layout.cross_entropy_fusion_impl == "native"
    assert found.spec.job.pin["backend"] == "megatron"
    assert predict(found.spec, found.layout).tokens_per_s_per_gpu > 0


@pytest.mark.parametrize(
    "line",
    [
        *("train_type: lora_llm", "use_megatron_fsdp: true", "torch_dtype: float32", "optimizer: dist_muon"),
        *("main_grads_dtype: bf16", "attention_backend: local", "decoder_first_pipeline_num_layers: 20"),
    ],
)
def test_what_is_not_predicted_of_ms_swift_is_named(h100s: Cluster, line: str) -> None:
    with pytest.raises(SpecError, match=line.partition(":")[0]):
        swift(h100s, f"{line}\n")


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (
            "use_precision_aware_optimizer: true\nmain_grads_dtype: bf16\nexp_avg_dtype: bf16\nexp_avg_sq_dtype: fp8\n",
            {"grad_reduce_in_fp32": False, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"},
        ),
        ("", {"attention_backend": "auto", "grad_reduce_in_fp32": True, "tp_comm_overlap": False}),
        ("padding_free: false\n", {"attention_backend": "flash"}),
        ("attention_backend: flash_3\ntp_comm_overlap: true\n", {"attention_backend": "auto", "tp_comm_overlap": True}),
        ("fp16: true\n", {"grad_reduce_in_fp32": False}),
        (
            "pipeline_model_parallel_size: 2\ndecoder_first_pipeline_num_layers: 25\n",
            {"pipeline_layout": "Et*25|t*23L"},
        ),
    ],
)
def test_keys_of_the_optimizer_and_of_stages_are_the_trainers(
    h100s: Cluster, lines: str, parts: dict[str, Any]
) -> None:
    layout = swift(h100s, lines).layout
    assert {key: getattr(layout, key) for key in parts} == parts


def test_adapters_are_those_of_the_command(h100s: Cluster) -> None:
    found = swift(h100s, "tuner_type: lora\nlora_rank: 32\ntarget_modules: linear_qkv linear_proj\n")
    job = found.spec.job
    assert (job.finetuning, job.lora_rank, job.lora_target) == ("lora", 32, ("linear_qkv", "linear_proj"))
    every = swift(h100s, "train_type: lora\n")
    assert every.spec.job.lora_target == ("all",)
    full, some, all_of_them = (predict(one.spec, one.layout) for one in (swift(h100s), found, every))
    assert some.memory.device_bytes < all_of_them.memory.device_bytes < full.memory.device_bytes
    assert some.time.step_s < all_of_them.time.step_s


def test_token_prediction_is_that_of_the_command(h100s: Cluster) -> None:
    assert swift(h100s, "tuner_type: lora\n").spec.job.mtp_num_layers == 0
    glm = "model: zai-org/GLM-4.5-Air\ntuner_type: lora\nmtp_num_layers: 1\n"
    one = configuration(MEGATRON_SFT.partition("\n")[2] + glm, trainer="swift-megatron", from_command=True)
    assert translate(one, all_of(one), h100s).spec.job.mtp_num_layers == 1


@pytest.mark.parametrize(
    "lines",
    [
        "tuner_type: lora\nmodules_to_save: output_layer",
        "tuner_type: lora\nfp8_format: e4m3",
        "tuner_type: lora\ntarget_modules: q_proj",
        "tuner_type: lora\nlora_bias: all",
        "adapters: somewhere",
    ],
)
def test_what_else_is_trained_beside_adapters_is_said_not_to_be_predicted(h100s: Cluster, lines: str) -> None:
    with pytest.raises(NotPredictedError):
        swift(h100s, f"{lines}\n")
