"""Running the search with its progress on the terminal."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topoplan.planner.plan import Ranking
    from topoplan.specs.spec import Spec


def search(spec: Spec, *, keep_rejected: bool = False) -> Ranking:
    """`planner.search.rank`, with a line on stderr when it takes long and a person is looking."""
    from topoplan.planner.search import rank
    from topoplan.report.progress import ProgressLine

    # A search makes many small objects and no cycles: collecting garbage costs a tenth of its time and frees nothing.
    gc.disable()
    try:
        with ProgressLine() as progress:
            return rank(spec, progress=progress if progress.visible else None, keep_rejected=keep_rejected)
    finally:
        gc.enable()
