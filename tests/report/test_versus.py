import json

import pytest

from tests.engines.samples import DENSE, spec_of
from tests.planner.test_account import compared
from tests.report.printed import printed
from tests.samples import make_plan, make_spec
from topoplan.planner.account import compare
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.report.versus import comparison_to_dict, print_comparison, verdict

FAST = make_plan(tp=2, step_s=3.0, parts_s={"gemm": 2.0, "pp_bubble": 0.2, "tp_comm": 0.8})
SLOW = make_plan(tp=1, pp=2, step_s=4.0, device_gib=50.3, parts_s={"gemm": 2.1, "pp_bubble": 1.9})


def rendered(first: Plan, second: Plan, *, width: int = 100, time: bool = True, memory: bool = True) -> str:
    spec, comparison = make_spec(samples=10_000), compared(first, second)
    return printed(print_comparison, spec, comparison, time=time, memory=memory, width=width)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_winner_is_named_with_what_it_saves_and_what_it_pays(swapped: bool) -> None:
    first, *others = verdict(compared(SLOW, FAST) if swapped else compared(FAST, SLOW))
    assert first == "tp2 pp1 dp16 mbs1 wins: it is 33.3% faster."
    assert others[0] == "It takes 1.00 s per step less: it saves 1.70 in pp_bubble and adds 0.800 in tp_comm."
    assert others[1] == "It takes 8.0 GiB more: it adds 8.0 in activations."


def test_a_plan_that_is_over_the_card_loses() -> None:
    first, *_ = verdict(compared(make_plan(tp=2, step_s=3.0, device_gib=80.0), make_plan(tp=4, step_s=4.0)))
    assert first.startswith(
        "tp4 pp1 dp8 mbs1 wins, because tp2 pp1 dp16 mbs1 exceeds the card by 1.9 GiB; it is 25.0% slower"
    )


def test_of_two_plans_over_the_card_neither_wins() -> None:
    both = make_plan(tp=2, device_gib=99.0), make_plan(tp=4, step_s=4.0, device_gib=99.0)
    assert verdict(compared(*both))[0].startswith("Neither plan fits; tp2 pp1 dp16 mbs1 would be 24.6% faster")


def test_a_tie_is_called_one() -> None:
    first, *_ = verdict(compared(make_plan(tp=2, step_s=3.0), make_plan(tp=4, step_s=3.001)))
    assert "equally fast within the error of the predictions" in first


def test_the_band_is_ascii_where_the_terminal_is() -> None:
    assert "+-12%" in verdict(compared(FAST, SLOW), ascii_only=True)[-1]
    assert "±12%" in verdict(compared(FAST, SLOW))[-1]


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_the_terminal(width: int) -> None:
    text = rendered(FAST, SLOW, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_differences_have_a_sign_and_no_difference_has_none() -> None:
    lines = [" ".join(line.split()) for line in rendered(FAST, SLOW).splitlines()]
    assert "step 3.000 4.000 +1.000" in lines
    assert "tp_comm 0.800 - -0.800" in lines
    assert "weights 10.00 10.00 0" in lines
    assert "hours 0.47 0.60 +0.13" in lines
    assert "fits yes yes" in lines


def test_time_or_memory_alone() -> None:
    alone = rendered(FAST, SLOW, memory=False)
    assert "Memory of the GPU" not in alone
    assert "Beyond tensors" not in alone
    assert "Parts of a step" not in rendered(FAST, SLOW, time=False)


def test_the_document_holds_both_plans_and_the_differences() -> None:
    view = comparison_to_dict(make_spec(), compared(FAST, SLOW), time=True, memory=True)
    assert json.loads(json.dumps(view)) == view
    assert view["schema"] == "topoplan.versus/1"
    assert (view["plan"]["id"], view["versus"]["id"]) == (FAST.id, SLOW.id)
    assert view["winner"] == FAST.id
    assert view["differences"]["layout"]["pp"] == [1, 2]
    first = view["differences"]["time_s"][0]
    assert first == {"name": "pp_bubble", "plan": 0.2, "versus": 1.9, "more": 1.7}


def test_plans_of_two_cost_models_are_said_to_share_few_errors() -> None:
    spec = spec_of(DENSE)
    plans = [predict(spec, form) for form in ({"tp": 2}, {"backend": "fsdp2"})]
    sentences = verdict(compare(spec, *plans))
    assert "two cost models with few errors in common" in sentences[-1]
    text = printed(print_comparison, spec, compare(spec, *plans), time=True, memory=True)
    assert "Memory of the fullest GPU" in text
