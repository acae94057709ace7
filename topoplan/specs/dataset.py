"""How long the samples of LLaMA-Factory's data sets are, from their files on this machine.

Formats as LLaMA-Factory reads them: `data/parser.py` (dataset_info.json) and `data/converter.py` (its columns).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topoplan.errors import SpecError
from topoplan.specs.json_records import json_records
from topoplan.specs.lengths import Lengths
from topoplan.specs.source import below, shown_path
from topoplan.units import quote

BYTES_PER_TOKEN = 4.3
"""UTF-8 bytes in a token. Counted over the demonstration data of LLaMA-Factory and Python code with the tokenizers of
Qwen3, Llama 3 and DeepSeek-V3: English 4.6 to 4.9, code 4.3 to 4.7, JSON tool calls 3.9 to 4.5, Chinese 3.7 to 5.0.
tiktoken's README says "about 4 bytes"."""
BYTES_PER_TOKEN_ERROR = 0.2
"""All of those are within a fifth of it. That is of a data set: a single sample may be off by several times."""
TOKENS_PER_MESSAGE = 5
"""What a chat template puts around a message; ChatML's `<|im_start|>user\\n` and `<|im_end|>\\n`."""
_END_OF_TEXT = 1
MEASURED_BYTES = 1 << 27
"""Of larger files every k-th record is measured; with a tokenizer, which is slower, from the other limit on."""
TOKENIZED_BYTES = 1 << 24

_MEDIA = ("images", "videos", "audios")
_EXPECTED = "expected columns instruction and output, messages or conversations, or text"

_BATCH = 1000
"""Texts that are tokenized together."""

