"""The words and operators of a bash script, with the line of each; nothing is run, and nothing expanded yet.

As bash reads it (Bash Reference Manual, 3.1 Shell Syntax, 3.5 Shell Expansions): quotes, escapes, comments,
continued lines, here-documents, redirections. `$( )` and backticks stay as they are written. Every character is
looked at a bounded number of times, and nesting is counted on a list, never by recursion: hostile text costs time in
proportion to its length.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_MOST_TOKENS = 100_000
_PLAIN = re.compile(r"[^\s\\'\"$`;&|<>()#]+")
_PLAIN_QUOTED = re.compile(r"[^\"\\$`]+")
_NOTABLE_INSIDE = re.compile(r"[\\'\"`(){}#]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PARAMETER = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|[0-9]+)(\[[@*]\])?(?::?[-=](.*))?", re.DOTALL)
_ASSIGNED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_OPERATOR = re.compile(r";;&|;;|;&|;|&&|&>>|&>|&|\|\||\|&|\||<<<|<<-|<<|<>|<&|<|>>|>\||>&|>|\(|\)")
_REDIRECTIONS = frozenset(["&>>", "&>", "<<<", "<>", "<&", "<", ">>", ">|", ">&", ">"])
_ANSI_C = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of a word with one meaning."""

    kind: Literal["text", "variable", "opaque"]
    """text: literally that. variable: the value of one takes its place. opaque: what only a running shell knows."""
    text: str
    """As it is meant; for the other two kinds as it is written."""
    line: int
    quoted: bool
    """Not split into words once it is expanded."""
    name: str = ""
    """Of the variable."""
    every: bool = False
    """`${NAME[@]}`: all items of an array."""
    default: str | None = None
    """Of `${NAME:-default}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A word or an operator."""

    line: int
    operator: str = ""
    """`;`, `&&`, `(` and so on, a line break, `<>` for any redirection; empty for a word."""
    pieces: tuple[Piece, ...] = ()
    array: bool = False
    """`NAME=(`: the words up to the closing parenthesis are the items."""
    last_line: int = 0
    """Where the word ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A script, in words and operators."""

    tokens: tuple[Token, ...]
    unclosed: tuple[str, int] | None = None
    """A quote or bracket that is never closed, and its line."""

    @property
    def too_many(self) -> bool:
        """Reading stopped before the end."""
        return len(self.tokens) > _MOST_TOKENS


def split(text: str, starts: Sequence[tuple[int, int]] = ()) -> Words:
    """Words and operators of a script. `starts` says the line from a character on, where it is not the plain count."""
    return _Splitter(text, starts).run()


