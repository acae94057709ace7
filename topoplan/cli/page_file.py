"""`--html FILE`: write a page of plans as a single file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from topoplan.cli.options import option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from topoplan.planner.plan import Plan, Ranking
    from topoplan.specs.spec import Spec

Html = Annotated[str | None, option("--html FILE", "Write a page to look at in a browser: one file with all in it.")]


def write_ranking(path: str, ranking: Ranking, *, top: int, words: Sequence[str], assumed: Sequence[str]) -> None:
    """Write a page of the plans shown, with the account, the pictures and the files of each."""
    from topoplan.page.document import page_to_dict

    page = page_to_dict(ranking, top=top, words=words, assumed=assumed)
    _write(path, page, ranking.spec, ranking.plans[:top], words)


def write_plans(path: str, spec: Spec, plans: Sequence[Plan], *, words: Sequence[str]) -> None:
    """Write a page of one or two given plans."""
    from topoplan.page.document import plans_page_to_dict

    named = [*words, "--plan", plans[0].id, *(part for plan in plans[1:] for part in ("--versus", plan.id))]
    _write(path, plans_page_to_dict(spec, plans, named), spec, plans, words)


def _write(path: str, page: dict[str, Any], spec: Spec, plans: Sequence[Plan], words: Sequence[str]) -> None:
    from pathlib import Path

    from topoplan.bundle.write import write_file
    from topoplan.cli.output import print_written
    from topoplan.page.document import details_to_dict
    from topoplan.page.html import MARK, answers_html

    text = answers_html(page, ((plan.id, details_to_dict(spec, plan, words)) for plan in plans))
    write_file(Path(path), text, mark=MARK, writer="--html")
    print_written(path)
