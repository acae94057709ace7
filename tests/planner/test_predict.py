"""Prediction of a single layout: run documents of the contract, what is refused, and what only gives a warning."""

from dataclasses import replace
from typing import Any

import pytest

from tests.engines.samples import DENSE, MIXED, VISION, layout_of, spec_of
from topoplan.errors import LayoutError, SpecError
from topoplan.layout.stages import parse_pipeline_layout
from topoplan.operators.flops import model_flops_per_step
from topoplan.planner.predict import predict
from topoplan.specs.gpu_profile import WIDEST, profile_of
from topoplan.specs.load import spec_from_document
from topoplan.specs.spec import Spec

GIB = 2**30


def spec_from(document: dict[str, Any]) -> Spec:
    spec = {key: value for key, value in document.items() if key not in ("id", "layout")}
    return spec_from_document(spec, where="test")


CONTRACT = {
    "id": "any",
    "cluster": {"gpu": "h100-sxm-80gb", "nodes": 4, "gpus_per_node": 8},
    "model": {"name": "Qwen/Qwen3-8B"},
    "job": {"seq_len": 4096, "global_batch_size": 64, "precision": "bf16", "finetuning": "full"},
    "layout": {"backend": "megatron", "tp": 4, "pp": 1, "micro_batch_size": 1},
}


def test_the_document_of_the_contract_is_predicted() -> None:
    plan = predict(spec_from(CONTRACT), CONTRACT["layout"])  # type: ignore[arg-type]
    assert plan.layout.dp == 8
    assert plan.layout.gradient_accumulation_steps == 8
    assert plan.layout.sequence_parallel
    assert plan.fits
    assert 20 * GIB < plan.memory.allocated_bytes < 60 * GIB
    assert 0.3 < plan.mfu < 0.6


def test_rates_follow_from_the_step_time() -> None:
    spec = spec_of(DENSE)
    plan = predict(spec, {"backend": "megatron", "tp": 2})
    tokens = 64 * 4096 / plan.time.step_s / 32
    assert plan.tokens_per_s_per_gpu == pytest.approx(tokens)
    rate = model_flops_per_step(spec.model, spec.job) / plan.time.step_s / 32
    assert plan.model_flops_per_s_per_gpu == pytest.approx(rate)
    assert plan.mfu == pytest.approx(rate / spec.cluster.gpu.bf16_flops)


def test_mfu_of_an_fp8_job_is_of_the_fp8_peak() -> None:
    spec = spec_of(DENSE, precision="fp8")
    plan = predict(spec, {"backend": "megatron", "tp": 2})
    assert spec.cluster.gpu.fp8_flops is not None
    assert plan.mfu == pytest.approx(plan.model_flops_per_s_per_gpu / spec.cluster.gpu.fp8_flops)


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 8192,
        "vocab_size": 32000,
        "hidden_act": "silu",
    },
    "gpt2": {
        "model_type": "gpt2",
        "num_hidden_layers": 8,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "intermediate_size": 8192,
        "vocab_size": 51200,
        "hidden_act": "gelu",
    },
    "moe": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 8,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 32000,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1024,
        "hidden_act": "silu",
    },
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("form", [{}, {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2, "recompute": "full"}])
def test_a_model_given_by_its_config_is_predicted(kind: str, form: dict[str, Any]) -> None:
    document = CONTRACT | {"model": {"config": CONFIGS[kind]}}
    plan = predict(spec_from(document), {"backend": "megatron", **form})
    assert plan.time.step_s > 0
    assert len(plan.memory.by_stage) == plan.layout.pp


def test_a_layout_that_does_not_fit_is_predicted_all_the_same() -> None:
    plan = predict(spec_of("Qwen/Qwen2.5-72B"), {"backend": "megatron"})
    assert not plan.fits
    assert plan.memory.device_bytes > plan.memory.capacity_bytes
    assert plan.time.step_s > 0


def test_layers_that_do_not_divide_are_spread_evenly() -> None:
    layout = predict(spec_of(DENSE), {"backend": "megatron", "pp": 8}).layout
    assert layout.pipeline_layout is not None
    sizes = [stage.count("t") for stage in parse_pipeline_layout(layout.pipeline_layout)]
    assert sum(sizes) == 36
    assert max(sizes) - min(sizes) <= 2


