"""What Trinity-RFT's trainer refuses, does differently from the plan, or ignores."""

from dataclasses import replace
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, ONE_NODE, QWEN3_VL_8B, make_spec_and_plan
from topoplan.errors import InputError, LayoutError, ModelError, SpecError
from topoplan.specs.known import model
from topoplan.trainers.refusal import refuse
from topoplan.trainers.trinity.refusals import refusals

WITH_MEMORY = replace(ONE_NODE, host_memory_bytes=2**41)
QWEN3 = model("Qwen3-8B")


def check(*, job: dict[str, Any] | None = None, **what: Any) -> None:
    usual = {"cluster": WITH_MEMORY, "model": QWEN3, "backend": "fsdp2"}
    spec, plan = make_spec_and_plan(job={"packing": False, **(job or {})}, **{**usual, **what})
    refuse(refusals(replace(spec, path="c.yaml"), plan.layout))


@pytest.mark.parametrize(
    "what",
    [
        {},
        {"ulysses": 8},
        {"offload": True},
        {"cluster": CLUSTER, "ulysses": 2},
        {"job": {"samples": None, "epochs": 2.0}},
        {"job": {"samples": 1000, "epochs": 1.5}},
    ],
)
def test_what_the_trainer_can_do_is_taken(what: dict[str, Any]) -> None:
    check(**what)


@pytest.mark.parametrize(
    ("what", "kind", "where", "message"),
    [
        ({"job": {"stage": "pt"}}, SpecError, "c.yaml: job.stage", "for stage pt"),
        ({"job": {"finetuning": "lora"}}, SpecError, "c.yaml: job.finetuning", "for lora"),
        ({"job": {"precision": "fp8"}}, SpecError, "c.yaml: job.precision", "not in fp8"),
        ({"job": {"pure_bf16": True}}, SpecError, "c.yaml: job.precision", "not in pure bf16"),
        ({"job": {"optimizer": "adamw_8bit"}}, SpecError, "c.yaml: job.optimizer", "not adamw_8bit"),
        ({"job": {"packing": True}}, SpecError, "c.yaml: job.packing", "packs no samples"),
        ({"job": {"samples": None, "epochs": 0.5}}, SpecError, "c.yaml: job.epochs", "no steps"),
        ({"cp": 2}, LayoutError, "cp2", "context parallelism beside Ulysses"),
        ({"fused_linear_cross_entropy": True}, LayoutError, "fsdp2", "fused loss"),
        ({"sync_each_batch": False}, LayoutError, "fsdp2", "after every micro batch"),
        ({"cluster": CLUSTER, "ulysses": 16}, LayoutError, "ulysses16", "expected one of 1, 2, 4, 8"),
        ({"model": model("Qwen2.5-7B-Instruct"), "ulysses": 8}, LayoutError, "ulysses8", "expected one of 1, 2, 4"),
        ({"offload": True, "cluster": ONE_NODE}, SpecError, "host_memory", "how much"),
        ({"model": QWEN3_VL_8B}, ModelError, "model", "vision tower"),
    ],
)
def test_what_it_cannot_or_would_do_otherwise_is_refused(
    what: dict[str, Any], kind: type[InputError], where: str, message: str
) -> None:
    with pytest.raises(kind) as error:
        check(**what)
    assert message in str(error.value)
    assert where in str(error.value)
