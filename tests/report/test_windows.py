from itertools import pairwise

import pytest

from tests.report.timelines import line_of
from topoplan.report.windows import windows


@pytest.mark.parametrize("units", [20, 60, 200, 1440])
@pytest.mark.parametrize("batch", [16, 64, 1024])
def test_what_is_drawn_fits_and_is_the_beginning_and_the_end(units: int, batch: int) -> None:
    _, _, line = line_of(pp=4, job={"global_batch_size": batch})
    shown, unit_s = windows(line, units, 1.0)
    assert sum(window.end_s - window.start_s for window in shown) <= units * unit_s * (1 + 1e-6)
    assert shown[0].start_s == 0.0
    assert shown[-1].end_s == pytest.approx(line.total_s)
    assert all(before.end_s < after.start_s for before, after in pairwise(shown))


def test_a_short_step_is_drawn_whole_and_a_long_one_broken_in_its_steady_state() -> None:
    _, _, short = line_of(pp=4, job={"global_batch_size": 16})
    assert len(windows(short, 1440, 16.0)[0]) == 1
    _, _, long = line_of(pp=4, job={"global_batch_size": 1024})
    shown, _ = windows(long, 1440, 16.0)
    assert len(shown) == 2
    assert shown[0].end_s >= long.fill_s
    assert shown[1].start_s <= long.drain_s
