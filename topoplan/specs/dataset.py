"""Measure the sample lengths of LLaMA-Factory's data sets, from their files on this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topoplan.errors import SpecError, nearest
from topoplan.specs.dataset_record import Columns, columns_of_entry, columns_of_record, sequences
from topoplan.specs.json_records import json_records
from topoplan.specs.json_source import json_value
from topoplan.specs.lengths import Lengths
from topoplan.specs.source import below, is_there, read_text, shown_path
from topoplan.specs.token_count import TokenCounter, token_counter

_TOGETHER = 1000
"""Number of texts tokenized per batch."""
_ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
"""Keys of a data set that is not stored on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DataSet:
    """The file of a data set, and how to read it."""

    path: Path
    columns: Columns | None = None
    """None: taken from the first record."""
    num_samples: int | None = None

    def stride(self, measured_bytes: int) -> int:
        """Return k such that measuring every k-th record reads about `measured_bytes`."""
        try:
            return -(-max(1, self.path.stat().st_size) // measured_bytes)
        except OSError as error:
            raise SpecError(f"cannot be read: {error.strerror or error}", where=shown_path(self.path)) from None


def read_dataset(
    names: str,
    directory: Path,
    *,
    base: Path,
    stage: str,
    tokenizer: Path | None = None,
    max_samples: int | None = None,
) -> Lengths | None:
    """Return the lengths of the comma-separated data sets `names` in a stage (pt, sft or dpo); None if any is missing.

    A name is an entry of dataset_info.json in `directory`, or a JSON or JSONL file; relative paths start at `base`.
    Data sets on a hub or on the nodes count as missing, and so do those with media, whose tokens are not in the text.
    `tokenizer` is a tokenizer.json, used if the package `tokenizers` is installed; `max_samples` is the trainer's.
    Raises SpecError, with file and line, for a local file that is not a data set.
    """
    found = [_located(name.strip(), directory, base) for name in names.split(",")]
    here = [data for data in found if data is not None]
    if len(here) < len(found):
        return None
    counter = token_counter(tokenizer)
    counts: Counter[int] = Counter()
    samples, widest = 0, 1
    for data in here:
        stride = data.stride(counter.measured_bytes)
        measured = _measured(data, stage, counter, stride, max_samples)
        if measured is None:
            return None
        tokens, records = measured
        if not tokens:
            raise SpecError(f"has no sample that stage {stage} takes", where=shown_path(data.path))
        for length, times in tokens.items():
            counts[length] += times * stride
        records = data.num_samples or records
        samples += records if max_samples is None else min(records, max_samples)
        widest = max(widest, stride)
    return Lengths(
        counts=tuple(sorted(counts.items())),
        samples=samples,
        source=", ".join(data.path.name for data in here),
        rule=counter.rule,
        error=counter.error,
        stride=widest,
    )


def _located(name: str, directory: Path, base: Path) -> _DataSet | None:
    """Return the file of a data set; None if it is not on this machine, or not JSON."""
    if not name:
        raise SpecError("names nothing beside a comma", expected="expected names with commas between them")
    if name.endswith((".json", ".jsonl")):
        path = below(base, name)
        if not is_there(path, Path.is_file):
            raise SpecError("no such file", where=shown_path(path), remedy="a data set on the nodes goes by its name")
        return _DataSet(path=path)
    found = _listed(name, directory)
    return found if isinstance(found, _DataSet) else None


def _listed(name: str, directory: Path) -> _DataSet | str:
    """Return the file of an entry of dataset_info.json, or what is missing here; '' for a data set stored elsewhere."""
    index = directory / "dataset_info.json"
    if not is_there(index, Path.is_file):
        return f"{shown_path(index)} is not here"
    entries = _entries(index)
    entry = entries.get(name)
    if entry is None:
        return "; ".join(filter(None, (f"{shown_path(index)} has no data set {name!r}", nearest(name, entries))))
    if isinstance(entry, dict) and any(key in entry for key in _ELSEWHERE):
        return ""
    if not isinstance(entry, dict) or not isinstance(entry.get("file_name"), str):
        return f"the entry {name!r} of {shown_path(index)} names no file"
    path, number = directory / entry["file_name"], entry.get("num_samples")
    if not is_there(path, Path.is_file):
        return f"{shown_path(path)}, the file of {name!r}, is not here"
    if path.suffix not in (".json", ".jsonl"):
        return ""
    return _DataSet(path=path, columns=columns_of_entry(entry), num_samples=number if isinstance(number, int) else None)


def why_unread(names: str, directory: Path) -> str:
    """Return what is missing on this machine if `read_dataset` returns None; '' for data sets stored elsewhere."""
    listed = (name.strip() for name in names.split(",") if "/" not in name)  # skips hub ids and paths
    found = (_listed(name, directory) for name in listed if not name.endswith((".json", ".jsonl")))
    return next((why for why in found if isinstance(why, str) and why), "")


def _entries(index: Path) -> Mapping[str, Any]:
    expected = "expected LLaMA-Factory's list of data sets"
    content = json_value(read_text(index, wanted=expected), name=shown_path(index))
    if not isinstance(content, dict):
        raise SpecError("is not a JSON object", where=shown_path(index), expected=expected)
    return content


def _measured(
    data: _DataSet, stage: str, counter: TokenCounter, stride: int, max_samples: int | None
) -> tuple[Counter[int], int] | None:
    """Return (sequences by token count, total samples) of a file; None if it has images, videos or audio."""
    columns, name = data.columns, shown_path(data.path)
    tokens: Counter[int] = Counter()
    records = read = taken = 0
    waiting: list[tuple[str, int]] = []

    def measure() -> None:
        lengths = counter.count([text for text, _ in waiting])
        tokens.update(length + around for length, (_, around) in zip(lengths, waiting, strict=True))
        waiting.clear()

    for line, record in json_records(data.path, stride=stride):
        if max_samples is not None and data.num_samples is None and records == max_samples:
            break
        records += 1
        if record is None:
            continue
        columns = columns or columns_of_record(record, f"{name}:{line}")
        columns.check(record, f"{name}:{line}")
        if any(record.get(column) for column in columns.media):
            return None
        found = sequences(record, columns, stage)
        read, taken = read + 1, taken + bool(found)
        waiting += found
        if len(waiting) >= _TOGETHER:
            measure()
    measure()
    if not records:
        raise SpecError("is empty: it holds no sample", where=name)
    return tokens, round(records * taken / read)
