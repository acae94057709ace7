"""Sentences about the lengths of the samples: what was assumed, how a plan handles them, what packing would gain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from topoplan.engines.registry import engine_of
from topoplan.operators.padding import is_padded_by_step, is_padded_to_seq_len, keeps_samples_apart, load_of
from topoplan.planner.plan import Plan
from topoplan.planner.predict import memory_of, plan_of
from topoplan.specs.case import Case
from topoplan.specs.lengths import Lengths
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

_MUCH = 0.5
"""Fraction of padding above which packing is recommended."""
_SAVES = 1 / 3
"""Fraction of the training time that packing has to save for it to be recommended where there is less padding."""


def data_notes(spec: Spec, plan: Plan) -> tuple[str, ...]:
    """Return where the lengths come from and how the plan handles them, or why they are unknown."""
    job, lengths = spec.job, spec.job.lengths
    if lengths is None and spec.data_note:
        return (f"every sequence is assumed to be {job.seq_len:,} tokens long: {spec.data_note}",)
    if lengths is None or plan.padding_share is None:
        return ()
    notes = [f"lengths: {known_lengths(lengths)}; {_made_of_it(case_of(spec, plan.layout.backend), plan)}"]
    cut = lengths.share_above(job.seq_len)
    if cut and not (job.packs and job.stage == "pt"):
        notes.append(f"{_some(cut)} of the sequences are longer than seq_len {job.seq_len:,} and are cut to it")
    if not job.packing and job.stage != "dpo":
        notes += _packing_note(spec, plan, plan.padding_share)
    if spec.model.vision and job.images_per_sequence and lengths.rule:
        notes.append("the data set has no images: set images_per_sequence: 0")
    return tuple(notes)


def known_lengths(lengths: Lengths) -> str:
    """Return in words whose lengths these are, how many, and how they were measured."""
    text = (
        f"{lengths.samples:,} sample{'' if lengths.samples == 1 else 's'} of {lengths.source},"
        f" mean {lengths.mean:,.0f} tokens, 99% within {lengths.quantile(0.99):,}"
    )
    said = [lengths.rule] if lengths.rule else []
    if lengths.stride > 1:
        said.append(f"one in {lengths.stride} measured")
    return f"{text} ({'; '.join(said)})" if said else text


def _made_of_it(case: Case, plan: Plan) -> str:
    job = case.job
    waste, packing = plan.padding_share or 0.0, job.packed
    if packing is not None and job.stage == "pt":
        return f"joined and cut into sequences of {job.seq_len:,}, attention across samples"
    if packing is not None:
        each = (job.lengths.samples if job.lengths else 0) / packing.sequences
        across = "within samples" if keeps_samples_apart(case) else "across samples (neat_packing keeps it within)"
        return f"packed, {each:.1f} samples per sequence, {waste:.1%} waste, attention {across}"
    padding = case.traits.padding
    if padding.removed:
        return "not padded: micro batches are filled with whole samples"
    if padding.end_to_end:
        return "not padded: the samples of a micro batch are concatenated"
    if is_padded_to_seq_len(padding, job, plan.layout):
        how = f"padded to {job.seq_len:,}"
    else:
        whole = "step" if is_padded_by_step(job, plan.layout) else "micro batch"
        positions = load_of(case, plan.layout).mean_positions
        how = f"padded to the longest sample of a {whole}, {positions:,.0f} on average"
    return f"{how}: {_some(waste)} of the positions are padding"


def _some(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or not share else "less than 1%"


def _packing_note(spec: Spec, plan: Plan, padding_share: float) -> Iterator[str]:
    """Yield advice to pack the samples where much of the work is padding, or where packing saves much time."""
    job, packed = spec.job, _packed(spec, plan)
    gain = ""
    if packed is not None and job.samples is not None:
        sequences, step_s = packed
        each = job.epochs / job.global_batch_size / 3600
        hours, unpacked_hours = step_s * sequences * each, plan.time.step_s * job.samples * each
        gain = f"; with this layout {_hours(hours)} instead of {_hours(unpacked_hours)}"
        saved = 1.0 - hours / unpacked_hours
        if padding_share <= _MUCH and saved > _SAVES:
            samples = job.samples / sequences * job.global_batch_size
            yield (
                f"samples are much shorter than seq_len: packing: true would save {saved:.0%} of the training{gain}; a"
                f" step then learns from {samples:,.0f} samples instead of {job.global_batch_size:,}"
            )
    if padding_share > _MUCH:
        yield f"more than half of the work is padding: set packing: true{gain}"


def _packed(spec: Spec, plan: Plan) -> tuple[int, float] | None:
    """Return the sequences and the step of the job with packed samples; None if the plan's layout cannot be used."""
    job, lengths = spec.job, spec.job.lengths
    if lengths is None or job.samples is None:
        return None
    there = replace(job, packing=True, lengths=replace(lengths, samples=job.samples))
    packing = there.packed
    if packing is None or packing.sequences < job.global_batch_size:
        return None
    then = replace(spec, job=replace(there, samples=packing.sequences))
    case = case_of(then, plan.layout.backend)
    if engine_of(plan.layout.backend).verdict(case, plan.layout, searched=True):
        return None
    memory = memory_of(case, plan.layout)
    if not memory.fits:
        return None
    return packing.sequences, plan_of(then, case, plan.layout, memory).time.step_s


def _hours(value: float) -> str:
    return f"{value:,.1f} h" if value >= 1 else f"{60 * value:,.1f} min"
