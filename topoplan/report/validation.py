"""Predictions graded against measured runs, as JSON (`topoplan.validate/1`) and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from topoplan.planner.bands import Coverage, coverages
from topoplan.planner.validate import Figure, FitGrade, RankingGrade, Validation
from topoplan.report.dump import picked, plain
from topoplan.report.tables import apart, bullets, paragraph, table_of
from topoplan.report.text import counted, significant

SCHEMA = "topoplan.validate/1"
_MOST_REASONS = 3


def validation_to_dict(graded: Validation) -> dict[str, Any]:
    """Return all grades. Errors are fractions; memory is in GiB."""
    fits = graded.fits
    return {
        "schema": SCHEMA,
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
        table.add_row(
            spread.family,
            spread.kind,
            str(spread.count),
            percent(spread.median),
            percent(spread.at_90_percent),
            percent(spread.worst),
            signed_percent(spread.signed_median),
        )
    return table


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
