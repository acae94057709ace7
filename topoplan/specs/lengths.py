"""How long the samples of a data set are, and how they fill packed sequences."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from topoplan.errors import SpecError
from topoplan.specs.kinds import SIZE, Number
from topoplan.specs.scalars import plain_scalar
from topoplan.units import shown

LONGEST = 1_000_000_000
"""Tokens of a sample that no data set exceeds; more is a mistake."""
_MOST = 10**12
_PAIRS_OF_A_LINE = 12
PREPROCESSING_BATCH = 1000
"""Samples that LLaMA-Factory packs among themselves: its default of preprocessing_batch_size (`data_args.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The lengths of the sequences in a data set, before anything is cut off."""

    counts: tuple[tuple[int, int], ...]
    """(tokens, how many sequences have them), the shortest first; of preference pairs both answers count."""
    samples: Annotated[int, SIZE]
    """Samples of one epoch; a preference pair is one."""
    source: str
    """What was read, for sentences: `alpaca_en_demo.json`, `job.lengths`."""
    rule: str = ""
    """How tokens were counted, for sentences; empty where they were given."""
    error: Annotated[float, Number(0)] = 0.0
    """How far the mean may be off, as a fraction, and a sample by more; 0 for lengths that were given or counted."""
    stride: Annotated[int, SIZE] = 1
    """Every how many samples one was measured."""

    @property
    def sequences(self) -> int:
        """Sequences that were measured, weighted."""
        return sum(count for _, count in self.counts)

    @property
    def mean(self) -> float:
        """Tokens of a sequence, on average."""
        return sum(tokens * count for tokens, count in self.counts) / self.sequences

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that was measured."""
        return self.counts[-1][0]

    def quantile(self, share: float) -> int:
        """Tokens that `share` of the sequences do not exceed."""
        wanted, seen = share * self.sequences, 0
        for tokens, count in self.counts:
            seen += count
            if seen >= wanted:
                return tokens
        return self.longest

    def share_above(self, limit: int) -> float:
        """Share of the sequences that are longer than `limit` tokens."""
        return sum(count for tokens, count in self.counts if tokens > limit) / self.sequences

    def cut(self, limit: int) -> tuple[tuple[int, int], ...]:
        """`counts` when nothing is longer than `limit` tokens."""
        return histogram((min(tokens, limit), count) for tokens, count in self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Packed sequences of one epoch."""

    sequences: int
    """How many there are."""
    fill: float
    """Share of their positions that hold tokens of samples; the rest is padding."""
    extent: float
    """Length of the sample that a position belongs to, averaged over positions. Padding is a sample of its own."""


def histogram(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """(tokens, count) pairs, those of equal length added up, the shortest first."""
    counts: Counter[int] = Counter()
    for tokens, count in pairs:
        counts[tokens] += count
    return tuple(sorted(counts.items()))


def histogram_lines(counts: tuple[tuple[int, int], ...]) -> list[str]:
    """(tokens, count) pairs as `512:1000 1024:300`, a few on a line: JSON would take four lines for each."""
    words = [f"{tokens}:{count}" for tokens, count in counts]
    return [" ".join(words[start : start + _PAIRS_OF_A_LINE]) for start in range(0, len(words), _PAIRS_OF_A_LINE)]


def histogram_of_line(line: str) -> Iterator[tuple[int, int]]:
    """The pairs in one of `histogram_lines`. Raises SpecError without a place."""
    for word in line.split():
        tokens, colon, count = word.partition(":")
        if not colon:
            raise SpecError(f"{shown(word)} is no pair", expected="expected tokens:count, such as 512:1000")
        yield checked_pair(tokens, count)


def token_extent(counts: Iterable[tuple[int, int]]) -> float:
    """Length of the sequence that a token is in, averaged over tokens."""
    pairs = list(counts)
    return sum(tokens**2 * count for tokens, count in pairs) / sum(tokens * count for tokens, count in pairs)


def checked_pair(tokens: object, count: object) -> tuple[int, int]:
    """One entry of a histogram that a user gave. Raises SpecError without a place."""
    return _whole(tokens, "length", LONGEST), _whole(count, "count", _MOST)


def _whole(value: object, what: str, most: int) -> int:
    number = plain_scalar(value.strip()) if isinstance(value, str) else value
    expected = f"expected a whole number from 1 to {most}"
    if isinstance(number, bool) or not isinstance(number, int):
        raise SpecError(f"the {what} {shown(value)} is not a whole number", expected=expected)
    if not 1 <= number <= most:
        raise SpecError(f"the {what} {shown(value)} is out of range", expected=expected)
    return number


def knapsacks(counts: Iterable[tuple[int, int]], capacity: int) -> list[int]:
    """Tokens in each packed sequence when the longest sample that still fits always goes in next.

    As LLaMA-Factory fills them, `data/processor/processor_utils.py::greedy_knapsack`; nothing may exceed `capacity`.
    """
    ordered = sorted(counts)
    lengths, left = [tokens for tokens, _ in ordered], [count for _, count in ordered]
    fills: list[int] = []
    while lengths:
        room = capacity
        while (index := bisect_right(lengths, room) - 1) >= 0:
            # The longest that fits stays the longest until it is used up or does not fit any more.
            taken = min(left[index], room // lengths[index])
            room -= taken * lengths[index]
            left[index] -= taken
            if not left[index]:
                del lengths[index], left[index]
        fills.append(capacity - room)
    return fills


@lru_cache(maxsize=64)
def packed(lengths: Lengths, seq_len: int, batch: int, *, joined: bool) -> Packing:
    """How the samples fill sequences of `seq_len` tokens, `batch` samples at a time.

    Two ways of LLaMA-Factory: `joined` (stage pt) puts a batch end to end, cuts it every seq_len tokens and drops what
    is left (`data/processor/pretrain.py`); else samples, cut to seq_len, stay whole and share sequences
    (`data/processor/supervised.py`, PackedSupervisedDatasetProcessor). The data is taken to be shuffled, so that every
    batch is like the whole: it is given the quantiles of all lengths.
    """
    batches, rest = divmod(lengths.samples, batch)
    counts = lengths.counts if joined else lengths.cut(seq_len)
    sequences, real, pad_squares = 0, 0, 0
    for size, times in ((batch, batches), (rest, 1)):
        if not size * times:
            continue
        samples = _quantiles(counts, size)
        if joined:
            sequences += times * (sum(tokens * count for tokens, count in samples) // seq_len)
            continue
        fills = knapsacks(samples, seq_len)
        sequences += times * len(fills)
        real += times * sum(fills)
        pad_squares += times * sum((seq_len - fill) ** 2 for fill in fills)
    if joined or not sequences:
        return Packing(sequences=sequences, fill=1.0, extent=float(seq_len))
    positions = sequences * seq_len
    fill = real / positions
    # The quantiles of a batch miss the rare long samples, whose squares weigh most.
    return Packing(sequences=sequences, fill=fill, extent=fill * token_extent(counts) + pad_squares / positions)


def _quantiles(counts: tuple[tuple[int, int], ...], size: int) -> tuple[tuple[int, int], ...]:
    """`size` samples whose lengths are the quantiles (i + 1/2) / size of a histogram; all of them if there are as many.

    The first cumulated count above the quantile, in whole numbers: (2 i + 1) * total < 2 * size * cumulated.
    """
    total = sum(count for _, count in counts)
    found, before, cumulated = [], 0, 0
    for tokens, count in counts:
        cumulated += count
        # Samples i with (2 i + 1) * total <= 2 * size * cumulated.
        until = (2 * size * cumulated // total + 1) // 2
        if until > before:
            found.append((tokens, until - before))
        before = until
    return tuple(found)