_Count = Callable[[Sequence[str]], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counter:
    """A way to count the tokens of texts."""

    count: _Count
    rule: str
    error: float
    measured_bytes: int
    """Size of a file from which not every record is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """Which columns of a record hold what; as an entry of dataset_info.json says, or guessed from the first record."""

    prompt: str | None = "instruction"
    query: str | None = "input"
    response: str | None = "output"
    history: str | None = None
    system: str | None = None
    tools: str | None = None
    messages: str | None = None
    """Set: the record is a conversation (sharegpt or openai)."""
    chosen: str | None = None
    rejected: str | None = None
    content_tag: str = "value"
    media: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _DataSet:
    """A file, and how to read it."""

    path: Path
    form: _Format | None = None
    """None: the first record tells."""
    num_samples: int | None = None


def read_dataset(
    names: str,
    directory: Path,
    *,
    base: Path,
    stage: str,
    tokenizer: Path | None = None,
    max_samples: int | None = None,
) -> Lengths | None:
    """The lengths of the data sets `names` (with commas) as stage pt, sft or dpo has them; None when not all are here.

    A name is an entry of dataset_info.json in `directory`, or a JSON or JSONL file; relative ones start at `base`.
    What lies on a hub or on the nodes is not here; nor is one with images, whose tokens are not in its text.
    `tokenizer` is a tokenizer.json, used when the package `tokenizers` is installed; `max_samples` is the trainer's.

    Raises SpecError, with file and line, for a file that is here and is no data set.
    """
    found = [_located(name.strip(), directory, base) for name in names.split(",")]
    here = [data for data in found if data is not None]
    if len(here) < len(found):
        return None
    counter = _counter(tokenizer)
    counts: Counter[int] = Counter()
    samples, widest = 0, 1
    for data in here:
        stride = -(-max(1, _size(data.path)) // counter.measured_bytes)
        measured = _measured(data, stage, counter.count, stride, max_samples)
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
    """The file of a data set; None for one that is not on this machine, or not JSON."""
    path = below(base, name)
    if name.endswith((".json", ".jsonl")):
        if not _is_file(path):
            raise SpecError("no such file", where=shown_path(path), remedy="a data set on the nodes goes by its name")
        return _DataSet(path=path)
    index = directory / "dataset_info.json"
    if not _is_file(index):
        return None
    entry = _entries(index).get(name)
    if not isinstance(entry, dict) or not isinstance(entry.get("file_name"), str):
        return None
    if any(key in entry for key in ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")):
        return None
    path = directory / entry["file_name"]
    if path.suffix not in (".json", ".jsonl") or not _is_file(path):
        return None
    number = entry.get("num_samples")
    return _DataSet(path=path, form=_format_of(entry), num_samples=number if isinstance(number, int) else None)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise SpecError(f"cannot be read: {error.strerror or error}", where=shown_path(path)) from None


def _entries(index: Path) -> Mapping[str, Any]:
    name = shown_path(index)
    try:
        content = json.loads(index.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise SpecError(f"is not JSON: {error.msg}", where=f"{name}:{error.lineno}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"cannot be read: {error}", where=name) from None
    if not isinstance(content, dict):
        raise SpecError("is not a JSON object", where=name, expected="expected LLaMA-Factory's list of data sets")
    return content


def _format_of(entry: Mapping[str, Any]) -> _Format:
    """`DatasetAttr.join`: with `columns`, those that it does not name are not there."""
    columns, tags = entry.get("columns"), entry.get("tags")
    talks = entry.get("formatting", "alpaca") in ("sharegpt", "openai")
    content = tags.get("content_tag") if isinstance(tags, dict) else None
    if not isinstance(columns, dict):
        return _Format(messages="conversations" if talks else None, content_tag=content or "value")
    given = {key: value for key, value in columns.items() if isinstance(value, str)}
    names = ("prompt", "query", "response", "history", "system", "tools", "chosen", "rejected")
    return _Format(
        **{name: given.get(name) for name in names},
        messages=given.get("messages") if talks else None,
        content_tag=content or "value",
        media=tuple(given[name] for name in _MEDIA if name in given),
    )


def _format_from(record: Mapping[str, Any], where: str) -> _Format:
    """The format that a record's own columns tell, under their usual names."""

    def named(*names: str) -> str | None:
        return next((name for name in names if name in record), None)

    messages = named("messages", "conversations")
    content = "value"
    if messages and isinstance(turns := record[messages], list) and turns and isinstance(turns[0], dict):
        content = "content" if "content" in turns[0] else "value"
    form = _Format(
        prompt=named("instruction", "prompt", "text"),
        query=named("input", "query"),
        response=named("output", "response"),
        history=named("history"),
        system=named("system"),
        tools=named("tools"),
        chosen=named("chosen"),
        rejected=named("rejected"),
        messages=messages,
        content_tag=content,
        media=tuple(name for name in _MEDIA if name in record),
    )
    if not form.prompt and not form.messages:
        raise _unknown_columns(record, where, _EXPECTED)
    return form


def _unknown_columns(record: Mapping[str, Any], where: str, expected: str) -> SpecError:
    columns = ", ".join(quote(name) for name in list(record)[:8]) or "none"
    return SpecError(f"has no known column; it has {columns}", where=where, expected=expected)


def _measured(
    data: _DataSet, stage: str, count: _Count, stride: int, max_samples: int | None
) -> tuple[Counter[int], int] | None:
    """(sequences by their tokens, samples in all) of a file; None for one with images, videos or audio."""
    form, name = data.form, shown_path(data.path)
    tokens: Counter[int] = Counter()
    records = read = taken = 0
    waiting: list[tuple[str, int]] = []

    def measure() -> None:
        for length, (_, around) in zip(count([text for text, _ in waiting]), waiting, strict=True):
            tokens[length + around] += 1
        waiting.clear()

    for line, record in json_records(data.path, stride=stride):
        if max_samples is not None and data.num_samples is None and records == max_samples:
            break
        records += 1
        if record is None:
            continue
        where = f"{name}:{line}"
        form = form or _format_from(record, where)
        columns = [form.messages] if form.messages else [form.prompt, form.query, form.response]
        if not any(column in record for column in columns if column):
            wanted = ", ".join(column for column in columns if column)
            raise _unknown_columns(record, where, f"expected {wanted}")
        if any(record.get(column) for column in form.media):
            return None
        read += 1
        sequences = _sequences(record, form, stage)
        taken += bool(sequences)
        waiting += sequences
        if len(waiting) >= _BATCH:
            measure()
    measure()
    if not records:
        raise SpecError("is empty: it holds no sample", where=name)
    return tokens, round(records * taken / read)


def _sequences(record: Mapping[str, Any], form: _Format, stage: str) -> list[tuple[str, int]]:
    """(text, tokens around it) of what a sample trains on; none for one that the trainer drops.

    Stage pt reads the first message alone and ends it; a sample of sft needs an answer; dpo has two sequences.
    """
    answers: list[Any]
    if form.messages:
        turns = record.get(form.messages)
        turns = [turn for turn in turns if isinstance(turn, Mapping)] if isinstance(turns, list) else []
        asked = [_text(turn.get(form.content_tag)) + _text(turn.get("tool_calls")) for turn in turns]
        answers = [asked.pop()] if stage == "sft" and len(asked) > 1 else []
    else:
        history = record.get(form.history or "")
        turns = history if isinstance(history, list) else []
        asked = [_text(part) for turn in turns if isinstance(turn, list) for part in turn]
        question = (_text(record.get(column)) for column in (form.prompt, form.query) if column)
        asked.append("\n".join(part for part in question if part))
        answers = [record.get(form.response)] if form.response else []
    if stage == "pt":
        return [(asked[0], _END_OF_TEXT)] if asked and asked[0] else []
    if stage == "dpo":
        pair = [record.get(column) for column in (form.chosen, form.rejected) if column]
        answers = [answer.get(form.content_tag) if isinstance(answer, Mapping) else answer for answer in pair]
    if len(answers) != (2 if stage == "dpo" else 1) or not all(isinstance(answer, str) for answer in answers):
        return []
    asked += [_text(record[column]) for column in (form.system, form.tools) if column and record.get(column)]
    return [_around([*asked, answer]) for answer in answers]


def _around(messages: Sequence[str]) -> tuple[str, int]:
    """All text of a sequence, and the tokens of its template."""
    return "\n".join(messages), TOKENS_PER_MESSAGE * len(messages)


def _text(value: Any) -> str:
    """What a template would write for a value: text as it is, and anything else as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


def _counter(tokenizer: Path | None) -> _Counter:
    """The model's own tokenizer where there is one and its package, else the rule of bytes."""
    if tokenizer is None or not _is_file(tokenizer):
        return _BY_BYTES
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return _BY_BYTES
    try:
        model = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the package raises bare ones
        raise SpecError(f"is not a tokenizer: {quote(str(error))}", where=shown_path(tokenizer)) from None

    def count(texts: Sequence[str]) -> list[int]:
        return [len(encoded.ids) for encoded in model.encode_batch(list(texts), add_special_tokens=False)]

    return _Counter(count=count, rule="counted with the model's tokenizer", error=0.0, measured_bytes=TOKENIZED_BYTES)


def _by_bytes(texts: Sequence[str]) -> list[int]:
    sizes = (len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return [math.ceil(size / BYTES_PER_TOKEN) for size in sizes]


_BY_BYTES = _Counter(
    count=_by_bytes,
    rule=f"estimated at {BYTES_PER_TOKEN} bytes a token, {BYTES_PER_TOKEN_ERROR:.0%} either way",
    error=BYTES_PER_TOKEN_ERROR,
    measured_bytes=MEASURED_BYTES,
)
