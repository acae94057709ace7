"""The account of a plan, on the screen and as JSON, for every engine."""

import json
from typing import Any

import pytest

from tests.engines.samples import DENSE, MIXED, VISION, spec_of
from tests.planner.sharded_cases import CASES as SHARDED
from tests.report.printed import printed
from topoplan.planner.account import memory_account, time_account
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.report.explanation import explanation_to_dict, print_explanation
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
        "engines/megatron/memory.py::margin_bytes",
    )
    positions = [text.index(block) for block in blocks]
    assert positions == sorted(positions)
    assert "forward backward recomp. step" in text
    assert "moe, full recomputed" in text
    assert "the error band of the prediction" in text


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
