from dataclasses import replace
from typing import Any

import pytest

from tests.samples import make_plan, make_spec
from topoplan.operators.params import parameter_count
from topoplan.planner.effort import STARTS_S, effort_of, job_effort, job_steps
from topoplan.report.effort import effort_to_dict

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
