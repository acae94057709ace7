from dataclasses import replace
from typing import Any

import pytest

from tests.report.printed import printed
from tests.samples import FULL, SELECTIVE, make_plan, make_spec
from topoplan.layout.layout import Layout, Recompute
from topoplan.operators.params import parameter_count
from topoplan.planner.effort import STARTS_S, effort_of, job_effort, job_steps
from topoplan.planner.plan import Time
from topoplan.report.tables import stage_name, stage_span, table_of
from topoplan.report.text import (
    band,
    billions,
    counted,
    effort_to_dict,
    gib,
    hours,
    interval,
    layout_label,
    saving_words,
    significant,
    time_shares,
)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (0.9996, "1.00"),
        (3.214, "3.21"),
        (12.34, "12.3"),
        (999.6, "1,000"),
        (12345.6, "12,346"),
    ],
)
def test_significant_shows_three_digits_and_no_exponent(value: float, shown: str) -> None:
    assert significant(value) == shown


def test_sizes_and_counts() -> None:
    assert gib(1.5 * 2**30) == "1.5"
    assert billions(8_190_735_360) == "8.19B"
    assert billions(671_026_419_200) == "671B"
    assert counted(1, "layout") == "1 layout"
    assert counted(1234, "layout") == "1,234 layouts"


@pytest.mark.parametrize(("value", "shown"), [(0.0829, "0.08"), (4.178, "4.18"), (16.0, "16.0"), (1234.4, "1,234")])
def test_hours_keep_what_matters(value: float, shown: str) -> None:
    assert hours(value) == shown


def test_an_interval_has_the_same_decimals_on_both_sides() -> None:
    assert interval(9.5, 12.25) == "9.50-12.25"


def test_a_band_is_one_figure_only_when_both_sides_agree() -> None:
    assert band(Time(step_s=2.0, band_s=(1.8, 2.2), parts_s={})) == "±10%"
    assert band(Time(step_s=2.0, band_s=(1.8, 2.4), parts_s={})) == "-10+20%"
    assert band(Time(step_s=2.0, band_s=(1.8, 2.2), parts_s={}), ascii_only=True) == "+-10%"


def test_a_layout_label_is_the_id_with_spaces() -> None:
    assert layout_label(make_plan(tp=4).layout) == "tp4 pp1 dp8 mbs1"
    assert layout_label(make_plan(tp=4, recompute=SELECTIVE).layout) == "tp4 pp1 dp8 mbs1 sel:core_attn"
    assert layout_label(make_plan(recompute=FULL, optimizer_offload_fraction=0.5).layout) == (
        "tp1 pp1 dp32 mbs1 full offload50"
    )
    block = Recompute(granularity="full", method="block", num_layers=4)
    assert layout_label(make_plan(pp=2, recompute=block).layout) == "tp1 pp2 dp16 mbs1 full:block4"
    sums = Layout.of(backend="fsdp2", dp=8, gradient_accumulation_steps=2, recompute=FULL, sync_each_batch=False)
    assert layout_label(sums) == "fsdp2 dp8 mbs1 full nosync"


def test_time_shares_are_sorted_and_leave_out_crumbs() -> None:
    shares = time_shares({"tp_comm": 0.2, "compute": 1.5, "dp_comm": 0.299, "optimizer": 0.001, "other": 0.0}, 2.0)
    assert shares == ["compute 75", "dp 15", "tp 10"]


RULES = {
    "the last samples of each epoch are dropped": [("mca", "llamafactory"), ("megatron", "swift"), ("mca", "swift")],
    "they are a step of their own": [(one, who) for one in ("ddp", "fsdp2") for who in ("llamafactory", "swift")],
    "those of the whole run are dropped": [("fsdp2", "trinity")],
}


@pytest.mark.parametrize(
    ("samples", "epochs", "steps"),
    [
        (6400, 3.0, (300, 300, 300)),
        (6463, 3.0, (300, 303, 302)),
        (6464, 1.0, (101, 101, 101)),
        (6400, 0.5, (50, 50, 50)),
        (6400, 0.001, (1, 1, 1)),
        (10, 3.0, (3, 3, 1)),
        (100, 10.0, (10, 20, 15)),
        (None, 3.0, (None, None, None)),
    ],
)
def test_steps_are_counted_as_the_trainer_does(samples: int | None, epochs: float, steps: tuple[int, ...]) -> None:
    spec = make_spec(samples=samples, epochs=epochs)
    for count, ways in zip(steps, RULES.values(), strict=True):
        for backend, trainer in ways:
            plan = replace(make_plan(), trainer=trainer)
            plan = replace(plan, layout=replace(plan.layout, backend=backend))
            assert job_steps(spec, plan) == count, (backend, trainer)


def test_a_limit_of_steps_is_under_the_key_of_the_trainer() -> None:
    spec = make_spec(samples=6400, trainer={"max_steps": 7, "train_iters": 9})
    for backend, trainer, steps in (("mca", None, 7), ("ddp", "swift", 7), ("megatron", "swift", 9)):
        plan = replace(make_plan(), trainer=trainer)
        assert job_steps(spec, replace(plan, layout=replace(plan.layout, backend=backend))) == steps


