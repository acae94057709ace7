"""How predictions are graded against measured runs."""

import json
from dataclasses import replace
from typing import Any

import pytest

from topoplan.planner.measured import parse_runs
from topoplan.planner.validate import (
    ALLOCATED,
    BY_STAGE,
    DEVICE,
    RESERVED,
    Figure,
    Validation,
    spread_of,
    validate,
)


def graded(*rows: dict[str, Any]) -> Validation:
    return validate(list(parse_runs("\n".join(map(json.dumps, rows)), name="runs.jsonl")))


def row(name: str, **measured: Any) -> dict[str, Any]:
    layout = measured.pop("layout", {"backend": "megatron", "tp": 2, "pp": 2})
    return {
        "id": name,
        "family": "bench",
        "document": {
            "cluster": {"gpu": "h100-sxm-80gb", "nodes": 1, "gpus_per_node": 8},
            "model": {"name": measured.pop("model", "Qwen/Qwen3-8B")},
            "job": {"seq_len": 4096, "global_batch_size": 64},
            "layout": layout,
        },
        **{key: measured.pop(key) for key in ("unstated", "rank_group") if key in measured},
        "measured": measured,
    }


def test_a_run_is_graded_by_each_of_its_figures() -> None:
    found = graded(row("a", allocated_gib=40, stage_allocated_gib=[None, 30], reserved_gib=45, step_s=4)).figures
    assert [figure.kind for figure in found] == [ALLOCATED, BY_STAGE, RESERVED, "throughput bf16"]
    assert [figure.stage for figure in found] == [None, 1, None, None]
    speed = found[-1]
    assert speed.measured == pytest.approx(64 * 4096 / 4 / 8)
    assert speed.unit == "tokens/s/GPU"
    assert speed.error == pytest.approx(speed.predicted / speed.measured - 1)


def test_memory_within_gaps_of_the_allocator_is_as_predicted() -> None:
    seen, shown = graded(row("a", reserved_gib=1, device_gib=1)).figures
    assert [one.kind for one in (seen, shown)] == [RESERVED, DEVICE]
    assert shown.predicted > seen.predicted
    assert seen.gaps == shown.gaps > 0.5
    between = replace(seen, measured=seen.predicted + 0.9 * seen.gaps)
    assert between.error < 0.0
    assert between.off_by == 0.0
    assert replace(seen, measured=1.1 * (seen.predicted + seen.gaps)).off_by == pytest.approx(0.1)
    assert replace(seen, measured=0.9 * seen.predicted).off_by == pytest.approx(0.1)


def test_model_flops_stand_in_where_tokens_were_not_published() -> None:
    (figure,) = graded(row("a", tflops_per_gpu=400)).figures
    assert figure.unit == "TFLOP/s/GPU"
    (figure,) = graded(row("a", tflops_per_gpu=400, tokens_per_s_per_gpu=8000)).figures
    assert figure.unit == "tokens/s/GPU"


def test_a_spread_has_sizes_and_a_sign() -> None:
    def figure(error: float) -> Figure:
        return Figure(id="x", family="f", kind=ALLOCATED, unit="GiB", predicted=1.0 + error, measured=1.0)

    errors = spread_of([figure(error) for error in (-0.1, -0.05, 0.02, 0.2)])
    assert (errors.count, errors.median, errors.worst) == (4, pytest.approx(0.075), pytest.approx(0.2))
    assert errors.signed_median == pytest.approx(-0.015)
    assert errors.at_90_percent == pytest.approx(0.2)


def test_pairs_that_measured_alike_are_not_ordered() -> None:
    form: dict[str, Any] = {"backend": "megatron", "tp": 1, "pp": 2}
    slow = form | {"recompute": "full"}
    ranking = graded(
        row("a", step_s=4.0, layout=form, rank_group="g"), row("b", step_s=5.0, layout=slow, rank_group="g")
    ).ranking
    assert (ranking.pairs, ranking.pairs_in_order, ranking.worst_loss) == (1, 1, 0.0)
    ranking = graded(
        row("a", step_s=5.0, layout=form, rank_group="g"), row("b", step_s=4.0, layout=slow, rank_group="g")
    ).ranking
    assert (ranking.pairs, ranking.pairs_in_order, ranking.worst_loss) == (1, 0, pytest.approx(0.2))
    ranking = graded(
        row("a", step_s=4.0, layout=form, rank_group="g"), row("b", step_s=4.1, layout=slow, rank_group="g")
    ).ranking
    assert ranking.pairs == 0
    assert graded(row("a", step_s=4.0)).ranking is None


def test_fit_is_graded_at_margin_zero_for_what_ran_and_at_the_margin_for_what_did_not() -> None:
    large = "Qwen/Qwen2.5-72B"
    fits = graded(
        row("ran", step_s=4),
        row("over", step_s=4, model=large),
        row("open", step_s=4, model=large, unstated=["recompute"]),
        row("oom", oom=True, model=large),
        row("wrong", oom=True),
    ).fits
    assert (fits.ran, fits.ran_unstated, fits.out_of_memory) == (2, 1, 2)
    assert [(grade.id, grade.unstated) for grade in fits.ran_but_over] == [("over", ()), ("open", ("recompute",))]
    assert [grade.id for grade in fits.out_of_memory_but_fit] == ["wrong"]


def test_what_cannot_be_predicted_is_counted_and_the_rest_goes_on() -> None:
    found = graded(
        row("bad", step_s=4, layout={"tp": 3}),
        row("good", step_s=4),
        {"id": "x", "left_out": "LoRA"},
        {"id": "y", "left_out": "LoRA"},
    )
    assert found.runs == 1
    assert "tp 3" in found.failed["bad"]
    assert found.left_out == {"LoRA": 2}
