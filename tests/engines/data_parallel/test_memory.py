"""Memory of a GPU under ddp, deepspeed and fsdp2: its parts, its peak, and what changes them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.data_parallel.samples import TINY, memory_of, sharded, small_spec
from tests.engines.samples import spec_of
from topoplan.engines.data_parallel.memory import layer_uses, tokens_of
from topoplan.engines.data_parallel.step import sharded_shard
from topoplan.engines.prediction import FREED, Memory
from topoplan.operators.finetuning import elements_of
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

GIB = 2**30
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    *(("deepspeed", {"zero_stage": stage}) for stage in (1, 2, 3)),
    ("fsdp2", {}),
]
EACH_WAY = pytest.mark.parametrize(("backend", "form"), WAYS)
FINETUNINGS = st.sampled_from(["full", "freeze", "lora"])


def moments(memory: Memory) -> dict[str, float]:
    return {moment.name: moment.total_bytes for moment in memory.by_stage[0].moments}


@EACH_WAY
@given(finetuning=FINETUNINGS, micro_batch=st.sampled_from([1, 2, 4]))
def test_checkpointing_never_needs_more(backend: str, form: dict[str, Any], finetuning: str, micro_batch: int) -> None:
    spec = small_spec(finetuning=finetuning)
    without = memory_of(spec, backend, micro_batch_size=micro_batch, **form)
    checkpointed = memory_of(spec, backend, micro_batch_size=micro_batch, recompute="full", **form)
    assert checkpointed.device_bytes <= without.device_bytes


def test_the_layer_whose_backward_comes_last_still_has_its_own_activations() -> None:
    # 72B with its last two layers trained: what DDP reduces is larger than the activations of both layers.
    spec = spec_of("Qwen/Qwen2.5-72B", nodes=1, finetuning="freeze", global_batch_size=8)
    without, checkpointed = (memory_of(spec, "ddp", recompute=mode) for mode in ("none", "full"))
    assert checkpointed.device_bytes <= without.device_bytes


def test_a_trained_vision_tower_is_counted_once_when_the_last_layer_goes_back() -> None:
    spec = spec_of("Qwen/Qwen3-VL-8B-Instruct", nodes=1, freeze_vision_tower=False)
    memory = memory_of(spec, "fsdp2")
    (freed,) = (
        size
        for moment in memory.by_stage[0].moments
        if moment.name == "last layer's backward"
        for name, size in moment.terms_bytes
        if name == FREED
    )
    parts = memory.by_stage[0].parts_bytes
    assert parts["vision activations"] > 0
    assert freed == pytest.approx(-parts["activations"] * 35 / 36)


@EACH_WAY
@given(finetuning=FINETUNINGS, recompute=st.sampled_from(["none", "full"]))
def test_a_larger_micro_batch_needs_more(backend: str, form: dict[str, Any], finetuning: str, recompute: str) -> None:
    spec = small_spec(finetuning=finetuning)
    sizes = [
        memory_of(spec, backend, micro_batch_size=count, recompute=recompute, **form).device_bytes
        for count in (1, 2, 4)
    ]
    assert sizes[0] < sizes[1] < sizes[2]


@pytest.mark.parametrize(("backend", "form"), [("deepspeed", {"zero_stage": 3}), ("fsdp2", {})])
@given(nodes=st.integers(1, 8), finetuning=FINETUNINGS)
def test_more_ranks_never_need_more_where_everything_is_sharded(
    backend: str, form: dict[str, Any], nodes: int, finetuning: str
) -> None:
    few, many = (
        memory_of(spec_of(nodes=count, finetuning=finetuning, global_batch_size=8 * count * 4), backend, **form)
        for count in (nodes, 2 * nodes)
    )
    assert many.allocated_bytes <= few.allocated_bytes


@EACH_WAY
def test_parts_are_all_that_is_allocated_and_the_peak_is_the_worst_moment(backend: str, form: dict[str, Any]) -> None:
    memory = memory_of(small_spec(), backend, **form)
    stage = memory.by_stage[0]
    assert sum(stage.parts_bytes.values()) == memory.allocated_bytes == stage.allocated_bytes
    name, worst = max(moments(memory).items(), key=lambda moment: moment[1])
    assert stage.parts_bytes[f"peak ({name})"] == worst
    assert memory.allocated_bytes < memory.reserved_bytes < memory.device_bytes


def test_checkpointing_keeps_the_inputs_of_the_layers() -> None:
    spec = small_spec()  # 36 layers, 2560 wide, one sequence of 4096
    kept = memory_of(spec, "fsdp2", recompute="full").by_stage[0].parts_bytes["activations"]
    assert kept == 36 * 4096 * 2560 * 2


def test_the_residual_of_ddp_is_in_fp32_unless_all_is_in_bf16() -> None:
    kept = {
        pure: memory_of(small_spec(pure_bf16=pure), "ddp", recompute="full").by_stage[0].parts_bytes["activations"]
        for pure in (False, True)
    }
    assert kept == {False: 36 * 4096 * 2560 * 4, True: 36 * 4096 * 2560 * 2}


def test_frozen_layers_before_the_first_trained_one_keep_nothing() -> None:
    spec = small_spec(finetuning="freeze", freeze_trainable_layers=3)
    kept = memory_of(spec, "fsdp2", recompute="full").by_stage[0].parts_bytes["activations"]
    assert kept == 3 * 4096 * 2560 * 2


def uses_of(spec: Spec, backend: str, **form: Any) -> list[tuple[bool, int]]:
    uses = layer_uses(case_of(spec, backend), sharded(spec, backend, **form), 4096, 4096)
    return [(use.trains_weights, count) for _, use, count in uses]


def test_backward_goes_through_all_layers_behind_the_first_trained_one() -> None:
    assert uses_of(small_spec(), "fsdp2") == [(True, 36)]
    assert uses_of(small_spec(finetuning="freeze", freeze_trainable_layers=3), "fsdp2") == [(True, 3)]
    assert uses_of(small_spec(finetuning="freeze", freeze_trainable_layers=-3), "fsdp2") == [(True, 3), (False, 33)]
    assert uses_of(small_spec(finetuning="lora"), "fsdp2") == [(False, 36)]


def test_only_whole_fine_tuning_with_ddp_has_an_fp32_residual() -> None:
    def first(backend: str, **job: Any) -> tuple[bool, int]:
        spec = small_spec(**job)
        use = layer_uses(case_of(spec, backend), sharded(spec, backend), 4096, 4096)[0][1]
        return use.fp32_weights, use.residual_bytes

    assert first("ddp") == (True, 4)
    assert first("ddp", finetuning="freeze") == (True, 2)
    assert first("ddp", finetuning="lora") == (False, 2)
    assert first("ddp", pure_bf16=True) == (False, 2)
    assert first("fsdp2") == (False, 2)


def test_logits_are_12_bytes_each_at_the_turn() -> None:
    small, large = (
        replace(small_spec(), model=replace(TINY, vocab_size=size, tie_word_embeddings=True))
        for size in (1000, 201_000)
    )
    loss = [moments(memory_of(spec, "deepspeed", zero_stage=3, recompute="full"))["loss"] for spec in (small, large)]
    # The larger table is gathered, and its gradient is kept too.
    assert loss[1] - loss[0] == pytest.approx(200_000 * 12 * 4096, rel=0.02)


def test_the_fused_loss_never_has_all_logits() -> None:
    spec = small_spec()
    logits = 12 * 4096 * spec.model.vocab_size
    whole, fused = (
        moments(memory_of(spec, "fsdp2", recompute="full", fused_linear_cross_entropy=on))["loss"]
        for on in (False, True)
    )
    assert whole > logits > 4 * (fused - 2 * 2 * spec.model.vocab_size * 2560)


def test_expandable_segments_leave_next_to_no_fragments() -> None:
    plain, expandable = (memory_of(small_spec(), "fsdp2", expandable_segments=on) for on in (False, True))
    assert plain.allocated_bytes == expandable.allocated_bytes
    assert expandable.reserved_bytes < 1.02 * expandable.allocated_bytes < plain.reserved_bytes


def test_ulysses_divides_the_activations_of_a_sequence() -> None:
    spec = small_spec(global_batch_size=8)
    kept = [memory_of(spec, "fsdp2", ulysses=ranks).by_stage[0].parts_bytes["activations"] for ranks in (1, 2, 4)]
    assert kept == [kept[0], kept[0] / 2, kept[0] / 4]


@EACH_WAY
def test_host_memory_of_a_node_is_that_of_its_processes(backend: str, form: dict[str, Any]) -> None:
    offload = {"ddp": {}, "deepspeed": {"offload_optimizer": True}, "fsdp2": {"offload": True}}[backend]
    memory = memory_of(small_spec(nodes=2), backend, **form, **offload)
    assert memory.host_bytes == 8 * memory.by_stage[0].host_bytes
    assert (memory.host_bytes > 0) is bool(offload)


def test_a_preference_pair_is_two_sequences() -> None:
    sft, dpo = small_spec(), small_spec(stage="dpo")
    pairs, singles = (tokens_of(case_of(spec, "fsdp2"), sharded(spec, "fsdp2")) for spec in (dpo, sft))
    assert pairs == 2 * singles == 2 * 4096


def test_time_and_memory_speak_of_the_same_tokens() -> None:
    spec = small_spec(packing=True, global_batch_size=16)
    layout = sharded(spec, "fsdp2", ulysses=2, micro_batch_size=2)
    case = case_of(spec, layout.backend)
    assert sharded_shard(case, layout).tokens == tokens_of(case, layout) == 4096


def test_copies_of_weights_are_there_in_forward_and_with_checkpointing_of_one_layer_in_backward() -> None:
    spec = small_spec()
    plain, again = (memory_of(spec, "ddp", recompute=recompute) for recompute in ("none", "full"))
    parameters = elements_of(spec.model, spec.job).trained
    for memory in (plain, again):
        copies = dict(part for moment in memory.by_stage[0].moments for part in moment.terms_bytes)
        assert copies["16-bit copies of weights"] == 2 * parameters

    def gathered(memory: Memory) -> float:
        last = next(moment for moment in memory.by_stage[0].moments if moment.name == "first layer's backward")
        return dict(last.terms_bytes)["gathered weights"]

    assert gathered(plain) == 2 * parameters
    # One of 36 layers, and the output layer.
    assert gathered(again) < 0.2 * gathered(plain)


def test_trinity_has_its_logits_in_16_bits_and_more_during_the_optimizer_step() -> None:
    spec = small_spec(global_batch_size=32)
    usual = memory_of(spec, "fsdp2", recompute="full", grad_reduce_in_fp32=True)
    trinity = memory_of(replace(spec, trainer="trinity"), "fsdp2", recompute="full", grad_reduce_in_fp32=True)
    logits = 4096 * spec.model.vocab_size
    assert moments(usual)["loss"] - moments(trinity)["loss"] == pytest.approx(4 * logits)
    parameters = elements_of(spec.model, spec.job).trained
    assert moments(trinity)["optimizer step"] - moments(usual)["optimizer step"] == pytest.approx(4 * parameters / 8)
    assert usual.by_stage[0].parts_bytes["weights"] == trinity.by_stage[0].parts_bytes["weights"]


@pytest.mark.parametrize(("bits", "saves"), [(4, False), (8, True)])
def test_newer_bitsandbytes_saves_no_input_of_a_4_bit_product(bits: int, saves: bool) -> None:
    def activations(**software: str) -> float:
        spec = small_spec(
            finetuning="qlora", quantization_bit=bits, lora_target=["q_proj"], cluster={"software": software}
        )
        return memory_of(spec, "ddp").by_stage[0].parts_bytes["activations"]

    assert activations(bitsandbytes="0.43.1") == activations()
    newer = activations(bitsandbytes="0.43.2")
    assert newer == activations() if saves else newer < activations()
