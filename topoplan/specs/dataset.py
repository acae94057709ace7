"""Measure the sample lengths of LLaMA-Factory's data sets, from their files on this machine.

Formats as in LLaMA-Factory's `data/parser.py` (dataset_info.json) and `data/converter.py` (columns). Tokens are counted
with the model's own tokenizer if available, otherwise from the bytes of the text.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from topoplan.errors import SpecError, nearest
from topoplan.specs.json_source import json_records, json_value
from topoplan.specs.lengths import Lengths
from topoplan.specs.source import below, is_there, nearest_file, read_text, shown_path
from topoplan.units import quote

TOKENS_PER_MESSAGE = 5
"""Tokens that a chat template adds around a message, as in ChatML: `<|im_start|>user\\n` and `<|im_end|>\\n`."""
_END_OF_TEXT = 1
_MEDIA = ("images", "videos", "audios")
_KEPT = 16
"""Number of files whose reading is kept for when a command, or the page, reads its spec again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a record by role, from an entry of dataset_info.json or guessed from the first record."""

    prompt: str | None = "instruction"
    query: str | None = "input"
    response: str | None = "output"
    history: str | None = None
    system: str | None = None
    tools: str | None = None
    messages: str | None = None
    """If set, the record is a conversation (sharegpt or openai)."""
    chosen: str | None = None
    rejected: str | None = None
    content_tag: str = "value"
    media: tuple[str, ...] = ()

    def named(self) -> tuple[tuple[str, str], ...]:
        """Return (role, name) of the columns that there are, and the tag of a message's text in a conversation."""
        roles = ("prompt", "query", "response", "history", "system", "tools", "messages", "chosen", "rejected")
        found = [(role, name) for role in roles if (name := getattr(self, role))]
        return (*found, ("content_tag", self.content_tag)) if self.messages else tuple(found)

    def check(self, record: Mapping[str, Any], where: str) -> None:
        """Raise SpecError for a record that has none of the columns."""
        columns = [self.messages] if self.messages else [self.prompt, self.query, self.response]
        wanted = [column for column in columns if column]
        if not any(column in record for column in wanted):
            raise _unknown_columns(record, where, f"expected {', '.join(wanted)}")


def columns_of_entry(entry: Mapping[str, Any]) -> Columns:
    """Return the columns of an entry, as `DatasetAttr.join`: if `columns` is given, unnamed columns are absent."""
    columns, tags = entry.get("columns"), entry.get("tags")
    talks = entry.get("formatting", "alpaca") in ("sharegpt", "openai")
    content = (tags.get("content_tag") if isinstance(tags, dict) else None) or "value"
    if not isinstance(columns, dict):
        return Columns(messages="conversations" if talks else None, content_tag=content)
    given = {key: value for key, value in columns.items() if isinstance(value, str)}
    names = ("prompt", "query", "response", "history", "system", "tools", "chosen", "rejected")
    return Columns(
        **{name: given.get(name) for name in names},
        messages=given.get("messages") if talks else None,
        content_tag=content,
        media=tuple(given[name] for name in _MEDIA if name in given),
    )


def columns_of_record(record: Mapping[str, Any], where: str) -> Columns:
    """Guess the columns of a record from their common names. Raises SpecError if there are none."""

    def named(*names: str) -> str | None:
        return next((name for name in names if name in record), None)

    messages = named("messages", "conversations")
    turns = record[messages] if messages else ()
    first = turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], dict) else {}
    columns = Columns(
        prompt=named("instruction", "prompt", "text"),
        query=named("input", "query"),
        response=named("output", "response"),
        **{name: named(name) for name in ("history", "system", "tools", "chosen", "rejected")},
        messages=messages,
        content_tag="content" if "content" in first else "value",
        media=tuple(name for name in _MEDIA if name in record),
    )
    if not columns.prompt and not columns.messages:
        expected = "expected columns instruction and output, messages or conversations, or text"
        raise _unknown_columns(record, where, expected)
    return columns


