from tests.cost.samples import DENSE, spec_of
from tests.report.test_tables import shown
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
