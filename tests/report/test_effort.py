import pytest

from tests.samples import make_plan, make_spec
from topoplan.report.effort import effort_of, effort_to_dict, job_effort, job_steps


@pytest.mark.parametrize(
    ("samples", "epochs", "steps"),
    [(6400, 3.0, 300), (6463, 3.0, 300), (6464, 1.0, 101), (6400, 0.5, 50), (6400, 0.001, 1), (10, 3.0, 3)],
)
def test_steps_are_whole_batches_times_epochs(samples: int, epochs: float, steps: int) -> None:
    assert job_steps(make_spec(samples=samples, epochs=epochs).job) == steps


def test_gpu_hours_count_every_gpu() -> None:
    effort = job_effort(make_spec(samples=64 * 1000, epochs=1.0).job, make_plan(tp=2, step_s=3.6))
    assert effort is not None
    assert effort.hours == pytest.approx(1.0)
    assert effort.gpu_hours == pytest.approx(32.0)


def test_without_samples_there_is_nothing_to_say() -> None:
    assert job_effort(make_spec().job, make_plan()) is None


def test_hours_of_a_number_of_steps() -> None:
    effort = effort_of(500, make_plan(tp=2, step_s=7.2))
    assert (effort.steps, effort.hours, effort.gpu_hours) == (500, pytest.approx(1.0), pytest.approx(32.0))


def test_the_document_has_the_job_time_where_it_is_known() -> None:
    assert effort_to_dict(None) == {}
    view = effort_to_dict(effort_of(1000, make_plan(step_s=3.6)))
    assert view == {"job_time": {"steps": 1000, "hours": 1.0, "gpu_hours": 32.0}}