def test_a_completed_layout_gives_the_same_plan_as_its_short_form() -> None:
    spec = spec_of(MIXED)
    form = {
        "backend": "megatron",
        "tp": 2,
        "pp": 2,
        "ep": 4,
        "recompute": {"granularity": "selective", "modules": ["moe"]},
    }
    assert predict(spec, layout_of(spec, **form)) == predict(spec, form)


def test_a_layout_of_another_cluster_is_refused() -> None:
    layout = layout_of(spec_of(DENSE, nodes=4), tp=2)
    with pytest.raises(LayoutError, match=r"dp 16"):
        predict(spec_of(DENSE, nodes=2), layout)


@pytest.mark.parametrize(
    ("finetuning", "backend"), [("qlora", "megatron"), ("freeze", "megatron"), ("lora", "mca"), ("qlora", "mca")]
)
def test_other_ways_of_fine_tuning_are_refused_and_not_taken_for_full(finetuning: str, backend: str) -> None:
    with pytest.raises(SpecError, match=f"finetuning '{finetuning}' with backend {backend}"):
        predict(spec_of(DENSE, finetuning=finetuning), {"backend": backend})


def test_adapters_of_experts_are_a_warning_as_other_backends_have_none() -> None:
    lora = spec_of(MIXED, finetuning="lora", lora_target=["all"])
    assert "every expert has adapters of its own" in warnings_of(lora, backend="megatron", ep=8)
    attention = spec_of(MIXED, finetuning="lora", lora_target=["linear_qkv"])
    assert "adapters" not in warnings_of(attention, backend="megatron", ep=8)


def warnings_of(spec: Spec, **form: Any) -> str:
    return "\n".join(predict(spec, form).warnings)


def test_what_a_user_should_know_is_a_warning() -> None:
    assert warnings_of(spec_of(DENSE), backend="megatron", tp=2) == ""
    assert "over PCIe" in warnings_of(spec_of(DENSE, gpu="rtx4090-24gb"), backend="megatron", tp=2)
    assert "exceeds the model's" in warnings_of(spec_of(DENSE, seq_len=65_536), backend="megatron", tp=2)
    assert "assumes 1 image of 589,824 pixels per sequence" in warnings_of(spec_of(VISION), backend="megatron", tp=2)
    assert "does not support model_type 'gpt_oss'" in warnings_of(spec_of("openai/gpt-oss-20b"), tp=2, ep=8)


def test_how_experts_run_is_assumed_and_can_be_said() -> None:
    for form in ({"backend": "fsdp2"}, {"backend": "deepspeed", "zero_stage": 3}):
        assert "experts run one by one" in warnings_of(spec_of(MIXED), **form)
        assert "experts run in grouped products" in warnings_of(spec_of(MIXED, finetuning="lora"), **form)
        assert "experts" not in warnings_of(spec_of(MIXED), **form, experts_impl="grouped_mm")
        assert "experts" not in warnings_of(spec_of(DENSE), **form)
    assert "experts run" not in warnings_of(spec_of(MIXED), ep=4)


def test_experts_across_nodes_are_predicted_when_asked_for_with_a_warning() -> None:
    spec = spec_of(MIXED)
    assert "crosses nodes" in warnings_of(spec, ep=16)
    assert predict(spec, {"ep": 16}).time.parts_s["ep_comm"] > predict(spec, {"ep": 8}).time.parts_s["ep_comm"]
    assert "crosses nodes" not in warnings_of(spec, ep=8)
    assert "flex" in warnings_of(spec, ep=16, backend="megatron")
    for other in ({"backend": "mca"}, {"moe_token_dispatcher_type": "flex"}, {"ep": 8}):
        assert "flex" not in warnings_of(spec, **{"ep": 16, "backend": "megatron"} | other)


