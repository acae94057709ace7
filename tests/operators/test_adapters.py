"""LoRA on Megatron-core: how many elements of which adapters a rank holds."""

import pytest

from tests.engines.samples import DENSE, MIXED
from topoplan.operators.adapters import Adapters, adapters_of
from topoplan.operators.params import adapter_parameters, replicated_elements
from topoplan.specs import known
from topoplan.specs.job import Job

ALL = Adapters(16, ("all",))


def test_a_job_without_adapters_has_none() -> None:
    job = Job(seq_len=4096, global_batch_size=64)
    assert adapters_of(job) is None
    with_them = Job(seq_len=4096, global_batch_size=64, finetuning="lora", lora_target=("linear_qkv",))
    assert adapters_of(with_them) == Adapters(8, ("linear_qkv",))


def test_targets_are_names_without_their_module() -> None:
    some = Adapters(8, ("linear_fc1",))
    assert some.on("experts.linear_fc1")
    assert some.on("linear_fc1")
    assert not some.on("linear_fc2")
    assert ALL.on("shared_experts.linear_fc2")


def test_qwen3_8b_has_as_many_as_its_sides_say() -> None:
    model = known.model(DENSE)
    # qkv 4096 -> 6144, proj 4096 -> 4096, fc1 4096 -> 24576, fc2 12288 -> 4096
    expected = 16 * (4096 + 6144 + 4096 + 4096 + 4096 + 24576 + 12288 + 4096)
    assert adapter_parameters(model, model.layers[0], ALL, 1, 1, 1).dense == expected


def test_linear_attention_has_one_beside_each_projection() -> None:
    model = known.model("Qwen/Qwen3-Next-80B-A3B-Instruct")
    # in_proj 2048 -> 12352 (q and k, v and z, beta and decay), out_proj 4096 -> 2048
    beside = Adapters(16, ("in_proj", "out_proj"))
    assert adapter_parameters(model, model.layers[0], beside, 1, 1, 1).dense == 16 * (2048 + 12352 + 4096 + 2048)


def test_the_side_that_tensor_parallel_splits_is_split_and_the_other_is_whole() -> None:
    model = known.model(DENSE)
    whole = 16 * (4096 + 4096 + 4096 + 4096)
    split = 16 * (6144 + 4096 + 24576 + 12288)
    assert replicated_elements(model, model.layers[0], ALL) == whole
    assert adapter_parameters(model, model.layers[0], ALL, 4, 1, 1).dense == whole + split // 4


def test_every_expert_has_its_own_in_the_experts_grid() -> None:
    model = known.model(MIXED)
    # 128 experts: fc1 2048 -> 1536, fc2 768 -> 2048
    one = 16 * (2048 + 1536 + 768 + 2048)
    assert adapter_parameters(model, model.layers[0], ALL, 1, 8, 1).expert == 128 // 8 * one
    attention_alone = Adapters(16, ("linear_qkv", "linear_proj"))
    assert adapter_parameters(model, model.layers[0], attention_alone, 1, 8, 1).expert == 0


@pytest.mark.parametrize("rank", [8, 64])
def test_elements_grow_with_the_rank(rank: int) -> None:
    model = known.model(DENSE)
    one = adapter_parameters(model, model.layers[0], Adapters(1, ("all",)), 2, 1, 1)
    assert adapter_parameters(model, model.layers[0], Adapters(rank, ("all",)), 2, 1, 1).dense == rank * one.dense
