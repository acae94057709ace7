"""What a sequence of the batch holds: tokens of samples, and the padding that a layout adds.

What is padded to which length is a trait of the trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import sqrt
from typing import NamedTuple

from topoplan.layout.layout import Layout
from topoplan.specs.case import Case
from topoplan.specs.job import Job
from topoplan.specs.lengths import Lengths, token_extent
from topoplan.specs.traits import Padding


def pad_multiple(padding: Padding, job: Job) -> int:
    """Return the multiple that the length of a micro-batch, or of a step, is rounded up to."""
    return padding.pt_multiple if padding.pt_multiple and job.stage == "pt" else padding.multiple


def is_padded_to_seq_len(padding: Padding, job: Job, layout: Layout) -> bool:
    """Return whether every sequence has seq_len positions: if packed, or if the trainer pads so with experts."""
    if job.packs:
        return True
    return padding.to_seq_len_with_experts and layout.ep > 1 and job.stage != "pt"


class Load(NamedTuple):
    """One sequence of the batch, on average."""

    positions: float
    """Token positions, padding included, on the data-parallel rank that a step waits for."""
    extent: float
    """Length of the sequence that attention runs over, averaged over positions."""
    mean_positions: float
    """Token positions, averaged over all ranks."""


class Content(NamedTuple):
    """Tokens of samples in one sequence of the batch, on average."""

    tokens: float
    extent: float
    """Length of the sequence that a token attends within, averaged over tokens."""


def keeps_samples_apart(case: Case) -> bool:
    """Return whether attention stays within samples of a packed sequence, always or because the job says so."""
    job = case.job
    return job.keeps_samples_apart or (case.traits.padding.packs_apart and job.packs and job.stage != "pt")


def content_of(job: Job, *, keeps_samples_apart: bool = False) -> Content:
    """Return the tokens that the mathematics of a step covers, for any layout; seq_len tokens if lengths are unknown.

    `keeps_samples_apart`: attention stays within samples because the trainer always does so, even if the job does not
    ask for it.
    """
    whole = Content(tokens=job.seq_len, extent=job.seq_len)
    if job.lengths is None:
        return whole
    tokens, extent = _length_means(job.lengths, job.seq_len)
    if job.packed is None:
        return Content(tokens=tokens, extent=extent)
    return Content(
        tokens=job.packed.fill * job.seq_len,
        extent=extent if keeps_samples_apart or job.keeps_samples_apart else whole.extent,
    )


def tokens_per_step(job: Job) -> float:
    """Return the tokens of one optimizer step; padding is not counted if lengths are known."""
    return content_of(job).tokens * job.global_batch_size * job.sequences_per_sample


def padding_share(case: Case, layout: Layout) -> float:
    """Return the fraction of a step's positions that hold no token of a sample."""
    return 1.0 - content_of(case.job).tokens / load_of(case, layout).mean_positions


def is_padded_by_step(job: Job, layout: Layout) -> bool:
    """Return whether all micro-batches of a rank's step are padded to the longest one.

    They are with a pipeline, which passes on tensors of one shape: `allow_variable_seq_lengths` of mcore_adapter
    `training_args.py`; variable_seq_lengths turns the padding off.
    """
    return layout.pp > 1 and not job.trainer.get("variable_seq_lengths")


