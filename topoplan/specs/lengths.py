"""The sample lengths of a data set, how samples fill packed sequences, and a user's own length histogram."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from topoplan.errors import SpecError
from topoplan.specs.json_source import json_value
from topoplan.specs.kinds import SIZE, Checked, Number
from topoplan.specs.scalars import plain_scalar
from topoplan.specs.source import read_text, shown_path
from topoplan.units import shown

LONGEST = 1_000_000_000
"""The largest accepted number of tokens in a sample; more is certainly a mistake."""
_MOST = 10**12
_PAIRS_OF_A_LINE = 12
PREPROCESSING_BATCH = 1000
"""Samples that LLaMA-Factory packs together: its default of preprocessing_batch_size (`data_args.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The lengths of the sequences in a data set, before truncation."""

    counts: tuple[tuple[int, int], ...]
    """(tokens, number of sequences) pairs, shortest first; a preference pair counts as two sequences."""
    samples: Annotated[int, SIZE]
    """Samples in one epoch; a preference pair counts as one."""
    source: str
    """What was read, for messages: `alpaca_en_demo.json`, `job.lengths`."""
    rule: str = ""
    """How tokens were counted, for messages; empty if the lengths were given."""
    error: Annotated[float, Number(0)] = 0.0
    """Possible relative error of the mean (a single sample may be off by more); 0 for given or counted lengths."""
    stride: Annotated[int, SIZE] = 1
    """One in `stride` samples was measured."""
    columns: tuple[tuple[str, str], ...] = ()
    """(role, name) of the columns of the (first) file that was read, as LLaMA-Factory's dataset_info.json calls the
    roles, with `content_tag` for conversations; empty if the lengths were given."""

    @property
    def sequences(self) -> int:
        """Number of measured sequences, by their weights."""
        return sum(count for _, count in self.counts)

    @property
    def mean(self) -> float:
        """Mean tokens per sequence."""
        return sum(tokens * count for tokens, count in self.counts) / self.sequences

    @property
    def longest(self) -> int:
        """Tokens in the longest measured sequence."""
        return self.counts[-1][0]

    def quantile(self, share: float) -> int:
        """Return the length that a fraction `share` of the sequences does not exceed, in tokens."""
        wanted, seen = share * self.sequences, 0
        for tokens, count in self.counts:
            seen += count
            if seen >= wanted:
                return tokens
        return self.longest

    def share_above(self, limit: int) -> float:
        """Return the fraction of sequences longer than `limit` tokens."""
        return sum(count for tokens, count in self.counts if tokens > limit) / self.sequences

    def cut(self, limit: int) -> tuple[tuple[int, int], ...]:
        """Return `counts` with lengths truncated to `limit` tokens."""
        return histogram((min(tokens, limit), count) for tokens, count in self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The packed sequences of one epoch."""

    sequences: int
    """Number of packed sequences."""
    fill: float
    """Fraction of positions that hold sample tokens; the rest is padding."""
    extent: float
    """Length of the sample at a position, averaged over positions. Padding counts as a sample of its own."""


def histogram(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Merge (tokens, count) pairs of equal length, shortest first."""
    counts: Counter[int] = Counter()
    for tokens, count in pairs:
        counts[tokens] += count
    return tuple(sorted(counts.items()))


def histogram_lines(counts: tuple[tuple[int, int], ...]) -> list[str]:
    """Format (tokens, count) pairs as `512:1000 1024:300`, several per line: JSON would take four lines per pair."""
    words = [f"{tokens}:{count}" for tokens, count in counts]
    return [" ".join(words[start : start + _PAIRS_OF_A_LINE]) for start in range(0, len(words), _PAIRS_OF_A_LINE)]


def histogram_of_line(line: str) -> Iterator[tuple[int, int]]:
    """Parse the pairs in a line of `histogram_lines`. Raises a SpecError without a location."""
    for word in line.split():
        tokens, colon, count = word.partition(":")
        if not colon:
            raise SpecError(f"{shown(word)} is no pair", expected="expected tokens:count, such as 512:1000")
        yield checked_pair(tokens, count)


def token_extent(counts: Iterable[tuple[int, int]]) -> float:
    """Return the length of the sequence that a token is in, averaged over tokens."""
    pairs = list(counts)
    return sum(tokens**2 * count for tokens, count in pairs) / sum(tokens * count for tokens, count in pairs)


def checked_pair(tokens: object, count: object) -> tuple[int, int]:
    """Check one entry of a user's histogram. Raises a SpecError without a location."""
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
    """Return the tokens in each packed sequence, filling each with the longest remaining sample that fits.

    As in LLaMA-Factory's `data/processor/processor_utils.py::greedy_knapsack`; no sample may exceed `capacity`.
    """
    ordered = sorted(counts)
    lengths, left = [tokens for tokens, _ in ordered], [count for _, count in ordered]
    fills: list[int] = []
    while lengths:
        room = capacity
        while (index := bisect_right(lengths, room) - 1) >= 0:
            # The longest sample that fits stays the longest until it is used up or no longer fits.
            taken = min(left[index], room // lengths[index])
            room -= taken * lengths[index]
            left[index] -= taken
            if not left[index]:
                del lengths[index], left[index]
        fills.append(capacity - room)
    return fills


@lru_cache(maxsize=64)
def packed(lengths: Lengths, seq_len: int, batch: int, *, joined: bool) -> Packing:
    """Return how samples fill sequences of `seq_len` tokens, packing `batch` samples at a time.

    LLaMA-Factory packs in two ways. `joined` (stage pt) concatenates a batch, cuts it every seq_len tokens and drops
    the remainder (`data/processor/pretrain.py`). Otherwise samples are truncated to seq_len, stay whole and share
    sequences (`data/processor/supervised.py`, PackedSupervisedDatasetProcessor). The data is assumed to be shuffled, so
    every batch is represented by the quantiles of all lengths.
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
    # A batch's quantiles miss the rare long samples, whose squares weigh most.
    return Packing(sequences=sequences, fill=fill, extent=fill * token_extent(counts) + pad_squares / positions)


def _quantiles(counts: tuple[tuple[int, int], ...], size: int) -> tuple[tuple[int, int], ...]:
    """Return `size` samples at the quantiles (i + 1/2) / size of a histogram; all of them if it has `size` samples."""
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


_MAX_FILE_BYTES = 100_000_000
EXPECTED = "expected [tokens, count] pairs, or a mapping of tokens to counts"


def pairs_of(value: Any) -> tuple[tuple[int, int], ...]:
    """Parse a histogram from a list of pairs, a list of lengths (one sample each) or a mapping. Raises SpecError."""
    if isinstance(value, Mapping):
        entries: list[Any] = list(value.items())
    elif isinstance(value, list):
        entries = [item if isinstance(item, list) else [item, 1] for item in value]
    else:
        raise SpecError("is not a length histogram", expected=EXPECTED)
    if not entries:
        raise SpecError("is an empty length histogram", expected=EXPECTED)
    found = []
    for number, entry in enumerate(entries, start=1):
        try:
            if len(entry) != 2:
                raise SpecError("is no pair of two numbers", expected=EXPECTED)
            found.append(checked_pair(*entry))
        except SpecError as error:
            raise SpecError(f"entry {number}: {error.what}", expected=error.expected) from None
    return histogram(found)


def _lengths(value: Any) -> tuple[tuple[int, int], ...] | str:
    """Return pairs of tokens and count, or the path of a file."""
    if isinstance(value, str) and value.strip() and value.isprintable():
        return value
    if not isinstance(value, list | Mapping):
        raise SpecError(f"{shown(value)} is not a length histogram", expected=f"{EXPECTED}, or a file of either")
    return pairs_of(value)


def _schema() -> dict[str, Any]:
    number = {"type": "integer", "minimum": 1}
    pair = {"type": "array", "items": number, "minItems": 2, "maxItems": 2}
    several = {"type": "array", "items": {"anyOf": [number, pair]}, "minItems": 1}
    mapping = {"type": "object", "patternProperties": {"^[0-9]+$": number}, "additionalProperties": False}
    return {"anyOf": [{"type": "string"}, several, mapping | {"minProperties": 1}]}


LENGTHS = Checked(_lengths, _schema)


def read_length_file(path: Path) -> tuple[tuple[int, int], ...]:
    """Read a histogram from a file: CSV with `tokens,count` per line, or JSON as in the spec. Raises SpecError."""
    name = shown_path(path)
    text = read_text(path, most_bytes=_MAX_FILE_BYTES, wanted="give fewer lengths, with their counts")
    if text.lstrip()[:1] not in ("[", "{"):
        return histogram(_of_csv(text, name))
    try:
        return pairs_of(json_value(text, name=name))
    except SpecError as error:
        raise SpecError(error.what, where=error.where or name, expected=error.expected) from None


def _of_csv(text: str, name: str) -> Iterator[tuple[int, int]]:
    found = False
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [cell.strip() for cell in line.split(",")]
        if not any(cells) or (not found and cells == ["tokens", "count"]):
            continue
        where = f"{name}:{number}"
        if len(cells) != 2:
            raise SpecError(f"has {len(cells)} values", where=where, expected="expected `tokens,count` on a line")
        try:
            yield checked_pair(*cells)
        except SpecError as error:
            raise SpecError(error.what, where=where, expected=error.expected) from None
        found = True
    if not found:
        raise SpecError("is empty", where=name, expected="expected `tokens,count` on a line")
