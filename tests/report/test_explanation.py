"""The account of a plan, on the screen and as JSON, for every engine."""

import json
from typing import Any

import pytest

from tests.engines.samples import DENSE, MIXED, VISION, spec_of
from tests.planner.sharded_cases import CASES as SHARDED
from tests.planner.test_account import compared
from tests.report.printed import printed
from tests.samples import make_plan, make_spec
from topoplan.planner.account import compare, memory_account, time_account
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.report.explanation import (
    comparison_to_dict,
    explanation_to_dict,
    print_comparison,
    print_explanation,
    verdict,
)
from topoplan.specs.spec import Spec

MEGATRON: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (DENSE, {"tp": 2}, {}),
    (DENSE, {"tp": 8, "pp": 4, "vpp": 3, "recompute": "full"}, {}),
    (VISION, {"pp": 4, "tp": 2}, {"stage": "dpo", "freeze_vision_tower": False}),
    (MIXED, {"tp": 2, "pp": 2, "ep": 4, "etp": 2}, {"precision": "fp8"}),
    ("Qwen/Qwen3-4B", {"pp": 2, "cp": 2, "optimizer_offload_fraction": 1.0}, {}),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"pp": 2, "ep": 8}, {}),
]
CASES = [(model, {"backend": "megatron", **form}, job) for model, form, job in MEGATRON] + SHARDED


def plan_of(model: str, form: dict[str, Any], other: dict[str, Any]) -> tuple[Spec, Plan]:
    spec = spec_of(model, **other)
    return spec, predict(spec, form)


def rendered(spec: Spec, plan: Plan, width: int = 100) -> str:
    time, memory = time_account(spec, plan), memory_account(spec, plan)
    return printed(print_explanation, spec, plan, time=time, memory=memory, width=width)


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(
    model: str, form: dict[str, Any], other: dict[str, Any]
) -> None:
    text = rendered(*plan_of(model, form, other), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    if form["backend"] != "megatron":
        assert not [word for word in ("Stage", "pipeline", "bubble", "in flight", "tp_comm", "chunk") if word in text]


def test_the_blocks_lead_from_the_step_to_single_tensors() -> None:
    form = {"tp": 2, "pp": 2, "ep": 4, "recompute": {"granularity": "selective", "modules": ["moe"]}}
    text = flat(rendered(*plan_of(MIXED, form, {})))
    blocks = (
        "Time of a step, by part",
        "Stages, ms of one micro batch",
        "operator by operator: attention + moe, 24 layers x 8 micro batches",
        "Outside the layers",
        "Communication, as if nothing overlapped",
        "operators/machine.py::Product",
        "Stages, GiB",
        "Memory of stage 0, by part",
        "From allocated tensors to the card",
        "Possible peaks",
        "Activations kept from forward",
        "Activations that a layer saves for one micro batch: attention + moe, 24 layers",
        "Weights of a layer, elements: attention + moe, 24 layers (sharded by tp 2, ep 4, etp 1)",
        "Weights outside the layers",
        "engines/prediction.py::margin_bytes",
    )
    positions = [text.index(block) for block in blocks]
    assert positions == sorted(positions)
    assert "forward backward recomp. step" in text
    assert "moe, full recomputed" in text
    assert "the error band, and what the driver keeps" in text


def test_one_stage_needs_no_table_of_stages_and_no_recomputation_no_column() -> None:
    text = rendered(*plan_of(DENSE, {"tp": 2}, {}))
    assert "Stages" not in text
    assert "recomp." not in text


def test_states_are_said_as_products() -> None:
    text = flat(rendered(*plan_of(DENSE, {"backend": "deepspeed", "zero_stage": 3}, {})))
    assert "trained: 2 bytes x 8.19B elements / 32 GPUs" in text
    assert "fp32 copy of the weights 1.0 4 bytes x 8.19B elements / 32 GPUs" in text
    assert "stage3_max_live_parameters" in text
    assert "Host memory" not in text
    assert "dense: 12 bytes x 4.10B elements / 16 GPUs" in flat(rendered(*plan_of(DENSE, {"tp": 2}, {})))


def test_offload_is_said_with_the_host_and_what_pcie_takes() -> None:
    job = {"cluster": {"host_memory": "2TiB", "margin": 0.1}}
    text = flat(rendered(*plan_of(DENSE, {"backend": "deepspeed", "zero_stage": 2, "offload_optimizer": True}, job)))
    assert "Copies over PCIe take" in text
    assert "of 8 processes" in text
    assert "as the spec or --margin says" in text
    text = flat(rendered(*plan_of(DENSE, {"tp": 2, "optimizer_offload_fraction": 1.0}, job)))
    assert "fp32 weights, moments and gradients" in text
    assert "headroom" in text


def test_a_plan_that_does_not_fit_says_by_how_much() -> None:
    text = rendered(*plan_of("Qwen/Qwen2.5-72B", {"backend": "megatron", "tp": 8}, {}))
    assert "does not fit" in text
    assert "\nmissing " in text


@pytest.mark.parametrize(("model", "form", "other"), CASES)
def test_the_document_has_one_shape_for_all_engines(model: str, form: dict[str, Any], other: dict[str, Any]) -> None:
    spec, plan = plan_of(model, form, other)
    view = explanation_to_dict(spec, plan, time=time_account(spec, plan), memory=memory_account(spec, plan))
    assert json.loads(json.dumps(view)) == view
    assert view["schema"] == "topoplan.explain/2"
    time, memory = view["time"], view["memory"]
    assert set(time) == {
        *("step", "band_s", "microbatches", "slowest_stage", "stages", "layers", "sent", "copied_s"),
    }
    assert set(memory) == {
        *("device", "margin", "capacity_bytes", "host", "host_capacity_bytes", "worst_stage", "stages"),
        *("moments", "layers", "parameters"),
    }
    assert time["step"]["value"] == view["plan"]["time"]["step_s"]
    assert memory["device"]["value"] == pytest.approx(view["plan"]["memory"]["device_gib"] * 2**30, rel=1e-5)
    assert {"name", "value", "unit", "source", "children"} <= set(memory["device"])


def test_the_document_holds_what_was_asked_for() -> None:
    spec, plan = plan_of(DENSE, {"tp": 2}, {})
    common = {"schema", "cluster", "model", "job", "plan", "notes"}
    assert set(explanation_to_dict(spec, plan, time=time_account(spec, plan), memory=None)) == common | {"time"}
    assert set(explanation_to_dict(spec, plan, time=None, memory=memory_account(spec, plan))) == common | {"memory"}


def test_what_there_is_to_mind_of_the_plan_is_said() -> None:
    spec, plan = plan_of(MIXED, {"backend": "mca", "tp": 2, "ep": 8, "pp": 2, "vpp": 3}, {})
    text = flat(rendered(spec, plan))
    assert plan.caveats
    assert all(f"Note: {warning}." in text for warning in (*plan.warnings, *plan.caveats))


FAST = make_plan(tp=2, step_s=3.0, parts_s={"gemm": 2.0, "pp_bubble": 0.2, "tp_comm": 0.8})
SLOW = make_plan(tp=1, pp=2, step_s=4.0, device_gib=50.3, parts_s={"gemm": 2.1, "pp_bubble": 1.9})


def side_by_side(first: Plan, second: Plan, *, width: int = 100, time: bool = True, memory: bool = True) -> str:
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
        "tp4 pp1 dp8 mbs1 wins, because tp2 pp1 dp16 mbs1 exceeds the card by 1.9 GiB; it is 33.3% slower"
    )