def longest_sequence(case: Case, layout: Layout) -> int:
    """Return the positions of the longest sequence that a step may bring, which memory has to hold.

    An estimate bounds the mean of lengths but not the maximum, and neither does a part of the samples: then the answer
    is seq_len. It is seq_len as well if padding is removed and samples fill a budget of tokens.
    """
    job, lengths, padding = case.job, case.job.lengths, case.traits.padding
    if lengths is None or lengths.error or lengths.stride > 1:
        return job.seq_len
    if padding.removed or is_padded_to_seq_len(padding, job, layout):
        return job.seq_len
    pad = pad_multiple(padding, job)
    return min(job.seq_len, -(-lengths.longest // pad) * pad)


def load_of(case: Case, layout: Layout, *, ranks_wait: bool = False) -> Load:
    """Return the positions and the attention extent of a sequence under a layout.

    Packed sequences, and all sequences if the collator pads to cutoff_len, have seq_len positions. Otherwise a
    micro-batch has the length of its longest sequence, rounded up to the collator's multiple, and a step waits for the
    rank with the most positions. Sequences are assumed to be drawn independently (shuffled data). If F is the fraction
    of sequences up to a length, the longest of n has the distribution F^n; E_n is an expectation under it. With b
    sequences per micro-batch, D data-parallel ranks and M micro-batches that each have a length of their own, the
    slowest rank has about

        E_b + (E_bD - E_b) / sqrt(M)

    positions per sequence. This is exact for M = 1. For larger M it follows the variation of sums of M draws: the
    excess of the largest of D sums over the mean grows with sqrt(M), while the mean grows with M. If a step is padded
    as a whole, b counts the sequences of all its micro-batches and M = 1. The work of attention grows with the square
    of the length, whose expectation is formed likewise. Against simulated steps of log-normal lengths, positions are
    within 5%, and the squares, whose distribution has a long tail, up to a sixth too low for M > 1. If ranks wait for
    each other in each micro-batch (`ranks_wait`: all of them gather weights or reduce gradients in it), M = 1; the
    ranks of an expert-parallel group, which wait for each other in each layer, are not treated separately. A trainer
    that removes padding and balances tokens over its ranks has only the tokens of the samples. If samples are
    concatenated without padding, the length of a micro-batch is their sum: b = 1, and M counts sequences.
    """
    job, padding = case.job, case.traits.padding
    if job.lengths is None or is_padded_to_seq_len(padding, job, layout):
        packing = job.packed
        extent = packing.extent if packing is not None and keeps_samples_apart(case) else job.seq_len
        return Load(positions=job.seq_len, extent=extent, mean_positions=job.seq_len)
    if padding.removed:
        content = content_of(job)
        return Load(positions=content.tokens, extent=content.extent, mean_positions=content.tokens)
    together, draws = layout.micro_batch_size * job.sequences_per_sample, layout.gradient_accumulation_steps
    if padding.end_to_end:
        # A sum of as many draws as a micro-batch has sequences.
        return _padded(job.lengths, job.seq_len, 1, 1, layout.dp, together * (1 if ranks_wait else draws))
    if is_padded_by_step(job, layout):
        together, draws = together * draws, 1
    elif ranks_wait:
        draws = 1
    return _padded(job.lengths, job.seq_len, pad_multiple(padding, job), together, layout.dp, draws)


@lru_cache(maxsize=1 << 12)
def _padded(lengths: Lengths, seq_len: int, pad: int, together: int, ranks: int, draws: int) -> Load:
    shares = _cumulated(lengths, seq_len, pad)

    def slowest(work: Callable[[int], float]) -> float:
        own = _expected_largest(shares, work, together)
        return own + (_expected_largest(shares, work, together * ranks) - own) / sqrt(draws)

    positions = slowest(lambda length: length)
    return Load(
        positions=positions,
        extent=slowest(lambda length: length**2) / positions,
        mean_positions=_expected_largest(shares, lambda length: length, together),
    )


@lru_cache(maxsize=16)
def _cumulated(lengths: Lengths, seq_len: int, pad: int) -> tuple[tuple[int, float], ...]:
    """Return (padded length, fraction of sequences that are no longer than it), shortest first."""
    total, seen = lengths.sequences, 0
    found: dict[int, float] = {}
    for tokens, count in lengths.counts:
        seen += count
        found[min(seq_len, -(-tokens // pad) * pad)] = seen / total
    return tuple(found.items())


def _expected_largest(shares: tuple[tuple[int, float], ...], work: Callable[[int], float], draws: int) -> float:
    """Return the expectation of `work`, a function that increases with length, for the longest of `draws` sequences."""
    total, below = 0.0, 0.0
    for length, share in shares:
        upto = share**draws
        total += work(length) * (upto - below)
        below = upto
    return total


@lru_cache(maxsize=16)
def _length_means(lengths: Lengths, seq_len: int) -> tuple[float, float]:
    """Return the means (tokens per sequence, length of the sequence that a token is in), after cutting to seq_len."""
    counts = lengths.cut(seq_len)
    return sum(tokens * count for tokens, count in counts) / lengths.sequences, token_extent(counts)
