"""Seconds of a step under ddp, deepspeed and fsdp2: what each part consists of, and what changes it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.data_parallel.samples import sharded, small_spec, time_of
from tests.engines.samples import spec_of
from topoplan.engines.data_parallel.memory import layer_uses
from topoplan.engines.data_parallel.parameter_bytes import NF4_BYTES
from topoplan.engines.data_parallel.step import Passes, sharded_terms
from topoplan.engines.prediction import Time
from topoplan.layout.layout import Layout
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

WAYS: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    *(("deepspeed", {"zero_stage": stage}) for stage in (1, 2, 3)),
    ("fsdp2", {}),
]
EACH_WAY = pytest.mark.parametrize(("backend", "form"), WAYS)
FINETUNINGS = st.sampled_from(["full", "freeze", "lora"])
LARGE = "Qwen/Qwen3-8B"
SLOW_NETWORK = {"ib_bandwidth": "25Gb/s", "nvlink_bandwidth": "450GB/s"}


def comm(time: Time) -> float:
    return time.parts_s.get("dp_comm", 0.0)


@EACH_WAY
@given(finetuning=FINETUNINGS, micro_batch=st.sampled_from([1, 2]), recompute=st.sampled_from(["none", "full"]))
def test_parts_are_the_step_and_the_band_is_around_it(
    backend: str, form: dict[str, Any], finetuning: str, micro_batch: int, recompute: str
) -> None:
    keys = {"micro_batch_size": micro_batch, "recompute": recompute}
    time = time_of(small_spec(finetuning=finetuning), backend, **keys, **form)
    assert sum(time.parts_s.values()) == pytest.approx(time.step_s)
    assert min(time.parts_s.values()) > 0
    assert time.band_s[0] < time.step_s < time.band_s[1]


@EACH_WAY
def test_checkpointing_repeats_the_forward_of_the_layers(backend: str, form: dict[str, Any]) -> None:
    spec = small_spec()
    without, again = time_of(spec, backend, **form), time_of(spec, backend, recompute="full", **form)
    assert "recompute" not in without.parts_s
    work = sum(without.parts_s[part] for part in ("gemm", "attention", "elementwise") if part in without.parts_s)
    # Forward is a third of the products, and slightly more of the memory-bound work.
    assert 0.25 * work < again.parts_s["recompute"] < 0.45 * work
    assert again.step_s > without.step_s


@EACH_WAY
def test_one_gpu_has_no_communication(backend: str, form: dict[str, Any]) -> None:
    assert comm(time_of(small_spec(gpus_per_node=1, global_batch_size=4), backend, **form)) == 0


def test_stages_send_as_much_and_the_third_half_as_much_again() -> None:
    # ZeRO, section 7: 2, 2 and 3 times the model; one micro-batch, between nodes, so that bytes dominate.
    spec = spec_of(LARGE, nodes=2, global_batch_size=16, cluster=SLOW_NETWORK)
    first, second, third = (comm(time_of(spec, "deepspeed", zero_stage=stage)) for stage in (1, 2, 3))
    assert first == pytest.approx(second)
    assert 1.3 < third / first < 1.7


def test_stage_1_reduces_once_a_step_and_stage_2_every_micro_batch() -> None:
    def spec(batch: int) -> Any:
        return spec_of(LARGE, nodes=2, global_batch_size=batch, cluster=SLOW_NETWORK)

    one, four = spec(16), spec(64)
    first = comm(time_of(four, "deepspeed", zero_stage=1)) / comm(time_of(one, "deepspeed", zero_stage=1))
    second = comm(time_of(four, "deepspeed", zero_stage=2)) / comm(time_of(one, "deepspeed", zero_stage=2))
    assert first == pytest.approx(1)
    assert 2 < second < 4


def test_hybrid_sharding_keeps_the_gathering_off_the_network() -> None:
    spec = spec_of(LARGE, nodes=4, cluster=SLOW_NETWORK)
    hybrid, full = (comm(time_of(spec, "fsdp2", sharding=sharding)) for sharding in ("hybrid", "full"))
    # Full: all weights to every node, twice in 16 bits, and fp32 gradients back. Hybrid: an all-reduce of fp32
    # gradients, twice the volume of a reduce-scatter; slightly more of either is hidden.
    assert 0.6 < hybrid / full < 1


@pytest.mark.parametrize(("backend", "form"), WAYS)
def test_adapters_reduce_next_to_nothing(backend: str, form: dict[str, Any]) -> None:
    full, lora = spec_of(LARGE, nodes=2), spec_of(LARGE, nodes=2, finetuning="lora")
    few, many = comm(time_of(lora, backend, **form)), comm(time_of(full, backend, **form))
    assert few < many
    if backend == "ddp" or form.get("zero_stage") in (1, 2):
        assert few < 0.05 * many


@pytest.mark.parametrize(
    ("backend", "form", "offload"),
    [
        ("deepspeed", {"zero_stage": 2}, {"offload_optimizer": True}),
        ("deepspeed", {"zero_stage": 3}, {"offload_optimizer": True, "offload_param": True}),
        ("fsdp2", {}, {"offload": True}),
    ],
)
def test_offload_is_slower(backend: str, form: dict[str, Any], offload: dict[str, Any]) -> None:
    spec = spec_of(LARGE, nodes=1)
    assert time_of(spec, backend, **form, **offload).step_s > time_of(spec, backend, **form).step_s


def test_more_memory_channels_do_not_help_an_optimizer_that_is_not_there() -> None:
    full, lora = (time_of(small_spec(finetuning=kind), "fsdp2", offload=True) for kind in ("full", "lora"))
    assert lora.parts_s["optimizer"] < 0.1 * full.parts_s["optimizer"]


@EACH_WAY
@given(batches=st.integers(1, 8))
def test_work_grows_with_the_number_of_micro_batches(backend: str, form: dict[str, Any], batches: int) -> None:
    one = time_of(small_spec(global_batch_size=8), backend, **form)
    many = time_of(small_spec(global_batch_size=8 * batches), backend, **form)
    assert many.parts_s["gemm"] == pytest.approx(batches * one.parts_s["gemm"])
    assert many.parts_s["optimizer"] == one.parts_s["optimizer"]


@pytest.mark.parametrize("count", [2, 18, 36])
def test_frozen_layers_before_the_trained_ones_have_a_forward_alone(count: int) -> None:
    def work(**job: Any) -> float:
        parts = time_of(small_spec(**job), "fsdp2").parts_s
        return parts["gemm"] + parts["elementwise"] + parts["attention"]

    full, some = work(), work(finetuning="freeze", freeze_trainable_layers=count)
    # A forward is between a fourth and a half of forward plus backward.
    share = count / 36
    assert full * (share + (1 - share) / 4) <= some * 1.0001
    assert some <= full * (share + (1 - share) / 2) * 1.0001


def test_training_the_first_layers_takes_longer_than_training_the_last() -> None:
    first, last = (small_spec(finetuning="freeze", freeze_trainable_layers=count) for count in (-4, 4))
    assert time_of(first, "fsdp2").step_s > time_of(last, "fsdp2").step_s


def test_a_preference_pair_runs_the_reference_model_too() -> None:
    sft, dpo = (time_of(small_spec(stage=stage), "fsdp2") for stage in ("sft", "dpo"))
    assert "reference" not in sft.parts_s
    assert dpo.parts_s["reference"] > 0
    assert dpo.parts_s["gemm"] == pytest.approx(2 * sft.parts_s["gemm"], rel=0.1)


def test_a_short_sequence_of_a_small_model_waits_for_the_host() -> None:
    short, long = (
        time_of(spec_of("Qwen/Qwen3-0.6B", nodes=1, seq_len=size, finetuning="lora"), "ddp") for size in (64, 4096)
    )
    assert short.parts_s["host launches"] > 0.2 * short.step_s
    assert "host launches" not in long.parts_s


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({}, (0, 0.0)),
        ({"finetuning": "lora"}, (8, 0.0)),
        ({"finetuning": "lora", "lora_rank": 32}, (32, 0.0)),
        ({"finetuning": "qlora"}, (8, NF4_BYTES)),
        ({"finetuning": "qlora", "quantization_bit": 8}, (8, 1.0)),
    ],
)
def test_what_adapters_and_packing_add_to_a_layer(job: dict[str, Any], expected: tuple[int, float]) -> None:
    spec = small_spec(**job)
    ((_, use, _),) = layer_uses(case_of(spec, "ddp"), sharded(spec, "ddp"), 1, 1)
    assert (use.lora_rank, use.packed_bytes) == expected


def test_images_take_time_as_they_do_elsewhere() -> None:
    frozen, trained = (spec_of("Qwen/Qwen3-VL-8B-Instruct", nodes=1, freeze_vision_tower=it) for it in (True, False))
    layout = Layout.of(backend="fsdp2", dp=8, gradient_accumulation_steps=8, distributed_optimizer=False)

    def passes(spec: Spec) -> Passes:
        return sharded_terms(case_of(spec, layout.backend), layout).passes

    ahead, back = passes(frozen).vision_s
    assert ahead > 0.0
    assert back == 0.0
    assert passes(trained).vision_s == pytest.approx((ahead, 2 * ahead))
    blind = replace(frozen, model=replace(frozen.model, vision=None))
    assert passes(blind).vision_s == (0.0, 0.0)
    assert passes(frozen).forward_s - passes(blind).forward_s == pytest.approx(ahead)
    many = replace(frozen, job=replace(frozen.job, images_per_sequence=4))
    assert passes(many).vision_s[0] > 3 * ahead


def test_fsdp2_sends_gradients_as_often_and_as_wide_as_it_is_told() -> None:
    spec = spec_of(LARGE, nodes=2, global_batch_size=64, cluster=SLOW_NETWORK)
    case = case_of(spec, "fsdp2")

    def sent(**keys: Any) -> float:
        found = sharded_terms(case, sharded(spec, "fsdp2", **keys))
        sendings = [one for one in found.communication.sendings if one.call.kind == "reduce-scatter"]
        return sum(one.seconds * (found.count if one.when == "backward" else 1) for one in sendings)

    assert sent() == pytest.approx(2 * sent(grad_reduce_in_fp32=False), rel=0.1)
    assert sent() == pytest.approx(4 * sent(sync_each_batch=False))
