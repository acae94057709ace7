"""Write docs/accuracy.md: the runs that predictions are graded on, the errors, and what nobody has measured."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from topoplan.planner.bands import NARROWEST, coverages
from topoplan.planner.validate import ALLOCATED, BY_STAGE, RESERVED, THROUGHPUT, Spread, Validation
from topoplan.report.profile import catalog_profiles, kinds_text, memory_bands, time_bands
from topoplan.report.text import counted
from topoplan.report.validation import (
    figure_name,
    fit_line,
    fit_sentences,
    percent,
    ranking_sentence,
    signed_percent,
)
from topoplan.specs.gpu_profile import FEW_FIGURES, WIDER_FOR_FEW, WIDER_FOR_NONE, WIDEST
from topoplan.trainers.templating import render

MARK = "<!-- written by `topoplan validate -o`"
_WIDTH = 120
_OF_MEMORY = (ALLOCATED, BY_STAGE, RESERVED)
_OTHERS = (
    # planner, source of the rows, kind of figure, its median and worst error in percent, what it was calibrated on
    ("SimuMax 4dcaae5", "SimuMax B200", ALLOCATED, 0.4, 0.7, "this machine's kernels (its B200 release table)"),
    ("SimuMax 4dcaae5", "SimuMax B200", f"{THROUGHPUT} bf16", 6.5, 13.5, "the same"),
    ("SimuMax 4dcaae5", "SimuMax A100 PCIe", ALLOCATED, 1.3, 2.9, "this machine's kernels (docs/FULL_RESULTS.md)"),
    ("SimuMax 4dcaae5", "SimuMax A100 PCIe", f"{THROUGHPUT} bf16", 1.6, 3.1, "the same"),
    (
        "Calculon caa4b11",
        "Korthikanti et al. 2022",
        f"{THROUGHPUT} bf16",
        1.3,
        3.3,
        "Selene, these runs among others (`calculon llm-validation`)",
    ),
)
"""Accuracy claims of other planners for rows that are graded here too."""


def accuracy_page(graded: Validation) -> str:
    """Return the page as Markdown; it depends only on the graded runs and the formulas."""
    memory = [spread for spread in graded.spreads if spread.kind in _OF_MEMORY]
    over = (*graded.fits.out_of_memory_but_fit, *graded.fits.ran_but_over)
    context = {
        "mark": MARK,
        "runs": counted(graded.runs, "run"),
        "figures": counted(len(graded.figures), "figure"),
        "memory": _spread_table(memory),
        "memory_rows": _memory_rows(graded),
        "throughput": _spread_table(spread for spread in graded.spreads if spread.kind not in _OF_MEMORY),
        "order": ranking_sentence(graded.ranking) if graded.ranking else "",
        "fits": " ".join(fit_sentences(graded)),
        "over": "\n".join(f"- {fit_line(grade)}" for grade in over),
        "bands": _inside_the_bands(graded),
        "others": _beside_others(graded),
        "left_out": counted(sum(graded.left_out.values()), "row"),
        "reasons": _table(("rows", "reason"), ((str(n), why) for why, n in graded.left_out.items()), right=[0]),
        "failed": "\n".join(f"- {name}: {error}" for name, error in graded.failed.items()),
        "few": FEW_FIGURES,
        "wider_for_few": f"{WIDER_FOR_FEW:g}",
        "wider_for_none": f"{WIDER_FOR_NONE:g}",
        "narrowest": {key: f"{100 * width:.0f}%" for key, width in NARROWEST.items()},
        "widest": f"{100 * WIDEST:.0f}%",
        "profiles": _profiles(),
    }
    blocks = re.split(r"\n{2,}", render("accuracy.md.j2", context).strip())
    return "\n\n".join(map(_wrapped, blocks)) + "\n"


def _wrapped(block: str) -> str:
    """Wrap a paragraph or list items at the page width; headings and tables stay unchanged."""
    if block.startswith(("#", "|", "<")):
        return block
    return "\n".join(
        textwrap.fill(
            part,
            _WIDTH,
            subsequent_indent="  " if part.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for part in re.split(r"\n(?=- )", block)
    )


def _inside_the_bands(graded: Validation) -> str:
    rows = (
        [
            f"`{one.key}`" if one.key.endswith("_band") else f"all of {one.key}",
            str(one.figures),
            percent(one.inside / one.figures),
            percent(one.inside_without_source / one.figures),
            percent(one.median_half_width),
        ]
        for one in coverages(graded.figures)
    )
    return _table(("band", "n", "inside", "without its source", "median half width"), rows, right=[1, 2, 3, 4])


def _beside_others(graded: Validation) -> str:
    rows = []
    for planner, family, kind, median, worst, calibrated in _OTHERS:
        ours = next((one for one in graded.spreads if (one.family, one.kind) == (family, kind)), None)
        if ours is not None:
            figures = [percent(ours.median), percent(ours.worst), planner, f"{median:.1f}%", f"{worst:.1f}%"]
            rows.append([family, kind, str(ours.count), *figures, calibrated])
    header = ("rows", "figure", "n", "median", "worst", "planner", "its median", "its worst", "calibrated on")
    return _table(header, rows, right=[2, 3, 4, 6, 7]) if rows else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Return a Markdown table; `right` lists the right-aligned columns."""
    rule = ["---:" if column in right else "---" for column in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def _spread_table(spreads: Iterable[Spread]) -> str:
    rows = (
        [
            spread.family,
            spread.kind,
            str(spread.count),
            percent(spread.median),
            percent(spread.at_90_percent),
            percent(spread.worst),
            signed_percent(spread.signed_median),
        ]
        for spread in spreads
    )
    return _table(("source", "figure", "n", "median", "90%", "worst", "signed median"), rows, right=range(2, 7))


def _memory_rows(graded: Validation) -> str:
    rows = (
        [
            f"`{figure.id}`",
            figure_name(figure),
            f"{figure.predicted:.2f}",
            f"{figure.measured:.2f}",
            signed_percent(figure.error),
        ]
        for figure in graded.figures
        if figure.kind in _OF_MEMORY
    )
    return _table(("run", "figure", "predicted", "measured", "error"), rows, right=range(2, 5))


def _profiles() -> str:
    rows = (
        [profile.name, profile.kin or "-", memory_bands(profile), time_bands(profile), kinds_text(profile)]
        for profile, _ in catalog_profiles()
    )
    return _table(("GPU", "kin", "memory", "time", "constants"), rows)