def _unknown_columns(record: Mapping[str, Any], where: str, expected: str) -> SpecError:
    columns = ", ".join(quote(name) for name in list(record)[:8]) or "none"
    return SpecError(f"has no known column; it has {columns}", where=where, expected=expected)


def sequences(record: Mapping[str, Any], columns: Columns, stage: str) -> list[tuple[str, int]]:
    """Return (text, extra tokens) for each sequence that a sample trains on; empty if the trainer drops the sample.

    Stage pt reads only the first message and ends it; a sample of sft needs an answer; dpo has two sequences.
    """
    answers: list[Any]
    if columns.messages:
        turns = record.get(columns.messages)
        turns = [turn for turn in turns if isinstance(turn, Mapping)] if isinstance(turns, list) else []
        asked = [_text(turn.get(columns.content_tag)) + _text(turn.get("tool_calls")) for turn in turns]
        answers = [asked.pop()] if stage == "sft" and len(asked) > 1 else []
    else:
        history = record.get(columns.history or "")
        turns = history if isinstance(history, list) else []
        asked = [_text(part) for turn in turns if isinstance(turn, list) for part in turn]
        question = (_text(record.get(column)) for column in (columns.prompt, columns.query) if column)
        asked.append("\n".join(part for part in question if part))
        answers = [record.get(columns.response)] if columns.response else []
    if stage == "pt":
        return [(asked[0], _END_OF_TEXT)] if asked and asked[0] else []
    if stage == "dpo":
        pair = [record.get(column) for column in (columns.chosen, columns.rejected) if column]
        answers = [answer.get(columns.content_tag) if isinstance(answer, Mapping) else answer for answer in pair]
    if len(answers) != (2 if stage == "dpo" else 1) or not all(isinstance(answer, str) for answer in answers):
        return []
    asked += [_text(record[column]) for column in (columns.system, columns.tools) if column and record.get(column)]
    around = TOKENS_PER_MESSAGE * (len(asked) + 1)
    return [("\n".join([*asked, answer]), around) for answer in answers]