def test_dpo_holds_a_second_model_and_works_on_pairs() -> None:
    form = {"backend": "megatron", "tp": 2}
    alone, pairs = (predict(spec_of(DENSE, stage=stage), form) for stage in ("sft", "dpo"))
    (stage,) = pairs.memory.by_stage
    assert stage.parts_bytes["reference model"] == stage.parts_bytes["weights"]
    # Twice the tokens, and one more forward pass; the other costs of a step are unchanged.
    assert 2.0 < pairs.time.step_s / alone.time.step_s < 2.8
    assert pairs.time.parts_s["reference"] > 0.5 * alone.time.parts_s["gemm"]
    assert pairs.tokens_per_s_per_gpu < alone.tokens_per_s_per_gpu
    assert pairs.model_flops_per_s_per_gpu * pairs.time.step_s == pytest.approx(
        2 * alone.model_flops_per_s_per_gpu * alone.time.step_s
    )


def test_host_memory_that_offload_lacks_is_a_warning_and_no_fit() -> None:
    roomy, narrow = (spec_of(DENSE, cluster={"host_memory": size}) for size in ("2TiB", "16GiB"))
    form = {"backend": "megatron", "tp": 2, "optimizer_offload_fraction": 1.0}
    assert "host memory" not in warnings_of(roomy, **form)
    assert "host memory" in warnings_of(narrow, **form)
    assert not predict(narrow, form).fits


def test_prediction_is_pure() -> None:
    spec = spec_of(DENSE)
    first = predict(spec, {"tp": 2})
    predict(spec, {"tp": 4, "pp": 2})
    predict(replace(spec, job=replace(spec.job, seq_len=8192)), {"tp": 2})
    assert predict(spec, {"tp": 2}) == first


def test_a_plan_that_splits_data_alone_has_the_bands_of_its_own() -> None:
    spec = spec_of("Qwen/Qwen3-8B")
    profile, plan = profile_of(spec.cluster.gpu), predict(spec, {"backend": "fsdp2"})
    low, high = plan.time.band_s
    assert high / plan.time.step_s - 1 == pytest.approx(profile.sharded_time_band)
    assert 1 - low / plan.time.step_s == pytest.approx(profile.sharded_time_band)
    band_bytes = profile.sharded_memory_band * plan.memory.device_bytes
    assert plan.memory.margin_bytes == pytest.approx(band_bytes + profile.driver_bytes)


def test_experts_without_measured_runs_have_a_wider_band() -> None:
    profile = profile_of(spec_of(MIXED).cluster.gpu)
    plan = predict(spec_of(MIXED), {"backend": "fsdp2"})
    expected = min(2.0 * profile.sharded_time_band, WIDEST)
    assert plan.time.band_s[1] / plan.time.step_s - 1 == pytest.approx(expected)
    assert expected > profile.sharded_time_band


@pytest.mark.parametrize("finetuning", ["full", "freeze", "lora"])
@pytest.mark.parametrize(
    "form",
    [
        {"backend": "ddp"},
        {"backend": "deepspeed", "zero_stage": 2, "offload_optimizer": True},
        {"backend": "fsdp2", "ulysses": 2, "recompute": "full"},
    ],
)
def test_a_layout_that_splits_data_alone_is_predicted(form: dict[str, Any], finetuning: str) -> None:
    spec = spec_of("Qwen/Qwen3-4B", nodes=1, finetuning=finetuning)
    plan = predict(spec, form)
    assert all(getattr(plan.layout, key) == value for key, value in form.items() if key != "recompute")
    assert plan.layout.world_size == 8
    assert len(plan.memory.by_stage) == 1
    assert plan.memory.by_stage[0].moments
    assert (plan.memory.host_bytes > 0) is ("offload_optimizer" in form)
    tokens = 64 * 4096
    assert plan.tokens_per_s_per_gpu == pytest.approx(tokens / plan.time.step_s / 8)
    assert 0.05 < plan.mfu < 1
    assert predict(spec, plan.layout) == plan


def test_an_id_is_no_layout() -> None:
    with pytest.raises(
        LayoutError, match=r"layout: 'tp2-pp1' is not a layout; expected the layout of a plan, or its k"
    ):
        predict(spec_of(DENSE), "tp2-pp1")  # type: ignore[arg-type]
