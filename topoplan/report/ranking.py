"""The tables printed by `topoplan rank`: the best plans, and the rejected layouts."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from itertools import pairwise

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from topoplan.planner.effort import job_effort, job_steps
from topoplan.planner.oddities import machine_note
from topoplan.planner.plan import Plan, Ranking, Rejection
from topoplan.planner.rank import TAGS, TIE, tags_of
from topoplan.report.answer import Answer
from topoplan.report.tables import GAP, Column, apart, bullets, fitting, lines_of, paragraph
from topoplan.report.text import (
    band,
    counted,
    counts_line,
    gib,
    hours,
    layout_label,
    pauses_words,
    reason_line,
    saving_words,
    significant,
    spec_line,
    time_shares,
    trainer_title,
)
from topoplan.specs.spec import Spec
from topoplan.trainers.registry import TRAINERS
from topoplan.units import GIB

_MIN_LAYOUT = 17
_MIN_SHARES = 12
_WARNINGS = 4
"""Limit on the warnings shown; those of recommended plans are always shown."""
_NOTES = 3
"""Limit on the alternatives, and on the other backends and trainers, that are shown; --json has all of them."""


def print_ranking(console: Console, ranking: Ranking, answer: Answer) -> None:
    """Print cluster, model and counts, then the plans shown, then notes for and against the alternatives."""
    plans = answer.shown
    paragraph(console, f"{spec_line(ranking.spec)}. {counts_line(ranking)}.", style="bold")
    if note := machine_note(ranking.spec.cluster):
        paragraph(console, f"{note[0].upper()}{note[1:]}.")
    room = console.width - len(str(len(plans))) - 2 * GAP
    # Two text columns share the width that the figures leave; if it is too little, figure columns are dropped.
    figures = _figures(ranking.spec, plans, ascii_only=console.options.ascii_only)
    figures = fitting(figures, room - _MIN_LAYOUT - _MIN_SHARES)
    apart(console, _table(plans, figures, room))
    apart(console, _legend(ranking.spec, plans, {column.header.strip() for column in figures}), style="dim")
    if ranking.data_notes:
        console.print("\nData, as plan 1 reads it:")
        bullets(console, ranking.data_notes)
    if ranking.profile_notes:
        console.print("\nCalibrated profile:")
        bullets(console, ranking.profile_notes)
    told = _print_warnings(console, answer)
    most = len(ranking.crossings) if ranking.spec.backends else _NOTES  # all if backends were requested
    _print_some(console, "Other backends and trainers, compared with plan 1", ranking.crossings, most)
    notes = [_without(told, note) for note in ranking.notes]
    _print_some(console, "Common alternatives, compared with plan 1", notes, _NOTES)
    if ranking.ways_out:
        from topoplan.report.ways_out import print_ways_out

        console.print()
        print_ways_out(console, ranking)


def _print_some(console: Console, title: str, lines: Sequence[str], most: int) -> None:
    """Print the first `most` lines under a title that says how many more there are."""
    if not lines:
        return
    more = f" ({len(lines) - most} more in --json)" if len(lines) > most else ""
    console.print(f"\n{title}{more}:")
    bullets(console, lines[:most])


def _table(plans: Sequence[Plan], figures: Sequence[Column], room: int) -> Table:
    ranks = [str(rank) for rank in range(1, len(plans) + 1)]
    labels = [layout_label(plan.layout) for plan in plans]
    shares = [time_shares(plan.time.parts_s, plan.time.step_s) for plan in plans]
    left_over = room - sum(column.width for column in figures)
    layout_width, shares_width = _text_widths(
        left_over, max(map(len, labels)), max(len(", ".join(entries)) for entries in shares)
    )

    table = Table(box=SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column(Text("\n#"), justify="right")
    table.add_column(Text("\nlayout"), width=layout_width)
    for column in figures:
        table.add_column(Text(column.header), justify="left" if column.left else "right", no_wrap=True)
    if shares_width:
        table.add_column(Text("spent on,\n% of step"), width=shares_width)
    for row in range(len(plans)):
        label = lines_of(labels[row], layout_width)
        cells = [Text(ranks[row]), Text("\n".join(label)), *(column.cells[row] for column in figures)]
        if shares_width:
            cells.append(Text(_fitting(shares[row], shares_width, len(label))))
        table.add_row(*cells, style="bold" if row == 0 else None)
    return table


def _text_widths(space: int, layout: int, shares: int) -> tuple[int, int]:
    """Return the widths of the layout and time-share columns, from the widths of their text; 0 drops a column. A layout
    on a single line has priority, because `explain` shows the shares too."""
    if space - layout >= _MIN_SHARES:
        return layout, min(shares, space - layout)
    return min(layout, max(_MIN_LAYOUT, space + GAP)), 0


def _fitting(entries: Sequence[str], width: int, lines: int) -> str:
    """Return the leading entries (such as `gemm 64`) that fit in `lines` lines, none split."""
    text = [""]
    for entry in entries:
        joined = f"{text[-1]}, {entry}" if text[-1] else entry
        if len(joined) <= width:
            text[-1] = joined
        elif len(text) < lines and len(entry) <= width:
            text.append(entry)
        else:
            break
    return "\n".join(text)


def _figures(spec: Spec, plans: Sequence[Plan], *, ascii_only: bool) -> list[Column]:
    capacity = gib(max((plan.memory.capacity_bytes for plan in plans), default=0.0))
    trainers, risks = [trainer_title(plan) for plan in plans], [tags_of(plan) for plan in plans]
    columns = []
    if len({*trainers}) > 1:  # otherwise the legend has it
        columns.append(Column(header="\ntrainer", cells=tuple(map(Text, trainers)), left=True))
    memory = (
        Text(gib(plan.memory.device_bytes), style="yellow" if "tight" in tags else "")
        for plan, tags in zip(plans, risks, strict=True)
    )
    columns.append(Column(header=f"GiB of\n{capacity}", cells=tuple(memory)))
    if any(plan.memory.host_bytes for plan in plans):
        host = (Text(f"{plan.memory.host_bytes / GIB:,.0f}" if plan.memory.host_bytes else "") for plan in plans)
        columns.append(Column(header="host\nGiB", cells=tuple(host)))
    columns += [
        Column(header="step\ns", cells=tuple(Text(significant(plan.time.step_s)) for plan in plans)),
        Column(header="\nband", cells=tuple(Text(band(plan.time, ascii_only=ascii_only)) for plan in plans), drop=4),
        Column(header="tok/s\n/GPU", cells=tuple(Text(f"{plan.tokens_per_s_per_gpu:,.0f}") for plan in plans)),
    ]
    if any(risks):
        columns.append(Column(header="\nrisk", cells=tuple(Text("\n".join(tags)) for tags in risks), left=True, drop=1))
    columns.append(Column(header="\nMFU", cells=tuple(Text(f"{100 * plan.mfu:.0f}%") for plan in plans), drop=2))
    efforts = [job_effort(spec, plan) for plan in plans]
    known = [effort for effort in efforts if effort is not None]
    if known:
        columns.append(Column(header="\nhours", cells=tuple(Text(hours(effort.hours)) for effort in known), drop=3))
        columns.append(Column(header="\nGPU-h", cells=tuple(Text(hours(effort.gpu_hours)) for effort in known), drop=5))
    return columns


def _legend(spec: Spec, plans: Sequence[Plan], columns: Container[str]) -> str:
    """Explain the words of the table; `columns` are the headers of the figures shown."""
    if spec.cluster.margin is not None:
        margin = f"{spec.cluster.margin:.0%} of the card must stay free"
    else:
        margin = (
            f"{plans[0].memory.margin_bytes / plans[0].memory.device_bytes:.0%} more must also fit" if plans else ""
        )
    text = f"GiB: what the fullest GPU needs, as nvidia-smi shows it{'; ' if margin else ''}{margin}."
    text += f" step: one optimizer step{', and its error band' if 'band' in columns else ''}."
    if "MFU" in columns:
        text += " MFU: without recomputation"
        text += "." if spec.job.finetuning == "full" else " and without gradients of frozen weights."
    text += _trainer_words(spec, plans)
    text += "".join(f" {words}" for words in _layout_words(plans))
    alike = (pair for pair in pairwise(plans) if len({bool(plan.caveats) for plan in pair}) == 1)
    if any(one.time.step_s > other.time.step_s for one, other in alike):
        text += f" Plans within {TIE:.0%} of each other are ordered by memory."
    met = {tag for plan in plans for tag in tags_of(plan)} if "risk" in columns else ()
    text += "".join(f" {tag}: {meaning}." for tag, meaning in TAGS.items() if tag in met)
    job = spec.job
    counts = sorted({steps for plan in plans if (steps := job_steps(spec, plan)) is not None})
    if job.lengths is not None:
        text += f" {'tok/s and MFU do' if 'MFU' in columns else 'tok/s does'} not count padding."
    if any(plan.memory.host_bytes for plan in plans):
        text += " host GiB: main memory that the plan needs on each node."
    if counts and job.samples is not None and "hours" in columns:
        epochs = "1 epoch" if job.epochs == 1 else f"{job.epochs:g} epochs"
        text += f" hours: {_steps_words(counts)}, {counted(job.samples, 'sample')} x {epochs}"
        if effort := job_effort(spec, plans[0]):
            text += f", and {pauses_words(spec, effort)}. {saving_words(effort)}".rstrip()
    return text


def _trainer_words(spec: Spec, plans: Sequence[Plan]) -> str:
    """Return the trainer of all plans, if it is neither the usual one nor the one that was asked for."""
    titles = {trainer_title(plan) for plan in plans}
    is_obvious = spec.trainer is not None or titles & {TRAINERS[0].title, "-"}
    return f" All plans are for {''.join(titles)}." if len(titles) == 1 and not is_obvious else ""


def _steps_words(counts: Sequence[int]) -> str:
    """Format the plans' step counts, which differ because trainers count an epoch's last samples differently."""
    *fewer, most = counts
    return "".join(f"{count:,} or " for count in fewer) + counted(most, "step")


def _layout_words(plans: Sequence[Plan]) -> list[str]:
    """Explain the words of the layout column that are not self-explanatory, each by its first occurrence."""
    shown = [word for plan in plans for word in layout_label(plan.layout).split()]
    meanings = (
        (r"nosp", "no sequence parallelism"),
        (r"sel:.+", "the parts of each layer that are recomputed"),
        (r"full:block1", "1 layer of each chunk is recomputed"),
        (r"full:block(?!1$)(\d+)", "{} layers of each chunk are recomputed"),
        (r"full:uniform(\d+)", "all layers are recomputed, {} at a time"),
        (r"ends(\d+)\+(\d+)", "{} layers in the first chunk, {} in the last"),
        (r"offload(\d+)", "{}% of the optimizer states in host memory"),
        (r"nosync", "full gradients on each GPU, reduced only after the last micro batch"),
    )
    sentences = []
    for form, meaning in meanings:
        example = next(filter(None, (re.fullmatch(form, word) for word in shown)), None)
        if example:
            sentences.append(f"{example[0]}: {meaning.format(*example.groups())}.")
    return sentences


def _without(told: Sequence[str], note: str) -> str:
    """Return a note on an alternative without a caveat that is `told` above it."""
    return next((note.removesuffix(f": {warning}") for warning in told if note.endswith(f": {warning}")), note)


def _print_warnings(console: Console, answer: Answer) -> Sequence[str]:
    """Print each warning once, with the ranks of its plans: all of the recommended plans' and some of the rest.

    Return the warnings printed.
    """
    ranks: dict[str, list[int]] = {}
    for rank, warnings in enumerate(answer.warnings, start=1):
        for warning in warnings:
            ranks.setdefault(warning, []).append(rank)
    recommended = {1, answer.safe.rank if answer.safe else 1}
    first = [warning for warning, which in ranks.items() if recommended & {*which}]
    others = [warning for warning in ranks if warning not in first]
    lines = [
        warning
        if len(ranks[warning]) == len(answer.shown)
        else f"plan{'s' if len(ranks[warning]) > 1 else ''} {', '.join(map(str, ranks[warning]))}: {warning}"
        for warning in (*first, *others)
    ]
    most = max(_WARNINGS, len(first))
    _print_some(console, "Warnings", lines, most)
    return [*first, *others][:most]


_EXAMPLES = 5


def print_rejected(console: Console, ranking: Ranking) -> None:
    """Print each rule with its number of rejected layouts and the first few of them; `--json` has all."""
    by_rule: dict[str, list[Rejection]] = {}
    for rejection in ranking.rejected:
        by_rule.setdefault(rejection.rule, []).append(rejection)
    if not by_rule:
        console.print("\nNo layout was rejected.")
    for rule, rejections in sorted(by_rule.items(), key=lambda item: (item[0] != "memory", -len(item[1]), item[0])):
        shown = rejections[:_EXAMPLES]
        more = f", the first {len(shown)}" if len(shown) < len(rejections) else ""
        console.print(f"\nRejected by {rule}: {counted(len(rejections), 'layout')}{more}", soft_wrap=True)
        bullets(console, (reason_line(rejection) for rejection in shown))
