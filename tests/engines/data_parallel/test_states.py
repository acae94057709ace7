"""Weights, gradients and optimizer states of a GPU and its host under ddp, deepspeed and fsdp2."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.data_parallel.samples import TINY, TINY_ELEMENTS, TINY_LAYER_ELEMENTS, small_spec, states_of
from tests.engines.samples import spec_of
from topoplan.engines.data_parallel.states import ShardedStates, largest_layer, root_elements
from topoplan.operators.finetuning import elements_of
from topoplan.operators.params import parameter_count
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

WAYS: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    *(("deepspeed", {"zero_stage": stage}) for stage in (1, 2, 3)),
    ("fsdp2", {}),
]
FINETUNINGS = st.sampled_from(["full", "freeze", "lora"])


def kept_bytes(states: ShardedStates) -> float:
    return states.weights_bytes + states.gradients_bytes + states.optimizer_bytes


def tiny_spec(**job: Any) -> Spec:
    return replace(small_spec(**job), model=TINY)


def test_the_figure_of_the_zero_paper() -> None:
    # Rajbhandari et al. 2020, figure 1: 7.5e9 parameters, K = 12, 64 GPUs: 120, 31.4, 16.6 and 1.9 GB.
    spec = spec_of("meta-llama/Llama-2-7b-hf", nodes=8)
    scale = 7.5e9 / parameter_count(spec.model)
    found = [kept_bytes(states_of(spec, backend, **form)) * scale / 1e9 for backend, form in WAYS]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9, 1.9], rel=0.02)


@given(finetuning=FINETUNINGS, nodes=st.sampled_from([1, 2, 8]))
def test_each_stage_keeps_no_more_than_the_one_before(finetuning: str, nodes: int) -> None:
    spec = spec_of(nodes=nodes, finetuning=finetuning)
    stages = [kept_bytes(states_of(spec, backend, **form)) for backend, form in WAYS[1:4]]
    assert stages[0] >= stages[1] >= stages[2]


@given(
    way=st.sampled_from([*WAYS, ("fsdp2", {"sharding": "hybrid"})]), finetuning=FINETUNINGS, nodes=st.integers(1, 16)
)
def test_more_nodes_never_need_more_of_a_gpu(way: tuple[str, dict[str, Any]], finetuning: str, nodes: int) -> None:
    backend, form = way
    few = states_of(spec_of(nodes=nodes, finetuning=finetuning, global_batch_size=8 * nodes), backend, **form)
    many = states_of(spec_of(nodes=2 * nodes, finetuning=finetuning, global_batch_size=16 * nodes), backend, **form)
    assert kept_bytes(many) <= kept_bytes(few)
    assert many.host_bytes <= few.host_bytes


@given(finetuning=FINETUNINGS)
def test_fsdp2_offload_moves_all_that_is_kept_to_the_host(finetuning: str) -> None:
    spec = small_spec(finetuning=finetuning)
    on_card, on_host = states_of(spec, "fsdp2"), states_of(spec, "fsdp2", offload=True)
    assert kept_bytes(on_host) == on_card.host_bytes == 0
    assert on_host.host_bytes == kept_bytes(on_card)


@given(finetuning=FINETUNINGS, stage=st.sampled_from([1, 2, 3]))
def test_deepspeed_offload_loses_no_optimizer_state(finetuning: str, stage: int) -> None:
    spec = small_spec(finetuning=finetuning)
    on_card = states_of(spec, "deepspeed", zero_stage=stage)
    on_host = states_of(spec, "deepspeed", zero_stage=stage, offload_optimizer=True)
    assert on_host.optimizer_bytes == 0
    # fp32 gradients of the rank's own part are offloaded too, in one piece or in sub-groups.
    own = elements_of(spec.model, spec.job).trained / 8
    assert on_card.optimizer_bytes + 4 * own <= on_host.host_bytes <= on_card.optimizer_bytes + 6 * own
    assert on_host.weights_bytes == on_card.weights_bytes


def test_offloaded_parameters_are_the_shards() -> None:
    spec = small_spec()
    some = states_of(spec, "deepspeed", zero_stage=3, offload_optimizer=True)
    every = states_of(spec, "deepspeed", zero_stage=3, offload_optimizer=True, offload_param=True)
    assert every.weights_bytes == 0
    assert every.host_bytes - some.host_bytes == some.weights_bytes


def test_stages_of_a_model_counted_by_hand() -> None:
    spec = tiny_spec()
    states = states_of(spec, "deepspeed", zero_stage=2)
    assert states.weights_bytes == 2 * TINY_ELEMENTS
    assert states.gradients_bytes == 2 * TINY_ELEMENTS / 8
    assert states.optimizer_bytes == 12 * TINY_ELEMENTS / 8
    assert states.step_bytes == 6 * TINY_ELEMENTS / 8


# Measured with DeepSpeed 0.19.8 on two processes, by what torch's profiler counts: a step peaks 8 bytes for each
# element of a rank's part above weights and optimizer states in stages 1 and 2 (gradients of 2 among them), and 6 for
# each element of a sub-group in stage 3, beside gradients; a bucket is as large with 3% of the model trained.
def test_a_step_of_stage_1_starts_when_other_ranks_gradients_are_gone() -> None:
    first, second = (states_of(small_spec(), "deepspeed", zero_stage=stage) for stage in (1, 2))
    own = elements_of(small_spec().model, small_spec().job).trained / 8
    assert second.gradients_bytes + second.step_bytes == 8 * own
    # Before the step it reduces all gradients through two buckets, beside a second copy of its own part.
    assert first.step_bytes == max(8 * own - first.gradients_bytes, 2e9 + 2 * own)


def test_a_step_of_stage_3_takes_one_sub_group_at_a_time() -> None:
    spec = spec_of("Qwen/Qwen2.5-72B")
    assert elements_of(spec.model, spec.job).trained / 8 > 1e9
    assert states_of(spec, "deepspeed", zero_stage=3).step_bytes == 6e9


@pytest.mark.parametrize("stage", [1, 2])
def test_a_bucket_has_its_full_size_however_few_weights_are_trained(stage: int) -> None:
    few = states_of(small_spec(finetuning="lora", lora_rank=8), "deepspeed", zero_stage=stage)
    assert 1e9 <= few.layer_gradients_bytes < 1.2e9


def test_accumulated_gradients_are_in_a_second_partition_in_stage_2() -> None:
    once, twice = (tiny_spec(global_batch_size=size) for size in (8, 16))
    bytes_once, bytes_twice = (
        states_of(spec, "deepspeed", zero_stage=2).layer_gradients_bytes for spec in (once, twice)
    )
    assert bytes_twice - bytes_once == 2 * TINY_ELEMENTS / 8


def test_fsdp2_gathers_two_layers_and_the_output_layer() -> None:
    root = 1000 * 64
    assert root_elements(case_of(tiny_spec(), "fsdp2")) >= root
    assert largest_layer(TINY) == TINY_LAYER_ELEMENTS
    gathered = states_of(tiny_spec(), "fsdp2").gathered_bytes
    assert gathered == pytest.approx(2 * (2 * TINY_LAYER_ELEMENTS + root), abs=2 * 64)


def test_stage_3_gathers_no_more_than_it_may_have_live() -> None:
    assert states_of(tiny_spec(), "deepspeed", zero_stage=3).gathered_bytes == 2 * TINY_ELEMENTS
    assert states_of(spec_of(), "deepspeed", zero_stage=3).gathered_bytes == 2e9


def test_a_tied_embedding_belongs_to_the_last_unit() -> None:
    tied = replace(tiny_spec(), model=replace(TINY, tie_word_embeddings=True))
    assert root_elements(case_of(tied, "fsdp2")) == pytest.approx(1000 * 64, abs=64)


def test_adapters_cost_16_bytes_and_their_frozen_model_2_with_ddp() -> None:
    spec = small_spec(finetuning="lora", lora_rank=64)
    elements = elements_of(spec.model, spec.job)
    assert kept_bytes(states_of(spec, "ddp")) == 16 * elements.adapters + 2 * elements.frozen


def test_packed_weights_take_about_half_a_byte() -> None:
    whole, packed = small_spec(finetuning="lora"), small_spec(finetuning="qlora")
    elements = elements_of(packed.model, packed.job)
    saved = states_of(whole, "ddp").weights_bytes - states_of(packed, "ddp").weights_bytes
    assert saved == pytest.approx((2 - 4.127 / 8) * elements.quantised, rel=1e-3)


@pytest.mark.parametrize(("pure", "bytes_each"), [(False, 4), (True, 2)])
def test_buckets_of_ddp_have_the_type_of_the_gradients(pure: bool, bytes_each: int) -> None:
    assert states_of(tiny_spec(pure_bf16=pure), "ddp").layer_gradients_bytes == bytes_each * TINY_ELEMENTS


@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way))
def test_one_gpu_reduces_nothing_but_zero_makes_its_bucket(way: tuple[str, dict[str, Any]]) -> None:
    backend, form = way
    spec = small_spec(gpus_per_node=1, global_batch_size=1)
    bucket = 1e9 if form.get("zero_stage") in (1, 2) else 0
    assert states_of(spec, backend, **form).layer_gradients_bytes == pytest.approx(bucket, rel=0.8)


def test_dpo_keeps_a_reference_model_unless_adapters_can_be_switched_off() -> None:
    def extra(**job: Any) -> float:
        sft, dpo = small_spec(**job), small_spec(stage="dpo", **job)
        way = {"zero_stage": 3}
        return states_of(dpo, "deepspeed", **way).weights_bytes - states_of(sft, "deepspeed", **way).weights_bytes

    assert extra() == 2 * parameter_count(small_spec().model) / 8
    assert extra(finetuning="lora") == 0


@given(finetuning=FINETUNINGS, offload=st.booleans())
def test_fsdp2_keeps_whole_gradients_where_it_reduces_them_after_the_last_micro_batch(
    finetuning: str, offload: bool
) -> None:
    # Measured with PyTorch 2.15 on two processes: gradients of the whole model in bf16, and no sharded ones.
    spec = tiny_spec(finetuning=finetuning, global_batch_size=32)
    each, last = (states_of(spec, "fsdp2", offload=offload, sync_each_batch=on) for on in (True, False))
    assert last.gradients_bytes - each.gradients_bytes == 2 * elements_of(TINY, spec.job).trained
    once = replace(spec, job=replace(spec.job, global_batch_size=8))
    assert states_of(once, "fsdp2", sync_each_batch=False) == states_of(once, "fsdp2")


def test_gradients_on_their_way_are_larger_where_they_are_reduced_in_fp32() -> None:
    half, single = (states_of(tiny_spec(), "fsdp2", grad_reduce_in_fp32=on) for on in (False, True))
    assert single.layer_gradients_bytes == pytest.approx(half.layer_gradients_bytes * 6 / 4)
