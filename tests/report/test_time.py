import ast
import json
from pathlib import Path
from typing import Any

import pytest

import topoplan
from tests.engines.samples import DENSE, MIXED, TIED, VISION, spec_of
from tests.report.test_tables import shown
from topoplan.planner.plan import Plan
from topoplan.planner.predict import predict
from topoplan.planner.time_breakdown import TimeBreakdown, time_breakdown
from topoplan.report.time import SOURCES, print_time, source_of, time_to_dict

PACKAGE = Path(topoplan.__file__).parent
SAMPLES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (DENSE, {}, {"tp": 2}),
    (DENSE, {}, {"tp": 8, "pp": 4, "vpp": 3, "recompute": "full"}),
    (VISION, {"stage": "dpo", "freeze_vision_tower": False}, {"pp": 4, "tp": 2}),
    (MIXED, {"precision": "fp8"}, {"tp": 2, "pp": 2, "ep": 4, "etp": 2}),
    (TIED, {}, {"pp": 2, "cp": 2, "optimizer_offload_fraction": 1.0}),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", {}, {"pp": 2, "ep": 8}),
]


def sample(model: str, job: dict[str, Any], form: dict[str, Any]) -> tuple[Plan, TimeBreakdown]:
    spec = spec_of(model, **job)
    plan = predict(spec, {"backend": "megatron", **form})
    return plan, time_breakdown(spec, plan)


def rendered(model: str = DENSE, job: Any = None, form: Any = None, *, width: int = 100) -> str:
    stream, console = shown(width)
    print_time(console, *sample(model, job or {}, form or {"tp": 2}))
    return stream.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(("model", "job", "form"), SAMPLES)
@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(model: str, job: Any, form: Any, width: int) -> None:
    text = rendered(model, job, form, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_every_source_is_a_file_of_the_package_and_a_function_in_it() -> None:
    for name, source in SOURCES.items():
        file, names = source.split(";")[0].split(" ", 1)
        nodes = ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8")))
        defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert set(names.split(" and ")) <= defined, name


@pytest.mark.parametrize(("model", "job", "form"), SAMPLES)
def test_every_row_leads_to_a_source(model: str, job: Any, form: Any) -> None:
    plan, account = sample(model, job, form)
    assert set(plan.time.parts_s) <= set(SOURCES)
    for row in account.rows:
        assert source_of(row.part, row.name) in SOURCES.values()


def test_the_tables_lead_from_the_step_to_the_collectives() -> None:
    text = flat(rendered(MIXED, {}, {"tp": 2, "pp": 2, "ep": 4, "recompute": "full"}))
    blocks = (
        "The step, by part",
        "Stages, ms of one micro batch",
        "operator by operator: attention + moe, 24 layers x 8 micro batches",
        "Around the layers",
        "Data parallel takes",
        "Collectives, one call",
    )
    positions = [text.index(block) for block in blocks]
    assert positions == sorted(positions)
    assert "forward backward recomp. step" in text
    assert "dispatch, combine (alltoall)" in text


def test_the_dispatcher_is_named_beside_what_it_costs() -> None:
    text = flat(rendered(MIXED, {}, {"ep": 16}))
    assert "dispatch, combine (flex) ep_comm" in text
    assert "alltoall" not in text
    assert source_of("ep_comm", "dispatch, combine (flex)").startswith("operators/dispatch.py flex_s")


def test_one_stage_needs_no_table_of_stages_and_no_recomputation_no_column() -> None:
    text = rendered()
    assert "Stages, ms" not in text
    assert "recomp." not in text


def test_a_narrow_terminal_keeps_the_parts_that_lead_to_the_formulas() -> None:
    lines = rendered(width=80).splitlines()
    (line,) = [line for line in lines if line.startswith("linear_qkv")]
    assert line.split()[1] == "gemm"
    (line,) = [line for line in rendered(width=100).splitlines() if line.startswith("linear_qkv")]
    assert line.split()[-1] == "gemm_s"


@pytest.mark.parametrize(("model", "job", "form"), SAMPLES)
def test_the_document_adds_up(model: str, job: Any, form: Any) -> None:
    plan, account = sample(model, job, form)
    view = time_to_dict(plan, account)
    assert json.loads(json.dumps(view)) == view
    assert sum(row["step_s"] for row in view["rows"]) == pytest.approx(view["step_s"], rel=1e-4)
    assert sum(row["share"] for row in view["rows"]) == pytest.approx(1, rel=1e-4)
    assert all(row["source"] for row in view["rows"])