class _Splitter:
    def __init__(self, text: str, starts: Sequence[tuple[int, int]]) -> None:
        self.text = text
        starts = starts or [(0, 1), *((match.end(), number) for number, match in _breaks(text))]
        self._offsets = [offset for offset, _ in starts]
        self._lines = [line for _, line in starts]
        self.tokens: list[Token] = []
        self.pieces: list[Piece] = []
        self.word_start: int | None = None
        self.here_documents: list[tuple[str, bool]] = []
        self.unclosed: tuple[str, int] | None = None
        self._double_parentheses = True

    def line(self, at: int) -> int:
        return self._lines[max(bisect_right(self._offsets, at) - 1, 0)]

    def run(self) -> Words:
        text, at = self.text, 0
        while at < len(text) and len(self.tokens) <= _MOST_TOKENS:
            at = self._step(text[at], at)
        self._end_word(at)
        self._operator("\n", at)
        return Words(tokens=tuple(self.tokens), unclosed=self.unclosed)

    def _step(self, char: str, at: int) -> int:
        text = self.text
        if char == "\n":
            self._end_word(at)
            self._operator("\n", at)
            return self._skip_here_documents(at + 1)
        if char.isspace():
            self._end_word(at)
            return at + 1
        if char == "#" and self.word_start is None:
            end = text.find("\n", at)
            return len(text) if end < 0 else end
        if char in ";&|<>()":
            return self._step_operator(at)
        if self.word_start is None and not text.startswith(("\\\n", "\\\r\n"), at):
            self.word_start = at
        if char == "\\":
            return self._escape(at)
        if char == "'":
            end = self._find("'", at)
            self._add("text", text[at + 1 : end], at, quoted=True)
            return end + 1
        if char == '"':
            return self._double_quoted(at)
        if char == "`":
            end = self._balanced(at)
            self._add("opaque", text[at:end], at, quoted=True)
            return end
        if char == "$":
            return self._dollar(at, quoted=False)
        match = _PLAIN.match(text, at)
        end = match.end() if match else at + 1  # a `#` inside a word
        self._add("text", text[at:end], at, quoted=False)
        return end

    # Words -----------------------------------------------------------------------------------------------------------

    def _add(self, kind: Literal["text", "variable", "opaque"], text: str, at: int, *, quoted: bool) -> None:
        self.pieces.append(Piece(kind=kind, text=text, line=self.line(at), quoted=quoted))

    def _end_word(self, at: int, *, array: bool = False) -> None:
        if self.word_start is not None:
            self.tokens.append(
                Token(
                    line=self.line(self.word_start),
                    pieces=tuple(self.pieces),
                    array=array,
                    last_line=self.line(max(at - 1, self.word_start)),
                )
            )
        self.pieces, self.word_start = [], None

    def _escape(self, at: int) -> int:
        text = self.text
        if text.startswith("\\\r\n", at):
            return at + 3
        if text.startswith("\\\n", at):
            return at + 2
        self._add("text", text[at + 1 : at + 2], at, quoted=True)
        return at + 2

    def _find(self, closing: str, at: int) -> int:
        end = self.text.find(closing, at + 1)
        if end < 0:
            self._note_unclosed(self.text[at], at)
            return len(self.text)
        return end

    def _note_unclosed(self, what: str, at: int) -> None:
        if self.unclosed is None:
            self.unclosed = (what, self.line(at))

    def _double_quoted(self, start: int) -> int:
        text, at = self.text, start + 1
        self._add("text", "", start, quoted=True)  # an empty string is a word too
        while at < len(text):
            char = text[at]
            if char == '"':
                return at + 1
            if char == "\\":
                follower = text[at + 1 : at + 2]
                if text.startswith("\\\r\n", at):
                    at += 3
                    continue
                if follower != "\n":
                    kept = follower if follower in '"\\$`' else "\\" + follower
                    self._add("text", kept, at, quoted=True)
                at += 2
            elif char == "$":
                at = self._dollar(at, quoted=True)
            elif char == "`":
                end = self._balanced(at)
                self._add("opaque", text[at:end], at, quoted=True)
                at = end
            else:
                match = _PLAIN_QUOTED.match(text, at)
                end = match.end() if match else at + 1
                self._add("text", text[at:end], at, quoted=True)
                at = end
        self._note_unclosed('"', start)
        return at

    def _dollar(self, at: int, *, quoted: bool) -> int:
        text = self.text
        follower = text[at + 1 : at + 2]
        if follower == "(":
            end = self._balanced(at + 1)
            self._add("opaque", text[at:end], at, quoted=True)
            return end
        if follower == "{":
            end = self._balanced(at + 1)
            self._parameter(text[at:end], text[at + 2 : end - 1], at, quoted=quoted)
            return end
        if follower == "'" and not quoted:
            return self._ansi_c(at)
        if follower == '"' and not quoted:
            return self._double_quoted(at + 1)
        if match := _NAME.match(text, at + 1):
            self._parameter(text[at : match.end()], match.group(), at, quoted=quoted)
            return match.end()
        if follower and (follower.isdigit() or follower in "@*#?-$!"):
            self._add("opaque", text[at : at + 2], at, quoted=quoted)
            return at + 2
        self._add("text", "$", at, quoted=quoted)
        return at + 1

    def _parameter(self, written: str, inside: str, at: int, *, quoted: bool) -> None:
        match = _PARAMETER.fullmatch(inside)
        if match is None:
            self._add("opaque", written, at, quoted=quoted)
            return
        default = match.group(3)
        if default is not None and len(default) > 1 and default[0] == default[-1] and default[0] in "'\"":
            default = default[1:-1]
        self.pieces.append(
            Piece(
                kind="variable",
                text=written,
                line=self.line(at),
                quoted=quoted,
                name=match.group(1),
                every=match.group(2) is not None,
                default=default,
            )
        )

    def _ansi_c(self, start: int) -> int:
        text, at, out = self.text, start + 2, []
        while at < len(text) and text[at] != "'":
            if text[at] == "\\" and at + 1 < len(text):
                out.append(_ANSI_C.get(text[at + 1], "\\" + text[at + 1]))
                at += 2
            else:
                out.append(text[at])
                at += 1
        if at >= len(text):
            self._note_unclosed("$'", start)
        self._add("text", "".join(out), start, quoted=True)
        return at + 1

    def _balanced(self, start: int) -> int:
        """The end of what a bracket or backtick opens, quotes inside it respected."""
        text, at = self.text, start + 1
        open_ = [text[start]]
        closing = {"(": ")", "{": "}", '"': '"', "`": "`"}
        while open_:
            match = _NOTABLE_INSIDE.search(text, at)
            if match is None:
                self._note_unclosed(text[start], start)
                return len(text)
            char, at = match.group(), match.end()
            inside = open_[-1]
            if char == "\\":
                at += 1
            elif char == closing[inside]:
                open_.pop()
            elif (char in "({" and (text[at - 2] == "$" or (inside == char and inside != '"'))) or char in '"`':
                open_.append(char)
            elif char == "'" and inside != '"':
                end = text.find("'", at)
                if end < 0:
                    self._note_unclosed("'", at - 1)
                    return len(text)
                at = end + 1
            elif char == "#" and inside == "(" and text[at - 2].isspace():
                end = text.find("\n", at)
                at = len(text) if end < 0 else end
        return at

    # Operators -------------------------------------------------------------------------------------------------------

    def _operator(self, operator: str, at: int) -> None:
        if self.tokens and self.tokens[-1].operator == operator:
            return  # a run of them says no more than one
        self.tokens.append(Token(line=self.line(at), operator=operator))

    def _step_operator(self, at: int) -> int:
        text = self.text
        match = _OPERATOR.match(text, at)
        operator = match.group() if match else text[at]
        after = at + len(operator)
        if operator in "<>" and text.startswith("(", after):  # process substitution: a word
            if self.word_start is None:
                self.word_start = at
            end = self._balanced(after)
            self._add("opaque", text[at:end], at, quoted=True)
            return end
        if operator in _REDIRECTIONS or operator in ("<<", "<<-"):
            if self.word_start is not None and self._is_descriptor():
                self.pieces, self.word_start = [], None
            self._end_word(at)
            if operator in _REDIRECTIONS:
                self._operator("<>", at)
                return after
            return self._here_document(after, tabs=operator == "<<-")
        if operator == "(":
            if self.word_start is not None and _ASSIGNED.fullmatch("".join(piece.text for piece in self.pieces)):
                self._end_word(at, array=True)
                return after
            if self._double_parentheses and self.word_start is None and text.startswith("((", at):
                end = text.find("))", after)
                if end >= 0:
                    return end + 2  # arithmetic, in which << is no here-document
                self._double_parentheses = False
        self._end_word(at)
        self._operator(operator, at)
        return after

    def _is_descriptor(self) -> bool:
        """`2>`, `{log}>`: the word in front of a redirection belongs to it."""
        only = self.pieces[0] if len(self.pieces) == 1 else None
        return only is not None and not only.quoted and bool(re.fullmatch(r"[0-9]+|\{\w+\}", only.text))

    def _here_document(self, at: int, *, tabs: bool) -> int:
        text = self.text
        while text[at : at + 1] in (" ", "\t") and at < len(text):
            at += 1
        start = at
        while at < len(text) and not text[at].isspace() and text[at] not in ";&|<>()":
            at += 1
        self.here_documents.append((re.sub(r"['\"\\]", "", text[start:at]), tabs))
        return at

    def _skip_here_documents(self, at: int) -> int:
        text = self.text
        for delimiter, tabs in self.here_documents:
            while at < len(text):
                end = text.find("\n", at)
                end = len(text) if end < 0 else end
                line = text[at:end].rstrip("\r")
                at = end + 1
                if (line.lstrip("\t") if tabs else line) == delimiter:
                    break
        self.here_documents = []
        return at


def _breaks(text: str) -> list[tuple[int, re.Match[str]]]:
    return [(number, match) for number, match in enumerate(re.finditer("\n", text), start=2)]
