"""Datasets as ms-swift names them."""

from dataclasses import replace
from typing import Any

import pytest

from tests.bundle.samples import JOB
from topoplan.trainers.swift.samples import dataset_value, files_in, is_file, is_hub_name, samples_of


@pytest.mark.parametrize(
    ("dataset", "directory", "value", "files"),
    [
        (None, None, "SET_ME", ()),
        ("org/name#100", None, "org/name#100", ()),
        ("a.jsonl#5", None, "a.jsonl#5", ("a.jsonl",)),
        ("a.jsonl", "/d", "/d/a.jsonl", ("/d/a.jsonl",)),
        ("/abs/a.csv, org/name", "/d", ["/abs/a.csv", "org/name"], ("/abs/a.csv",)),
        ("/a/folder", None, "/a/folder", ("/a/folder",)),
    ],
)
def test_files_are_told_from_ids_of_a_hub(
    dataset: str | None, directory: str | None, value: Any, files: tuple[str, ...]
) -> None:
    job = replace(JOB, dataset=dataset, dataset_dir=directory)
    assert dataset_value(job) == value
    assert files_in(value) == files
    assert len(samples_of(job)) == (0 if dataset is None else len(dataset.split(",")))


def test_a_bare_word_is_neither() -> None:
    assert not is_file("identity")
    assert not is_hub_name("identity")
    assert files_in(None) == ()
