"""Words of a command, each with the lines that it comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from topoplan.reading.shell_words import Piece

_BRACKETS = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_WORD = re.compile(rf"(?:\${_BRACKETS}|`[^`]*`|\S)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word of a command, without its quotes."""

    text: str
    line: int
    quoted: bool = False
    """Some of it was in quotes."""
    assumed: bool = False
    """Holds the default of `${NAME:-default}`: the environment may say otherwise."""
    starts: tuple[tuple[int, int], ...] = ()
    """Line from a character of `text` on."""


def is_open(text: str) -> bool:
    """Whether the shell puts something in the place of a part of it, which is not known here."""
    return "$" in text or "`" in text


class Fields:
    """Words in the making, cut as a shell cuts them."""

    def __init__(self, line: int) -> None:
        self._line = line
        self._done: list[Word] = []
        self._chunks: list[tuple[str, int]] = []
        self._quoted = self._assumed = False

    def add(self, text: str, line: int, *, quoted: bool, assumed: bool = False) -> None:
        """More text for the word that is being made."""
        self._chunks.append((text, line))
        self._quoted |= quoted
        self._assumed |= assumed

    def put(self, words: Sequence[Word], piece: Piece, *, splits: bool) -> None:
        """The value of a variable, cut into words where it stands without quotes."""
        cuts = splits and not piece.quoted
        for number, word in enumerate(words):
            if number:
                if splits:
                    self._end()
                else:
                    self.add(" ", word.line, quoted=True)
            at = 0
            for start, text in _parts(word.text) if cuts else [(0, word.text)]:
                if start > at or (not text and cuts):
                    self._end()
                for chunk, line in _chunks(word, start, start + len(text)):
                    self.add(chunk, line, quoted=piece.quoted, assumed=word.assumed)
                at = start + len(text)

    def _end(self) -> None:
        if self._chunks and (self._quoted or any(text for text, _ in self._chunks)):
            self._done.append(_word(self._chunks, quoted=self._quoted, assumed=self._assumed))
        self._chunks, self._quoted, self._assumed = [], False, False

    def words(self) -> list[Word]:
        """All of them, the last one ended."""
        self._end()
        return self._done


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """Where the words of a value begin; an empty one at the end stands for blanks there.

    The blanks in `$(hostname -s)` are not those of the value, which is what the command prints: one word, as a rule.
    """
    end = 0
    for match in _WORD.finditer(text):
        end = match.end()
        yield match.start(), match.group()
    if end < len(text):
        yield len(text), ""


def _word(chunks: Sequence[tuple[str, int]], *, quoted: bool, assumed: bool) -> Word:
    starts: list[tuple[int, int]] = []
    at = 0
    for text, line in chunks:
        for number, piece in enumerate(text.split("\n")):
            if not starts or starts[-1][1] != line + number:
                starts.append((at, line + number))
            at += len(piece) + 1
        at -= 1
    text = "".join(text for text, _ in chunks)
    first = next((line for chunk, line in chunks if chunk.strip()), chunks[0][1])
    return Word(text=text, line=first, quoted=quoted, assumed=assumed, starts=tuple(starts))


def _chunks(word: Word, start: int, end: int) -> Iterator[tuple[str, int]]:
    """A stretch of a word, piece by piece, with the line of each."""
    starts = word.starts or ((0, word.line),)
    for (here, line), (there, _) in zip(starts, (*starts[1:], (len(word.text), 0)), strict=True):
        low, high = max(start, here), min(end, there)
        if low < high:
            yield word.text[low:high], line


def glue(words: Sequence[Word], between: str = "") -> Word:
    """One word of several, which keeps the line of each."""
    chunks: list[tuple[str, int]] = []
    for word in words:
        if chunks and between:
            chunks.append((between, word.line))
        chunks += _chunks(word, 0, len(word.text)) if word.text else [("", word.line)]
    return _word(chunks, quoted=True, assumed=any(word.assumed for word in words))


def join(words: Sequence[Word]) -> Word:
    """Words with blanks between them, as `eval` and `ssh` put them together."""
    return glue(words, " ")
