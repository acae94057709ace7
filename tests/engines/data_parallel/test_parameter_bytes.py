"""Bytes per parameter under ddp, deepspeed and fsdp2, compared with the counts in the papers."""

from typing import Any

import pytest

from topoplan.engines.data_parallel.parameter_bytes import (
    NF4_BYTES,
    ParameterBytes,
    Shares,
    adapter_input_bytes,
    autocasts,
    moment_bytes,
    parameter_bytes,
    shards_of,
)
from topoplan.layout.layout import Layout
from topoplan.specs.job import Job


def job(**keys: Any) -> Job:
    return Job(seq_len=4096, global_batch_size=64, **keys)


def layout(backend: str, *, dp: int = 16, **keys: Any) -> Layout:
    return Layout.of(backend=backend, dp=dp, gradient_accumulation_steps=4, distributed_optimizer=False, **keys)


def of(backend: str, **keys: Any) -> ParameterBytes:
    return parameter_bytes(job(**keys), layout(backend, zero_stage=3 if backend == "deepspeed" else 0))


def trained(each: ParameterBytes) -> float:
    return each.trained + each.gradient + each.optimizer


@pytest.mark.parametrize("backend", ["ddp", "deepspeed", "fsdp2"])
def test_mixed_precision_adam_has_16_bytes_a_parameter(backend: str) -> None:
    # Rajbhandari et al. 2020, section 3.1.
    assert trained(of(backend)) == 16


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_pure_bf16_halves_everything(backend: str) -> None:
    assert trained(of(backend, pure_bf16=True)) == 8


@pytest.mark.parametrize("backend", ["ddp", "deepspeed", "fsdp2"])
def test_moments_of_8_bits_save_6_bytes(backend: str) -> None:
    assert trained(of(backend)) - trained(of(backend, optimizer="adamw_8bit")) == 6
    assert moment_bytes(job(optimizer="adamw_8bit")) == 2


def test_double_quantisation_takes_an_eighth_of_a_bit_for_its_constants() -> None:
    # Dettmers et al. 2023, section 3: from 0.5 bits per parameter down to 0.127.
    assert pytest.approx(0.127, abs=0.0005) == 8 * NF4_BYTES - 4
    assert of("ddp", finetuning="qlora").quantised == NF4_BYTES
    assert of("ddp", finetuning="qlora", quantization_bit=8).quantised == 1


@pytest.mark.parametrize(("backend", "frozen"), [("ddp", 2), ("deepspeed", 2), ("fsdp2", 4)])
def test_fsdp2_keeps_frozen_weights_in_fp32(backend: str, frozen: int) -> None:
    # accelerate 1.11, fsdp2_prepare_model: model.to(torch.float32) if the first parameter is not in fp32.
    assert of(backend, finetuning="lora").frozen == frozen


def test_without_mixed_precision_fsdp2_keeps_frozen_weights_as_loaded() -> None:
    assert of("fsdp2", finetuning="lora", pure_bf16=True).frozen == 2


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_adapters_are_in_fp32_even_with_pure_bf16(backend: str) -> None:
    assert trained(of(backend, finetuning="lora", pure_bf16=True)) == 16


@pytest.mark.parametrize(
    ("backend", "pure", "expected"),
    [
        *(("ddp", False, True), ("ddp", True, False), ("deepspeed", False, False)),
        *(("fsdp2", False, False), ("fsdp2", True, False)),
    ],
)
def test_only_ddp_computes_with_fp32_weights(backend: str, pure: bool, expected: bool) -> None:
    assert autocasts(job(pure_bf16=pure), layout(backend)) is expected


@pytest.mark.parametrize(
    ("backend", "pure", "expected"),
    [("ddp", False, 2), ("ddp", True, 4), ("deepspeed", False, 0), ("fsdp2", False, 0), ("fsdp2", True, 4)],
)
def test_an_adapter_of_another_type_copies_its_input(backend: str, pure: bool, expected: int) -> None:
    assert adapter_input_bytes(job(finetuning="lora", pure_bf16=pure), layout(backend)) == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"backend": "ddp"}, (1, 1, 1)),
        ({"backend": "deepspeed", "zero_stage": 1}, (1, 1, 16)),
        ({"backend": "deepspeed", "zero_stage": 2}, (1, 16, 16)),
        ({"backend": "deepspeed", "zero_stage": 3}, (16, 16, 16)),
        ({"backend": "fsdp2"}, (16, 16, 16)),
        ({"backend": "fsdp2", "sharding": "hybrid"}, (8, 8, 8)),
        ({"backend": "fsdp2", "sharding": "hybrid", "dp": 4}, (4, 4, 4)),
        ({"backend": "deepspeed", "zero_stage": 3, "dp": 4, "ulysses": 4}, (16, 16, 16)),
    ],
)
def test_over_how_many_ranks_weights_gradients_and_optimizer_are_divided(
    keys: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    weights, gradients, optimizer = expected
    found = shards_of(layout(**keys), gpus_per_node=8)
    assert found == Shares(weights=weights, gradients=gradients, optimizer=optimizer)
