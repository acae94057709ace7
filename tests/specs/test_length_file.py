from pathlib import Path

import pytest

from topoplan.errors import SpecError
from topoplan.specs.length_file import pairs_of, read_length_file


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
