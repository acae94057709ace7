"""Warnings about surprising behavior of LLaMA-Factory."""

from dataclasses import replace
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, QWEN3_8B, V100, make_spec_and_plan
from topoplan.trainers.llamafactory.plain_warnings import support_warnings

WITH_MEMORY = replace(CLUSTER, host_memory_bytes=2**41)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"backend": "ddp", "job": {"dataset": "mine.json"}}, "takes no files as data sets"),
        ({"backend": "ddp", "job": {"template": "qwen33"}}, "has no template 'qwen33'; did you mean 'qwen3'"),
        ({"backend": "ddp", "cluster": replace(CLUSTER, gpu=V100)}, "no bf16 units"),
        ({"backend": "fsdp2", "job": {"finetuning": "lora"}}, "those of the frozen weights too"),
        ({"backend": "deepspeed", "offload_optimizer": True}, "CUDA toolkit"),
    ],
    ids=str,
)
def test_what_may_surprise_is_said(what: dict[str, Any], words: str) -> None:
    spec, plan = make_spec_and_plan(**{"model": QWEN3_8B, "cluster": WITH_MEMORY, **what})
    assert words in " ".join(support_warnings(spec, plan.layout))
    usual, plain = make_spec_and_plan(model=QWEN3_8B, backend="ddp")
    assert [*support_warnings(usual, plain.layout)] == []
