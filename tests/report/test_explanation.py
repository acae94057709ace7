from typing import Any

import pytest

from tests.engines.samples import DENSE, spec_of
from tests.planner.sharded_cases import CASES as SHARDED
from tests.planner.sharded_cases import plan_of
from tests.report.test_tables import shown
from topoplan.planner.account import memory_account, time_account
from topoplan.planner.breakdown import breakdown
from topoplan.planner.predict import predict
from topoplan.planner.time_breakdown import time_breakdown
from topoplan.report.explanation import explanation_to_dict, print_explanation

SPEC = spec_of(DENSE)
PLAN = predict(SPEC, {"tp": 2})


def test_the_document_holds_what_was_asked_for() -> None:
    time, memory = time_breakdown(SPEC, PLAN), breakdown(SPEC, PLAN)
    common = {"schema", "cluster", "model", "job", "plan"}
    assert set(explanation_to_dict(SPEC, PLAN, time=time, memory=memory)) == common | {"time", "memory"}
    assert set(explanation_to_dict(SPEC, PLAN, time=time, memory=None)) == common | {"time"}
    view = explanation_to_dict(SPEC, PLAN, time=None, memory=memory)
    assert set(view) == common | {"memory"}
    assert view["schema"] == "topoplan.explain/1"


def test_the_plan_is_named_once_with_its_verdict() -> None:
    stream, console = shown(100)
    print_explanation(console, SPEC, PLAN, time=time_breakdown(SPEC, PLAN), memory=breakdown(SPEC, PLAN))
    assert stream.getvalue().count("Plan tp2 pp1 dp16 mbs1 fits") == 1


def test_a_plan_that_does_not_fit_is_told() -> None:
    spec = spec_of("Qwen/Qwen2.5-72B")
    stream, console = shown(100)
    print_explanation(console, spec, predict(spec, {"backend": "megatron", "tp": 8}), time=None, memory=None)
    assert "does not fit" in stream.getvalue()


@pytest.mark.parametrize(("model", "form", "other"), SHARDED)
def test_plans_that_split_data_alone_are_explained_in_the_same_document(
    model: str, form: dict[str, Any], other: dict[str, Any]
) -> None:
    spec, plan = plan_of(model, form, other)
    time, memory = time_account(spec, plan), memory_account(spec, plan)
    view = explanation_to_dict(spec, plan, time=time, memory=memory)
    assert {"time", "memory", "plan"} < set(view)
    stream, console = shown(100)
    print_explanation(console, spec, plan, time=time, memory=memory)
    text = stream.getvalue()
    assert text.index("The step, by part") < text.index("Memory of a GPU, by part")
    assert "\u00b1" in text or "+-" in text
