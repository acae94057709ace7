"""How LLaMA-Factory's Megatron path interprets keys, and missing keys."""

from typing import Any

import pytest

from tests.lint.translating import translated
from topoplan.specs.cluster import Cluster


def test_what_is_left_out_is_as_the_adapter_has_it(h100s: Cluster) -> None:
    layout = translated(h100s, tensor_model_parallel_size=2).layout

    assert (layout.micro_batch_size, layout.gradient_accumulation_steps) == (8, 1)
    assert not layout.distributed_optimizer
    assert not layout.overlap_grad_reduce
    assert not layout.overlap_param_gather
    assert not layout.sequence_parallel
    assert layout.grad_reduce_in_fp32  # forced by bf16
    assert translated(h100s).spec.job.seq_len == 2048


@pytest.mark.parametrize(
    ("keys", "sequence_parallel"),
    [
        ({"tensor_model_parallel_size": 1, "sequence_parallel": True}, False),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, True),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}, True),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": '"false"'}, True),  # the trainer reads text as true
    ],
)
def test_sequence_parallel_is_what_the_adapter_makes_of_it(
    h100s: Cluster, keys: dict[str, Any], sequence_parallel: bool
) -> None:
    layout = translated(h100s, model_name_or_path="Qwen/Qwen3-30B-A3B", **keys).layout

    assert layout.sequence_parallel is sequence_parallel


def test_expert_tensor_parallel_follows_tp_unless_it_is_given(h100s: Cluster) -> None:
    moe = {"model_name_or_path": "Qwen/Qwen3-30B-A3B", "tensor_model_parallel_size": 4}

    assert translated(h100s, **moe).layout.etp == 4
    assert translated(h100s, **moe, expert_tensor_parallel_size=1).layout.etp == 1
    assert translated(h100s, tensor_model_parallel_size=4).layout.etp == 1  # no experts


@pytest.mark.parametrize(
    ("keys", "packing"),
    [
        ({}, False),
        ({"stage": "pt"}, True),
        ({"stage": "pt", "packing": False}, False),
        ({"packing": True}, True),
        ({"neat_packing": True}, True),
        ({"sequence_packing": True}, True),
    ],
)
def test_packing_is_the_default_of_stage_pt_alone(h100s: Cluster, keys: dict[str, Any], packing: bool) -> None:
    job = translated(h100s, **keys).spec.job

    assert job.packing is packing
    assert job.keeps_samples_apart is ("neat_packing" in keys or "sequence_packing" in keys)


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        ({}, "bf16"),
        ({"bf16": False, "fp16": True}, "fp16"),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, "fp8"),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "mxfp8"),
    ],
)
def test_precisions(h100s: Cluster, keys: dict[str, Any], precision: str) -> None:
    assert translated(h100s, **keys).spec.job.precision == precision


def test_towers_are_frozen_by_default(h100s: Cluster) -> None:
    vision = translated(h100s, model_name_or_path="Qwen/Qwen3-VL-8B-Instruct").spec.job
    assert (vision.freeze_vision_tower, vision.freeze_multi_modal_projector) == (True, True)
    assert not translated(
        h100s, model_name_or_path="Qwen/Qwen3-VL-8B-Instruct", stage="pt"
    ).spec.job.freeze_vision_tower


def test_samples_are_at_most_those_of_all_data_sets(h100s: Cluster) -> None:
    assert translated(h100s, dataset="a, b", max_samples=100).spec.job.samples == 200
    assert translated(h100s, dataset="a").spec.job.samples is None
    assert translated(h100s, dataset="a", max_samples=100, packing=True).spec.job.samples is None
