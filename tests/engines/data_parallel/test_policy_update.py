"""Memory of a policy update: what each switch takes off, and the terms by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.layout.clusters import cluster_of
from topoplan.catalog import model
from topoplan.engines.data_parallel.policy_update import (
    LOGITS_AT_PEAK,
    STEP_BYTES,
    PolicyUpdate,
    UpdateMemory,
    update_memory,
)
from topoplan.operators.params import parameter_count
from topoplan.specs.gpu_profile import profile_of

A100 = cluster_of("a100-sxm-80gb", nodes=1)
PLAIN = PolicyUpdate(gpus=4, max_model_len=20480)
LOGITS = "gradient of the logits"


def memory(update: PolicyUpdate, name: str = "Qwen3-1.7B") -> UpdateMemory:
    return update_memory(model(name), A100, profile_of(A100.gpu), update)


def test_a_micro_batch_has_two_of_the_longest_sequences_and_ulysses_divides_them() -> None:
    assert PLAIN.tokens == 2 * 20480
    assert replace(PLAIN, ulysses=4).tokens == 20480 // 2
    assert replace(PLAIN, max_model_len=4097, ulysses=4).tokens == 2049


def test_ulysses_divides_everything_that_grows_with_the_context() -> None:
    def growth(ulysses: int) -> float:
        longer = replace(PLAIN, max_model_len=2 * PLAIN.max_model_len, ulysses=ulysses)
        return memory(longer).moments_bytes[LOGITS] - memory(replace(PLAIN, ulysses=ulysses)).moments_bytes[LOGITS]

    assert growth(2) == pytest.approx(growth(1) / 2)
    assert growth(4) == pytest.approx(growth(1) / 4)


def test_a_token_costs_four_copies_of_its_logits_the_layers_inputs_and_the_last_norm() -> None:
    qwen = model("Qwen3-1.7B")
    longer = replace(PLAIN, max_model_len=PLAIN.max_model_len + 1)
    a_token = (memory(longer).moments_bytes[LOGITS] - memory(PLAIN).moments_bytes[LOGITS]) / 2
    assert a_token == pytest.approx(LOGITS_AT_PEAK * 2 * 151936 + 2 * 2048 * 28 + 8 * 2048)
    assert qwen.vocab_size == 151936


def test_states_are_sixteen_bytes_a_parameter_over_all_gpus_and_none_with_offload() -> None:
    count = parameter_count(model("Qwen3-1.7B"))
    here = memory(PLAIN)
    there = memory(replace(PLAIN, offload=True))
    assert here.moments_bytes[LOGITS] - there.moments_bytes[LOGITS] == pytest.approx(16 * count / 4)
    assert here.host_bytes == 0
    assert there.host_bytes == pytest.approx(16 * count / 4)
    assert there.moments_bytes["optimizer step"] == 0


def test_ranks_of_one_ulysses_group_hold_different_shards() -> None:
    one, two = (memory(replace(PLAIN, ulysses=degree)).moments_bytes["optimizer step"] for degree in (1, 2))
    assert one == two == STEP_BYTES * parameter_count(model("Qwen3-1.7B")) / 4


def test_the_optimizer_step_is_the_peak_of_a_large_model_at_a_short_context() -> None:
    assert memory(PolicyUpdate(gpus=2, max_model_len=2048), "Qwen3-8B").peak == "optimizer step"
    assert memory(PLAIN, "Qwen3-8B").peak == LOGITS


def test_a_checkpoint_on_one_gpu_has_two_copies_of_the_model_tied_weights_twice() -> None:
    qwen = model("Qwen3-4B")
    alone = memory(PolicyUpdate(gpus=1, max_model_len=4096), "Qwen3-4B").moments_bytes["checkpoint"]
    assert alone == pytest.approx(12 * parameter_count(qwen) + 8 * (parameter_count(qwen) + 151936 * 2560))
    two = memory(PolicyUpdate(gpus=2, max_model_len=4096), "Qwen3-4B").moments_bytes["checkpoint"]
    assert two == pytest.approx(6 * parameter_count(qwen))


def test_without_expandable_segments_one_block_of_the_logits_size_is_lost() -> None:
    plain, expandable = memory(PLAIN), memory(replace(PLAIN, expandable_segments=True))
    assert plain.stranded_bytes == pytest.approx(2 * 151936 * 40960)
    assert expandable.stranded_bytes == pytest.approx(0.01 * expandable.moments_bytes[expandable.peak])
    assert expandable.device_bytes < plain.device_bytes


def test_a_block_is_lost_only_where_the_logits_are_the_peak() -> None:
    step = memory(PolicyUpdate(gpus=2, max_model_len=512), "Qwen3-8B")
    assert step.peak == "optimizer step"
    assert step.stranded_bytes == pytest.approx(0.03 * step.moments_bytes["optimizer step"])


def test_a_small_vocabulary_leaves_the_peak_to_the_layers() -> None:
    small = memory(replace(PLAIN, offload=True, max_model_len=65536), "meta-llama/Llama-2-13b-hf")
    assert small.peak == "backward of a layer"


def test_each_further_group_takes_nccl_buffers() -> None:
    one, two, four = (memory(replace(PLAIN, ulysses=degree)).context_bytes for degree in (1, 2, 4))
    assert one < two < four
    assert memory(replace(PLAIN, gpus=1)).context_bytes < one


def test_the_driver_keeps_a_part_of_the_card() -> None:
    assert memory(PLAIN).capacity_bytes == 80 * 2**30 - profile_of(A100.gpu).driver_bytes


def test_it_fits_up_to_the_card() -> None:
    found = memory(PLAIN)
    assert found.fits == (found.device_bytes <= found.capacity_bytes)
    assert replace(found, capacity_bytes=found.device_bytes).fits
    assert not replace(found, capacity_bytes=found.device_bytes - 1).fits


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V2-Lite", "Qwen/Qwen3-Next-80B-A3B-Instruct"])
def test_models_of_other_kinds_grow_with_the_context_too(name: str) -> None:
    short, long = (memory(replace(PLAIN, max_model_len=tokens), name) for tokens in (4096, 8192))
    assert all(long.moments_bytes[key] >= size for key, size in short.moments_bytes.items())
    for moment in (LOGITS, "backward of a layer"):
        assert long.moments_bytes[moment] > short.moments_bytes[moment]