def test_of_two_plans_over_the_card_neither_wins() -> None:
    both = make_plan(tp=2, device_gib=99.0), make_plan(tp=4, step_s=4.0, device_gib=99.0)
    assert verdict(compared(*both))[0].startswith("Neither plan fits; tp2 pp1 dp16 mbs1 would be 24.6% faster")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"caveats": ("NaN with torch 2.8",)}, "has no known problem"),
        ({"device_gib": 61.0}, "needs less memory"),
        ({"pp": 2}, "is simpler"),
        ({"step_s": 3.001}, "is a little faster"),
    ],
)
def test_a_tie_is_called_one_with_what_decides_it(other: dict[str, Any], why: str) -> None:
    plan = {"tp": 2, "step_s": 3.0, "device_gib": 58.3}
    first, *_ = verdict(compared(make_plan(**plan | other), make_plan(**plan)))
    assert "equally fast within the error of the predictions" in first
    assert first.endswith(f"tp2 pp1 dp16 mbs1 is ranked first because it {why}.")


def test_a_slower_plan_wins_over_one_with_a_known_problem() -> None:
    doubtful = make_plan(tp=4, step_s=3.0, caveats=("NaN with torch 2.8",))
    first, *_ = verdict(compared(doubtful, make_plan(tp=2, step_s=3.06)))
    assert first == (
        "tp2 pp1 dp16 mbs1 is ranked first, though it is 2.0% slower, because a known problem applies to"
        " tp4 pp1 dp8 mbs1."
    )


def test_the_band_is_ascii_where_the_terminal_is() -> None:
    assert "+-12%" in verdict(compared(FAST, SLOW), ascii_only=True)[-1]
    assert "±12%" in verdict(compared(FAST, SLOW))[-1]


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_the_terminal(width: int) -> None:
    text = side_by_side(FAST, SLOW, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_differences_have_a_sign_and_no_difference_has_none() -> None:
    lines = [" ".join(line.split()) for line in side_by_side(FAST, SLOW).splitlines()]
    assert "step 3.000 4.000 +1.000" in lines
    assert "tp_comm 0.800 - -0.800" in lines
    assert "weights 10.00 10.00 0" in lines
    assert "hours 0.47 0.60 +0.13" in lines
    assert "fits yes yes" in lines


def test_time_or_memory_alone() -> None:
    alone = side_by_side(FAST, SLOW, memory=False)
    assert "Memory of the GPU" not in alone
    assert "Beyond tensors" not in alone
    assert "Parts of a step" not in side_by_side(FAST, SLOW, time=False)


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
