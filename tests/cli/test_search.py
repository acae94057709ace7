from typing import Any

import pytest

from tests.samples import make_ranking, make_spec
from topoplan.cli.search import searches
from topoplan.planner.plan import Ranking


def test_several_searches_share_one_line_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    def rank(spec: Any, *, progress: Any) -> Ranking:
        progress(1, 10)
        return make_ranking(spec=spec)

    monkeypatch.setattr("topoplan.planner.search.rank", rank)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(
        "topoplan.report.progress.ProgressLine.__call__", lambda self, done, total: shown.append((done, total))
    )
    with searches(4, fresh=True) as search_next:
        search_next(make_spec())
        search_next(make_spec(global_batch_size=128))
    assert shown == [(1, 40), (11, 40)]
