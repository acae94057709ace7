import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoplan.errors import SpecError
from topoplan.specs.lengths import (
    Lengths,
    checked_pair,
    histogram,
    histogram_lines,
    histogram_of_line,
    knapsacks,
    packed,
    pairs_of,
    read_length_file,
)


def of(counts: dict[int, int], **keys: object) -> Lengths:
    pairs = histogram(counts.items())
    return Lengths(**{"counts": pairs, "samples": sum(n for _, n in pairs), "source": "a test"} | keys)  # type: ignore[arg-type]


def test_mean_and_quantiles_are_those_of_the_sequences() -> None:
    lengths = of({100: 98, 1000: 1, 5000: 1})
    assert lengths.mean == pytest.approx(158.0)
    assert (lengths.quantile(0.5), lengths.quantile(0.99), lengths.longest) == (100, 1000, 5000)
    assert lengths.share_above(1000) == pytest.approx(0.01)


def test_cutting_adds_longer_sequences_to_those_of_the_limit() -> None:
    assert of({100: 2, 512: 3, 900: 4}).cut(512) == ((100, 2), (512, 7))


def test_the_longest_that_fits_goes_in_next() -> None:
    assert knapsacks([(600, 1), (500, 1), (400, 1), (300, 2)], 1000) == [1000, 800, 300]


@given(st.dictionaries(st.integers(1, 64), st.integers(1, 9), max_size=12))
def test_knapsacks_hold_all_tokens_and_none_overflows(counts: dict[int, int]) -> None:
    fills = knapsacks(counts.items(), 64)
    assert sum(fills) == sum(tokens * count for tokens, count in counts.items())
    assert all(0 < fill <= 64 for fill in fills)


def test_packed_sequences_of_equal_samples_are_counted_by_hand() -> None:
    found = packed(of({300: 10}), 1000, 1000, joined=False)
    # Three to a sequence: 3 + 3 + 3 + 1.
    assert found.sequences == 4
    assert found.fill == pytest.approx(3000 / 4000)
    # Ten samples of 300 tokens, plus padding of 100 three times and of 700 once; padding counts as a sample of its own.
    assert found.extent == pytest.approx((10 * 300**2 + 3 * 100**2 + 700**2) / 4000)


def test_each_batch_of_samples_is_packed_by_itself() -> None:
    assert packed(of({300: 10}), 1000, 2, joined=False).sequences == 5


def test_joined_samples_lose_the_rest_of_each_batch() -> None:
    found = packed(of({300: 25}), 1000, 10, joined=True)
    assert (found.sequences, found.fill, found.extent) == (3 + 3 + 1, 1.0, 1000.0)


def test_joined_samples_are_not_cut() -> None:
    assert packed(of({5000: 4}), 1000, 1000, joined=True).sequences == 20


def test_quantiles_of_a_batch_pack_like_shuffled_samples() -> None:
    random.seed(7)
    drawn = [max(8, int(random.lognormvariate(5.5, 0.9))) for _ in range(20_000)]
    counts = histogram((min(tokens, 2048), 1) for tokens in drawn)
    found = packed(of(dict(counts)), 2048, 1000, joined=False)
    real = 0
    for start in range(0, len(drawn), 1000):
        real += len(knapsacks(histogram((min(tokens, 2048), 1) for tokens in drawn[start : start + 1000]), 2048))
    assert found.sequences == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize(("tokens", "count"), [(0, 1), (-5, 1), (1, 0), (1.5, 1), (True, 1), ("x", 1), (1, None)])
def test_an_entry_that_is_no_count_of_a_length_is_refused(tokens: object, count: object) -> None:
    with pytest.raises(SpecError, match=r"is not a whole number|is out of range"):
        checked_pair(tokens, count)


@given(st.dictionaries(st.integers(1, 10**9), st.integers(1, 10**12)))
def test_lines_of_pairs_say_the_whole_histogram(counts: dict[int, int]) -> None:
    pairs = histogram(counts.items())
    lines = histogram_lines(pairs)
    assert tuple(pair for line in lines for pair in histogram_of_line(line)) == pairs
    assert all(len(line.split()) <= 12 for line in lines)


def test_lines_of_pairs_are_short_to_read() -> None:
    assert histogram_lines(((512, 1000), (1024, 300))) == ["512:1000 1024:300"]


@pytest.mark.parametrize(
    ("line", "message"),
    [("512", "'512' is no pair; expected tokens:count"), ("5:x", "'x' is not a whole number"), ("0:1", "out of range")],
)
def test_a_line_without_pairs_is_refused(line: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        list(histogram_of_line(line))


@pytest.mark.parametrize(
    "text", ["tokens,count\n512,10\n128,5\n512,1\n", "[[512, 11], [128, 5]]", '{"512": 11, "128": 5}']
)
def test_csv_pairs_and_mappings_say_the_same(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text(text)
    assert read_length_file(path) == ((128, 5), (512, 11))


def test_a_bare_list_has_one_sample_an_entry() -> None:
    assert pairs_of([7, 9, 7]) == ((7, 2), (9, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lengths: is empty"),
        ("tokens,count\n", "lengths: is empty"),
        ("512,10\n-5,3\n", "lengths:2: the length '-5' is out of range"),
        ("512,10\n5,0\n", "lengths:2: the count '0' is out of range"),
        ("512,10,3\n", "lengths:1: has 3 values"),
        ("hello\n", "lengths:1: has 1 values"),
        ("[[512, 10],\n[512 10]]", "lengths:2: is not JSON"),
        ("[]", "is an empty length histogram"),
        ("[[1, 2, 3]]", "entry 1: is no pair"),
    ],
)
def test_what_is_no_histogram_is_refused_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_length_file(path)
    assert message in str(caught.value)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        read_length_file(tmp_path / "nothing.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="is not a text file"):
        read_length_file(tmp_path / "binary.csv")