def _text(value: Any) -> str:
    """Return what a template would write for a value: text unchanged, anything else as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


BYTES_PER_TOKEN = 4.3
"""UTF-8 bytes per token. Counted over the demonstration data of LLaMA-Factory and Python code with the tokenizers of
Qwen3, Llama 3 and DeepSeek-V3: English 4.6 to 4.9, code 4.3 to 4.7, JSON tool calls 3.9 to 4.5, Chinese 3.7 to 5.0.
tiktoken's README says "about 4 bytes"."""
BYTES_PER_TOKEN_ERROR = 0.2
"""All of these are within a fifth of BYTES_PER_TOKEN on average; a single sample may be off by several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounter:
    """A method of counting the tokens of texts."""

    count: Callable[[Sequence[str]], list[int]]
    rule: str
    """The method in words, for messages."""
    error: float
    """Possible relative error of the mean."""
    measured_bytes: int
    """File size above which only a sample of the records is measured."""


def token_counter(tokenizer: Path | None) -> TokenCounter:
    """Return a counter using a tokenizer.json if it and the package `tokenizers` are available, otherwise BY_BYTES."""
    if tokenizer is None or not is_there(tokenizer, Path.is_file):
        return BY_BYTES
    return _tokenizer_counter(tokenizer, _state(tokenizer))


@lru_cache(maxsize=_KEPT)
def _tokenizer_counter(tokenizer: Path, state: tuple[int, int]) -> TokenCounter:
    """Return the counter of a tokenizer.json; `state` tells a file that has changed from the one read before."""
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return BY_BYTES
    try:
        model = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the package raises bare exceptions
        raise SpecError(f"is not a tokenizer: {quote(str(error))}", where=shown_path(tokenizer)) from None

    def count(texts: Sequence[str]) -> list[int]:
        return [len(encoded.ids) for encoded in model.encode_batch(list(texts), add_special_tokens=False)]

    return TokenCounter(count=count, rule="counted with the model's tokenizer", error=0.0, measured_bytes=1 << 24)


def _by_bytes(texts: Sequence[str]) -> list[int]:
    sizes = (len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return [math.ceil(size / BYTES_PER_TOKEN) for size in sizes]


BY_BYTES = TokenCounter(
    count=_by_bytes,
    rule=f"estimated at {BYTES_PER_TOKEN} bytes a token, {BYTES_PER_TOKEN_ERROR:.0%} either way",
    error=BYTES_PER_TOKEN_ERROR,
    measured_bytes=1 << 27,
)


_TOGETHER = 1000
"""Number of texts tokenized per batch."""
_ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
"""Keys of a data set that is not stored on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DataSet:
    """The file of a data set, and how to read it."""

    path: Path
    size_bytes: int
    changed_ns: int
    """When the file was last written."""
    columns: Columns | None = None
    """None: taken from the first record."""
    num_samples: int | None = None

    def stride(self, measured_bytes: int) -> int:
        """Return k such that measuring every k-th record reads about `measured_bytes`."""
        return -(-max(1, self.size_bytes) // measured_bytes)


def _data_set(path: Path, columns: Columns | None = None, num_samples: int | None = None) -> _DataSet:
    """Return the data set that is in a file as it is now."""
    size_bytes, changed_ns = _state(path)
    return _DataSet(path=path, size_bytes=size_bytes, changed_ns=changed_ns, columns=columns, num_samples=num_samples)


def _state(path: Path) -> tuple[int, int]:
    """Return (size in bytes, time of the last change in nanoseconds) of a file."""
    try:
        stat = path.stat()
    except OSError as error:
        raise SpecError(f"cannot be read: {error.strerror or error}", where=shown_path(path)) from None
    return stat.st_size, stat.st_mtime_ns


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
    here = [data for data in found if isinstance(data, _DataSet)]
    if len(here) < len(found):
        return None
    counter = token_counter(tokenizer)
    counts: Counter[int] = Counter()
    samples, widest = 0, 1
    columns: list[Columns] = []
    for data in here:
        stride = data.stride(counter.measured_bytes)
        measured = _measured(data, stage, counter, stride, max_samples)
        if measured is None:
            return None
        tokens, records, found_columns = measured
        columns.append(found_columns)
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
        columns=columns[0].named(),
    )


def _located(name: str, directory: Path, base: Path) -> _DataSet | str:
    """Return the file of a data set, or what is missing here; '' for a data set that is elsewhere, or not JSON."""
    if not name:
        raise SpecError("names nothing beside a comma", expected="expected names with commas between them")
    if not name.endswith((".json", ".jsonl")):
        return "" if "/" in name else _listed(name, directory)  # with a slash: a hub id, or a path
    path = below(base, name)
    if is_there(path, Path.is_file):
        return _data_set(path)
    what = f"{shown_path(path)} is not on this machine, and is taken for a file on the nodes"
    return "; ".join(filter(None, (what, nearest_file(path))))


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
    return _data_set(path, columns_of_entry(entry), number if isinstance(number, int) else None)


def why_unread(names: str, directory: Path, base: Path) -> str:
    """Return what is missing on this machine if `read_dataset` returns None; '' for data sets stored elsewhere."""
    found = (_located(name.strip(), directory, base) for name in names.split(","))
    return next((why for why in found if isinstance(why, str) and why), "")


def _entries(index: Path) -> Mapping[str, Any]:
    expected = "expected LLaMA-Factory's list of data sets"
    content = json_value(read_text(index, wanted=expected), name=shown_path(index))
    if not isinstance(content, dict):
        raise SpecError("is not a JSON object", where=shown_path(index), expected=expected)
    return content


@lru_cache(maxsize=_KEPT)
def _measured(
    data: _DataSet, stage: str, counter: TokenCounter, stride: int, max_samples: int | None
) -> tuple[Counter[int], int, Columns] | None:
    """Return (sequences by token count, total samples, columns) of a file; None if it has images, videos or audio."""
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
    if not records or columns is None:
        raise SpecError("is empty: it holds no sample", where=name)
    return tokens, round(records * taken / read), columns
