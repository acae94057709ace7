"""The text of a sample that LLaMA-Factory trains on, by the columns of its record.

Formats as in LLaMA-Factory's `data/parser.py` (dataset_info.json) and `data/converter.py` (columns).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from topoplan.errors import SpecError
from topoplan.units import quote

TOKENS_PER_MESSAGE = 5
"""Tokens that a chat template adds around a message, as in ChatML: `<|im_start|>user\\n` and `<|im_end|>\\n`."""
_END_OF_TEXT = 1
_MEDIA = ("images", "videos", "audios")


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
