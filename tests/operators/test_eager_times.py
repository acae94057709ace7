"""Seconds of a layer of a Hugging Face model: products, adapters, packed weights, elementwise kernels."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.samples import spec_of
from topoplan.engines.data_parallel.parameter_bytes import NF4_BYTES
from topoplan.network.placement import Group
from topoplan.operators.eager import LayerUse, eager_profile
from topoplan.operators.finetuning import layer_linears
from topoplan.operators.machine import Kernel
from topoplan.operators.op import PARTS
from topoplan.operators.shard import Shard
from topoplan.operators.times import LayerTime, eager_kernels, eager_time
from topoplan.specs import known
from topoplan.specs.gpu_profile import Profile, profile_of
from topoplan.trainers.case import case_of

MODELS = [
    *("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    "Qwen/Qwen1.5-MoE-A2.7B",
]
CLUSTER = spec_of(nodes=1).cluster


def arguments(name: str, *, tokens: int = 4096, **use: Any) -> tuple[Any, ...]:
    model = known.model(name)
    layer = model.layers[-1]
    if use.pop("adapts", False):
        names = frozenset(linear.name for linear in layer_linears(model, layer))
        use |= {"adapted": names, "trains_weights": False}
    usual = {"tokens": tokens, "seq_len": 4096, "trains_weights": True, "adapted": frozenset(), "fused": False}
    shard = Shard(tokens=tokens, seq_len=4096, tp=1, cp=1, ep=1, etp=1, sequence_parallel=False, precision="bf16")
    case = case_of(spec_of(name, nodes=1), "ddp")
    return case, layer, LayerUse(**usual | use), shard


def time(name: str, **keys: Any) -> LayerTime:
    return eager_time(*arguments(name, **keys))


def operators(name: str, **keys: Any) -> dict[str, Kernel]:
    return {operator.name: operator for operator in eager_kernels(*arguments(name, **keys))}


def total(found: LayerTime) -> float:
    return sum(found.forward_s) + sum(found.backward_s)


@pytest.mark.parametrize("name", MODELS)
def test_frozen_weights_have_no_gradient_and_cost_the_same_forward(name: str) -> None:
    trained, frozen = time(name), time(name, trains_weights=False)
    assert frozen.forward_s == trained.forward_s
    assert sum(frozen.backward_s) < sum(trained.backward_s)
    assert frozen.backward_kernels < trained.backward_kernels


@pytest.mark.parametrize("name", MODELS)
def test_adapters_cost_more_than_a_frozen_layer(name: str) -> None:
    frozen, adapters = time(name, trains_weights=False), time(name, adapts=True, lora_rank=8)
    assert total(adapters) > total(frozen)
    assert adapters.forward_kernels > frozen.forward_kernels


def test_a_frozen_dense_layer_has_half_the_products_in_backward() -> None:
    gemm = PARTS.index("gemm")
    trained, frozen = time("Qwen/Qwen3-8B"), time("Qwen/Qwen3-8B", trains_weights=False)
    assert frozen.backward_s[gemm] == pytest.approx(trained.backward_s[gemm] / 2, rel=0.05)
    assert frozen.backward_s[gemm] == pytest.approx(frozen.forward_s[gemm], rel=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_packed_weights_are_unpacked_before_every_product(name: str) -> None:
    plain = operators(name, trains_weights=False)
    packed = operators(name, trains_weights=False, packed_bytes=NF4_BYTES)
    extra = [packed[operator] for operator in packed.keys() - plain.keys()]
    assert all(operator.name.endswith("unpacked") for operator in extra)
    assert all(operator.forward_s == operator.backward_s > 0 for operator in extra)
    assert len(extra) >= 2


@pytest.mark.parametrize("name", MODELS)
def test_fused_kernels_are_faster_and_fewer(name: str) -> None:
    eager, fused = time(name), time(name, fused=True)
    assert total(fused) < total(eager)
    assert fused.forward_kernels < eager.forward_kernels


@pytest.mark.parametrize("name", MODELS)
@given(tokens=st.sampled_from([256, 512, 1024, 2048, 4096]))
def test_twice_the_tokens_take_longer_and_as_many_kernels(name: str, tokens: int) -> None:
    one, two = time(name, tokens=tokens), time(name, tokens=2 * tokens)
    assert total(one) < total(two)
    assert (one.forward_kernels, one.backward_kernels) == (two.forward_kernels, two.backward_kernels)


@pytest.mark.parametrize(("ranks", "share"), [(2, 1 / 2), (4, 3 / 4), (8, 7 / 8)])
def test_ulysses_sends_q_k_v_and_the_output_to_the_other_ranks(ranks: int, share: float) -> None:
    # q and the output with 32 heads of 128, k and v with 8; 2 bytes per element.
    found = operators("Qwen/Qwen3-8B", ulysses=ranks)["ulysses"]
    assert found.collective.group == Group(ranks, 1)
    sent = 2 * 4096 * (2 * 32 + 2 * 8) * 128
    assert found.collective.sent_bytes == sent
    assert found.forward_s >= share * sent / CLUSTER.nvlink_bytes_per_s


def test_eager_attention_is_no_faster_than_flash_attention_2() -> None:
    gpu = CLUSTER.gpu
    profile: Profile = profile_of(gpu)
    found = eager_profile(replace(profile, attention_forward_efficiency=0.9, attention_backward_efficiency=0.1), gpu)
    # 335 TFLOP/s on an H100.
    assert found.attention_forward_efficiency == pytest.approx(335e12 / gpu.fp16_flops)
    assert found.attention_backward_efficiency == 0.1


def test_the_products_of_a_dense_layer_take_at_least_their_flops() -> None:
    gpu, model = CLUSTER.gpu, known.model("Qwen/Qwen3-8B")
    products = sum(linear.elements for linear in layer_linears(model, model.layers[0]))
    found = [one for one in eager_kernels(*arguments("Qwen/Qwen3-8B")) if one.part == "gemm"]
    assert sum(one.forward_s for one in found) > 2 * 4096 * products / gpu.bf16_flops
    assert sum(one.backward_s for one in found) > 4 * 4096 * products / gpu.bf16_flops


@pytest.mark.parametrize("copied", [0, 4])
def test_dropout_of_adapters_takes_time_of_its_own(copied: int) -> None:
    without, dropped = (
        time("Qwen/Qwen3-8B", adapts=True, lora_rank=8, adapter_input_bytes=copied, adapter_dropout=on)
        for on in (False, True)
    )
    assert dropped.forward_kernels > without.forward_kernels
    assert sum(without.forward_s) < sum(dropped.forward_s) < 1.5 * sum(without.forward_s)
