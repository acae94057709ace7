"""Words of a command, each with the lines that its text comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BRACKETS = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_WORD = re.compile(rf"(?:\${_BRACKETS}|`[^`]*`|\S)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word of a command, without its quotes."""

    text: str
    line: int
    quoted: bool = False
    """True if part of it was in quotes."""
    assumed: bool = False
    """True if it contains the default of `${NAME:-default}`, which the environment may override."""
    lines: tuple[int, ...] = ()
    """The line of each character."""


def is_open(text: str) -> bool:
    """Whether a text contains a shell expansion whose result is unknown here."""
    return "$" in text or "`" in text


class Fields:
    """Builds words by splitting text at blanks as a shell does."""

    def __init__(self) -> None:
        self._done: list[Word] = []
        self._parts: list[Word] = []

    def add(self, part: Word) -> None:
        """Append text to the current word."""
        self._parts.append(part)

    def put(self, words: Sequence[Word], *, quoted: bool, splits: bool) -> None:
        """Append the value of a variable, split into words if it is unquoted."""
        for number, word in enumerate(words):
            if number and splits:
                self._end()
            elif number:
                self.add(Word(text=" ", line=word.line, lines=(word.line,), quoted=True))
            end = 0
            for start, text in _fields(word.text) if splits and not quoted else [(0, word.text)]:
                if start > end or (not text and not quoted and splits):
                    self._end()
                if not text:
                    continue
                end = start + len(text)
                lines = word.lines[start:end] or (word.line,) * len(text)
                self.add(Word(text=text, line=lines[0], lines=lines, quoted=quoted, assumed=word.assumed))

    def _end(self) -> None:
        if any(part.quoted or part.text for part in self._parts):
            self._done.append(glue(self._parts))
        self._parts = []

    def words(self) -> list[Word]:
        """End the current word and return all words."""
        self._end()
        return self._done


def _fields(text: str) -> Iterator[tuple[int, str]]:
    """Yield the start and text of each word in a value; a final empty one stands for trailing blanks.

    Blanks inside `$(hostname -s)` do not split: the value is what the command prints, which is usually one word.
    """
    end = 0
    for match in _WORD.finditer(text):
        end = match.end()
        yield match.start(), match.group()
    if end < len(text):
        yield len(text), ""


def glue(parts: Sequence[Word]) -> Word:
    """Return several words joined into one that keeps the line of each character."""
    return Word(
        text="".join(part.text for part in parts),
        line=next((part.line for part in parts if part.text.strip()), parts[0].line),
        lines=tuple(line for part in parts for line in part.lines or (part.line,) * len(part.text)),
        quoted=any(part.quoted for part in parts),
        assumed=any(part.assumed for part in parts),
    )


def join(words: Sequence[Word]) -> Word:
    """Return words joined with blanks, as `eval` and `ssh` do."""
    found = Fields()
    found.put(words, quoted=True, splits=False)
    return found.words()[0]
