"""The warnings of a bundle are known before it is written."""

from dataclasses import replace
from typing import Any

import pytest

from tests.bundle.samples import QWEN3_30B, make_spec_and_layout
from topoplan.bundle.draft import draft_of
from topoplan.bundle.warnings import warnings_and_refusal, warnings_of
from topoplan.planner.predict import predict


@pytest.mark.parametrize(
    "what",
    [
        {},
        {"tp": 1, "pp": 2, "vpp": 2, "dp": 16, "gradient_accumulation_steps": 4},
        {"model": QWEN3_30B, "tp": 2, "dp": 16, "ep": 8, "etp": 1},
    ],
    ids=["plain", "interleaved", "experts"],
)
def test_all_that_a_bundle_warns_of_is_said_before_and_caveats_are_among_it(what: dict[str, Any]) -> None:
    spec, layout = make_spec_and_layout(**what)
    plan = predict(spec, layout)
    warnings, refused = warnings_and_refusal(spec, plan)
    assert not refused
    assert warnings == warnings_of(draft_of(spec, plan))
    assert {*plan.warnings, *plan.caveats} <= {*warnings}


def test_why_no_bundle_can_be_written_is_said_beside_the_warnings() -> None:
    spec, layout = make_spec_and_layout()
    plan = replace(predict(spec, layout), warnings=("of the plan",), caveats=("a fault",))
    contrary = replace(spec, job=replace(spec.job, trainer={"tensor_model_parallel_size": 3}))
    warnings, refused = warnings_and_refusal(contrary, plan)
    assert warnings == ("of the plan", "a fault")
    assert "tensor_model_parallel_size" in refused
