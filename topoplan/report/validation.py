"""Predictions graded against measured runs, as JSON (`topoplan.validate/1`), tables, and docs/accuracy.md."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from topoplan.planner.bands import NARROWEST, Coverage, coverages
from topoplan.planner.validate import (
    ALLOCATED,
    BY_STAGE,
    RESERVED,
    THROUGHPUT,
    Figure,
    FitGrade,
    RankingGrade,
    Spread,
    Validation,
)
from topoplan.report.dump import picked, plain
from topoplan.report.profile import catalog_profiles, kinds_text, memory_bands, time_bands
from topoplan.report.tables import apart, bullets, paragraph, table_of
from topoplan.report.text import counted, significant
from topoplan.specs.gpu_profile import FEW_FIGURES, WIDER_FOR_FEW, WIDER_FOR_NONE, WIDEST
from topoplan.trainers.templating import render

_MOST_REASONS = 3


def validation_to_dict(graded: Validation) -> dict[str, Any]:
    """Return all grades. Errors are fractions; memory is in GiB."""
    fits = graded.fits
    return {
        "schema": "topoplan.validate/1",
        "runs": graded.runs,
        "spreads": [
            picked(spread, "source=family kind n=count median p90=at_90_percent worst signed_median")
            for spread in graded.spreads
        ],
        "rows": [
            picked(figure, "id source=family kind stage unit predicted measured error half_width")
            for figure in graded.figures
        ],
        "bands": [plain(one) for one in coverages(graded.figures)],
        "ranking": plain(graded.ranking),
        "fits": {
            **picked(fits, "ran ran_unstated"),
            "ran_but_over": [plain(grade) | {"source": grade.family} for grade in fits.ran_but_over],
            "out_of_memory": fits.out_of_memory,
            "out_of_memory_but_fit": [plain(grade) | {"source": grade.family} for grade in fits.out_of_memory_but_fit],
        },
        "failed": [{"id": name, "error": error} for name, error in graded.failed.items()],
        "left_out": [{"reason": reason, "n": count} for reason, count in graded.left_out.items()],
    }


def print_validation(console: Console, graded: Validation, *, rows: bool) -> None:
    """Print the errors by source and kind, the order of layouts and the fits; with `rows`, every figure."""
    paragraph(
        console, f"{counted(graded.runs, 'measured run')}, {counted(len(graded.figures), 'figure')}.", style="bold"
    )
    if graded.spreads:
        apart(console, _spreads(graded))
        apart(
            console,
            "Error: predicted / measured - 1. median, 90%, worst: of its absolute value; signed: its median with the"
            " sign, positive when predictions are high. allocated: on the fullest GPU.",
            style="dim",
        )
    if covered := coverages(graded.figures):
        apart(console, _bands_sentence(covered))
    if graded.ranking is not None:
        apart(console, ranking_sentence(graded.ranking))
    console.print()
    for sentence in fit_sentences(graded):
        paragraph(console, sentence)
    bullets(console, (fit_line(grade) for grade in _held_first(graded)))
    if rows:
        apart(console, _rows(graded.figures))
    if graded.failed:
        console.print(f"\n{counted(len(graded.failed), 'run')} could not be predicted:")
        bullets(console, (f"{name}: {error}" for name, error in graded.failed.items()))
    if graded.left_out:
        reasons = list(graded.left_out.items())
        shown = "; ".join(f"{reason} ({count})" for reason, count in reasons[:_MOST_REASONS])
        more = f"; {counted(len(reasons) - _MOST_REASONS, 'more reason')} in --json" if reasons[_MOST_REASONS:] else ""
        apart(console, f"{counted(sum(graded.left_out.values()), 'row')} of the sources are not graded: {shown}{more}.")


def _bands_sentence(covered: Sequence[Coverage]) -> str:
    parts = [
        f"of {one.figures} {one.key} figures, {one.inside / one.figures:.0%} are within the printed band, and"
        f" {one.inside_without_source / one.figures:.0%} within the band that the other sources alone would give"
        for one in covered
        if one.key in ("time", "memory")
    ]
    return f"Bands: {'; '.join(parts)}."


def ranking_sentence(ranking: RankingGrade) -> str:
    """Describe how well the predicted order of layouts matches the measured one."""
    return (
        f"Order of layouts: {ranking.pairs_in_order} of {ranking.pairs} pairs are as measured, in"
        f" {counted(ranking.groups, 'group')} of runs that differ only in their layout; choosing the predicted winner"
        f" loses {ranking.mean_loss:.1%} of throughput on average and {ranking.worst_loss:.1%} at worst."
    )


def fit_sentences(graded: Validation) -> list[str]:
    """Compare the runs that completed or ran out of memory with the predictions of what fits."""
    fits = graded.fits
    held = sum(not grade.unstated for grade in fits.ran_but_over)
    apart = len(fits.ran_but_over) - held
    sentences = [
        f"Fit: of {counted(fits.ran, 'run')} that completed and whose source states how memory was saved, {held} are"
        " predicted to exceed the card at margin 0."
    ]
    if fits.ran_unstated:
        sentences.append(
            f"Of {fits.ran_unstated} whose source does not state it (recomputation is assumed off), {apart} are."
        )
    if fits.out_of_memory:
        sentences.append(
            f"Of {fits.out_of_memory} that ran out of memory, {len(fits.out_of_memory_but_fit)} are predicted to fit at"
            " the default margin."
        )
    else:
        sentences.append("No run of this set ran out of memory.")
    return sentences


def _held_first(graded: Validation) -> list[FitGrade]:
    over = sorted(graded.fits.ran_but_over, key=lambda grade: bool(grade.unstated))
    return [*graded.fits.out_of_memory_but_fit, *over]


def fit_line(grade: FitGrade) -> str:
    """Describe one run whose outcome contradicts the prediction of whether it fits."""
    line = f"{grade.id}: {grade.device_gib:.1f} GiB predicted, {grade.capacity_gib:.1f} on the card"
    return f"{line}; not stated: {', '.join(grade.unstated)}" if grade.unstated else line


def _spreads(graded: Validation) -> Table:
    table = table_of("source", "figure", right=("n", "median", "90%", "worst", "signed"))
    for spread in graded.spreads:
        table.add_row(*_spread_cells(spread))
    return table


def _spread_cells(spread: Spread) -> list[str]:
    errors = (percent(error) for error in (spread.median, spread.at_90_percent, spread.worst))
    return [spread.family, spread.kind, str(spread.count), *errors, signed_percent(spread.signed_median)]


def _rows(figures: Sequence[Figure]) -> Table:
    table = table_of("run", "figure", right=("predicted", "measured", "error"))
    for figure in figures:
        table.add_row(
            figure.id,
            figure_name(figure),
            significant(figure.predicted, 4),
            significant(figure.measured, 4),
            signed_percent(figure.error),
        )
    return table


def figure_name(figure: Figure) -> str:
    """Return `allocated GiB, stage 1` or `tokens/s/GPU bf16`."""
    kind, _, precision = figure.kind.partition(" ")
    if kind == "throughput":
        return f"{figure.unit} {precision}"
    return f"allocated GiB, stage {figure.stage}" if figure.stage is not None else f"{figure.kind} GiB"


def percent(fraction: float) -> str:
    """Format a fraction as a percentage with one decimal."""
    return f"{100 * fraction:.1f}%"


def signed_percent(fraction: float) -> str:
    """Format a fraction as a signed percentage with one decimal; what rounds to zero has no sign."""
    text = f"{100 * fraction:+.1f}%"
    return text.lstrip("+-") if float(text[:-1]) == 0 else text


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
    rule = ["---:" if column in right else "---" for column in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def _spread_table(spreads: Iterable[Spread]) -> str:
    header = ("source", "figure", "n", "median", "90%", "worst", "signed median")
    return _table(header, map(_spread_cells, spreads), right=range(2, 7))


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
