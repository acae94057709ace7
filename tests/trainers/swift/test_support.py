"""Warnings about surprising behavior of ms-swift."""

from dataclasses import replace
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, QWEN3_8B, QWEN3_30B, V100
from tests.bundle.samples import make_spec_and_plan as make
from topoplan.trainers.swift.support import swift_warnings

WITH_MEMORY = replace(CLUSTER, host_memory_bytes=2**41)
ON_V100 = replace(WITH_MEMORY, gpu=V100)


def warned(**what: Any) -> list[str]:
    spec, plan = make(**{"model": QWEN3_8B, "backend": "ddp", **what})
    return list(swift_warnings(spec, plan.layout))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"job": {"template": "qwen3", "dataset": "a.jsonl"}}, "template qwen3 is a name of LLaMA-Factory's"),
        (
            {"model": replace(QWEN3_8B, config_path="/m/config.json"), "job": {"dataset": "a.jsonl"}},
            "by the name of the model's directory",
        ),
        ({"job": {"dataset": "identity"}}, "knows no data set identity"),
        (
            {"model": QWEN3_30B, "job": {"finetuning": "lora", "lora_target": ("all",), "dataset": "a.jsonl"}},
            "experts get no adapters",
        ),
        ({"cluster": ON_V100, "job": {"dataset": "a.jsonl"}}, "has no bf16 units"),
    ],
)
def test_what_may_surprise_is_said_once_and_alone(what: dict[str, Any], words: str) -> None:
    (said,) = warned(**what)
    assert words in said


def test_there_is_nothing_to_say_of_a_plain_run() -> None:
    assert warned(job={"dataset": "a.jsonl, org/name"}) == []
    named = {"dataset": "a.jsonl", "trainer": {"template": "qwen3"}}
    assert warned(model=replace(QWEN3_8B, config_path="/m/config.json"), job=named) == []
    assert warned(model=QWEN3_30B, job={"finetuning": "lora", "lora_target": ("q_proj",), "dataset": "a.jsonl"}) == []


def test_experts_of_megatron_have_adapters() -> None:
    job = {"finetuning": "lora", "lora_target": ("all",), "dataset": "a.jsonl"}
    assert warned(model=QWEN3_30B, job=job, backend="megatron") == []