def test_hours_count_steps_start_up_and_checkpoints() -> None:
    """A dense model on LLaMA-Factory: a checkpoint is bf16 weights for Hugging Face, plus 2 + 12 bytes on all nodes."""
    spec, plan = make_spec(samples=64 * 1000, epochs=1.0), make_plan(tp=2, step_s=3.6)
    effort = job_effort(spec, plan)
    rate, nodes, weights = spec.cluster.storage_bytes_per_s, spec.cluster.nodes, 2 * parameter_count(spec.model)
    assert effort.training_s == pytest.approx(3600)
    assert effort.pauses.start_up_s == pytest.approx(STARTS_S + weights / rate)
    final_s = weights / rate + weights / (nodes * rate)
    assert effort.pauses.checkpoints_s == pytest.approx(final_s + 5 * (final_s + 6 * weights / (nodes * rate)))
    assert effort.pauses.evaluation_s == 0
    assert effort.hours == pytest.approx((3600 + sum(effort.pauses)) / 3600)
    assert effort.gpu_hours == pytest.approx(32 * effort.hours)
    assert effort.band_hours[0] < effort.hours < effort.band_hours[1]


def test_faster_storage_takes_less() -> None:
    spec, plan = make_spec(samples=6400), make_plan()
    fast = replace(spec, cluster=replace(spec.cluster, storage_bytes_per_s=10e9))
    slow, quick = effort_of(spec, plan, 100), effort_of(fast, plan, 100)
    assert quick.pauses.checkpoints_s == pytest.approx(slow.pauses.checkpoints_s / 10)


@pytest.mark.parametrize(
    ("keys", "evaluations"),
    [
        ({"eval_strategy": "steps", "eval_steps": 10, "val_size": 640}, 20),
        ({"eval_strategy": "epoch", "val_size": 0.1}, 2),
        ({"val_size": 0.1}, 0),
    ],
)
def test_an_evaluation_is_forward_passes(keys: dict[str, Any], evaluations: int) -> None:
    spec = make_spec(samples=6400, epochs=2.0, trainer=keys)
    plan = replace(make_plan(step_s=3.0), trainer="llamafactory")
    plan = replace(plan, layout=replace(plan.layout, backend="fsdp2"))
    assert effort_of(spec, plan, 200).pauses.evaluation_s == pytest.approx(evaluations * 10 * 1.0)


@pytest.mark.parametrize(
    ("backend", "trainer", "setting"),
    [
        ("mca", "llamafactory", "trainer.save_steps=100"),
        ("fsdp2", "trinity", "trainer.trainer.save_interval=100"),
    ],
)
def test_checkpoints_that_take_much_of_a_job_are_told_with_what_saves_fewer(
    backend: str, trainer: str, setting: str
) -> None:
    spec, plan = make_spec(samples=6400, epochs=1.0), replace(make_plan(tp=1, step_s=3.6), trainer=trainer)
    plan = replace(plan, layout=replace(plan.layout, backend=backend))
    often = effort_of(spec, plan, 100)
    words = saving_words(often)
    assert words.startswith("All but one of the 5 checkpoints take ")
    assert words.endswith(f", beside 6 min of training: --set {setting} saves only one.")
    name, value = setting.removeprefix("trainer.").split("=")
    block, _, key = name.rpartition(".")
    keys = {key: int(value)}
    once = make_spec(samples=6400, epochs=1.0, trainer={block: keys} if block else keys)
    rarely = effort_of(once, plan, 100)
    assert often.saving.saved_s == pytest.approx(often.pauses.checkpoints_s - rarely.pauses.checkpoints_s)
    assert saving_words(rarely) == ""


def test_checkpoints_that_take_little_of_a_job_are_not_told() -> None:
    assert saving_words(effort_of(make_spec(), make_plan(step_s=3.6), 10_000)) == ""


def test_a_plan_without_files_has_start_up_alone() -> None:
    plan = replace(make_plan(), layout=replace(make_plan().layout, backend="megatron"), trainer=None)
    assert effort_of(make_spec(), plan, 100).pauses[1:] == (0, 0)


def test_without_samples_there_is_nothing_to_say() -> None:
    assert job_effort(make_spec(), make_plan()) is None
    assert effort_to_dict(None) == {}


def test_the_document_has_the_parts() -> None:
    view = effort_to_dict(effort_of(make_spec(), make_plan(step_s=3.6), 1000))["job_time"]
    parts = [view[key] for key in ("training_s", "start_up_s", "checkpoints_s", "evaluation_s")]
    assert (view["steps"], view["hours"]) == (1000, pytest.approx(sum(parts) / 3600, rel=1e-4))


def test_figures_stand_between_two_kinds_of_text() -> None:
    table = table_of("part", right=("s", "%"), last=("what",))
    table.add_row("gemm", "1.5", "50", "linear layers")
    text = printed(lambda console: console.print(table), width=60)
    assert text.splitlines()[-1].split() == ["gemm", "1.5", "50", "linear", "layers"]


def test_stages_are_named_alone_or_from_first_to_last() -> None:
    assert (stage_span([3]), stage_name([3])) == ("3", "Stage 3")
    assert (stage_span([3, 4, 5]), stage_name([3, 4, 5])) == ("3-5", "Stages 3 to 5")
