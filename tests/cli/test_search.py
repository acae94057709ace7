import gc
from typing import Any

import pytest

from tests.samples import make_spec
from topoplan.cli.search import search, searches


def test_the_collector_rests_during_a_search_and_runs_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    running = []
    monkeypatch.setattr("topoplan.planner.search.rank", lambda spec, **options: running.append(gc.isenabled()))
    search(make_spec())
    with searches(2) as search_next:
        search_next(make_spec())
        search_next(make_spec())
    assert running == [False] * 3
    assert gc.isenabled()


def test_the_collector_runs_again_after_a_search_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(spec: Any, **options: Any) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr("topoplan.planner.search.rank", fail)
    with searches(1) as search_next, pytest.raises(ValueError, match="a defect"):
        search_next(make_spec())
    assert gc.isenabled()


def test_several_searches_share_one_line_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    def rank(spec: Any, *, progress: Any) -> None:
        progress(1, 10)

    monkeypatch.setattr("topoplan.planner.search.rank", rank)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(
        "topoplan.report.progress.ProgressLine.__call__", lambda self, done, total: shown.append((done, total))
    )
    with searches(4) as search_next:
        search_next(make_spec())
        search_next(make_spec())
    assert shown == [(1, 40), (11, 40)]
