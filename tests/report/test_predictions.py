from tests.report.printed import printed
from tests.samples import make_plan
from topoplan.report.predictions import Prediction, prediction_to_dict, print_predictions


def rendered(*predictions: Prediction, width: int = 100) -> str:
    return printed(print_predictions, predictions, width=width)


def test_a_prediction_keeps_the_id_of_its_document() -> None:
    view = prediction_to_dict(Prediction(id="run-7", plan=make_plan(tp=4)))
    assert view["id"] == "run-7"
    assert view["plan_id"] == "tp4-pp1-dp8-mbs1"
    assert {"layout", "fits", "memory", "time", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "warnings"} <= set(
        view
    )
    assert "rank" not in view


def test_a_failure_is_an_id_and_an_error() -> None:
    assert prediction_to_dict(Prediction(id=3, error="no such GPU")) == {
        "schema": "topoplan.predict/1",
        "id": 3,
        "error": "no such GPU",
    }


def test_the_table_shows_what_does_not_fit_and_what_failed() -> None:
    text = rendered(
        Prediction(id="small", plan=make_plan()),
        Prediction(id=None, plan=make_plan(device_gib=92.0)),
        Prediction(id="broken", error="runs.jsonl:3: no `layout`"),
    )
    assert "92.0" in text
    assert " no " in text
    assert "1 of 3 could not be predicted" in text
    assert "broken: runs.jsonl:3: no `layout`" in text


def test_long_ids_do_not_widen_the_table() -> None:
    text = rendered(Prediction(id="x" * 200, plan=make_plan(tp=2, pp=2, vpp=3)))
    assert max(map(len, text.splitlines())) <= 100
