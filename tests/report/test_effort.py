from dataclasses import replace

import pytest

from tests.samples import make_plan, make_spec
from topoplan.report.effort import effort_of, effort_to_dict, job_effort, job_steps

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


def test_gpu_hours_count_every_gpu() -> None:
    effort = job_effort(make_spec(samples=64 * 1000, epochs=1.0), make_plan(tp=2, step_s=3.6))
    assert effort is not None
    assert effort.hours == pytest.approx(1.0)
    assert effort.gpu_hours == pytest.approx(32.0)


def test_without_samples_there_is_nothing_to_say() -> None:
    assert job_effort(make_spec(), make_plan()) is None


def test_hours_of_a_number_of_steps() -> None:
    effort = effort_of(500, make_plan(tp=2, step_s=7.2))
    assert (effort.steps, effort.hours, effort.gpu_hours) == (500, pytest.approx(1.0), pytest.approx(32.0))


def test_the_document_has_the_job_time_where_it_is_known() -> None:
    assert effort_to_dict(None) == {}
    view = effort_to_dict(effort_of(1000, make_plan(step_s=3.6)))
    assert view == {"job_time": {"steps": 1000, "hours": 1.0, "gpu_hours": 32.0}}
