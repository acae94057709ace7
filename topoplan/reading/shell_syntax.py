"""Parse shell text with tree-sitter-bash into a syntax tree and its words. Nothing is executed or expanded here.

`$( )` and backticks are left as written (Bash Reference Manual, 3.1 Shell Syntax, 3.5 Shell Expansions).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Literal

from topoplan.errors import SpecError
from topoplan.reading.words import Word

if TYPE_CHECKING:
    from tree_sitter import Node, Parser, Tree

_MOST_PIPES = 2_000
_MOST_SECONDS = 5.0
"""Limits far above any real script: for some adversarial texts, tree-sitter takes time quadratic in the length."""

_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9]+)(\[[@*]\])?(?::?[-=](.*))?", re.DOTALL | re.ASCII)
_ASSIGNMENT = re.compile(rb"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_VALUE = rb"\$(?:([A-Za-z_][A-Za-z0-9_]*)|[0-9@*#?$!-])"
_UNQUOTED = re.compile(rb"\\([^\x80-\xff]|[\xc0-\xff][\x80-\xbf]*)|" + _VALUE, re.DOTALL)
_IN_QUOTES = re.compile(rb"\\([\"\\$`\n])|" + _VALUE)
_IN_ANSI_C = re.compile(rb"\\([ntr\\'\"])()")
_IN_RAW = re.compile(rb"(?!)()()")
_ANSI_C = {b"n": b"\n", b"t": b"\t", b"r": b"\r"}
_OPAQUE = frozenset(["command_substitution", "process_substitution", "arithmetic_expansion"])
_ENDS = {"if": "fi", "do": "done", "case": "esac"}
_QUOTES = {"string": (1, _IN_QUOTES), "raw_string": (1, _IN_RAW), "ansi_c_string": (2, _IN_ANSI_C)}
"""Kind of quote -> number of opening characters, and pattern of what has a special meaning inside."""
_WHOLE = _OPAQUE | _QUOTES.keys() | {"expansion"}
_HERE_DOCUMENT = r"<<-?[ \t]*(['\"]?)(\w+)\1[^\n]*\n(?:[^\n]*\n)*?\t*\2$"
_CLOSED = re.compile(
    rf"\\.|(?<!\S)#[^\n]*|{_HERE_DOCUMENT}|'[^']*'|\"(?:[^\"\\]|\\.)*\"|`(?:[^`\\]|\\.)*`|(?P<open>\$'|['\"`])"
    r"|(?P<bracket>[$<>]?\(|\$?\{)|(?P<end>[)}])",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a word that is expanded in one way."""

    kind: Literal["text", "variable", "opaque"]
    """text: taken literally. variable: replaced by its value. opaque: only known to a running shell."""
    text: str
    """The text with quotes and escapes removed; for variable and opaque pieces, as written."""
    line: int
    quoted: bool
    """True if the expansion is not split into words."""
    name: str = ""
    """Name of the variable."""
    every: bool = False
    """True for `${NAME[@]}`, all items of an array."""
    default: str | None = None
    """The default in `${NAME:-default}`."""

    def word(self) -> Word:
        """Return the piece as a word, or as the beginning of one."""
        lines = (
            tuple(self.line + self.text.count("\n", 0, at) for at in range(len(self.text))) if "\n" in self.text else ()
        )
        return Word(text=self.text, line=self.line, quoted=self.quoted, lines=lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class HereDocument:
    """Location and form of a here-document."""

    line: int
    """Line of the command that receives it; the text begins on the next line."""
    last_line: int
    """Last line of the text."""
    tabs: bool
    """True for `<<-`, which strips leading tabs."""
    quoted: bool
    """True if nothing in the text is expanded."""


@cache
def _parser() -> Parser:
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


@lru_cache(maxsize=32)
def tree_of(content: bytes) -> Tree | None:
    """Return the syntax tree of shell text; None if parsing takes too long."""
    end = time.monotonic() + _MOST_SECONDS
    if content.count(b"|") > _MOST_PIPES:
        return None
    try:
        return _parser().parse(
            lambda offset, _: content[offset : offset + 2**16],
            progress_callback=lambda _offset, _has_error: time.monotonic() > end,
        )
    except ValueError:
        return None


class Shell:
    """Shell text with its syntax tree, its words and their lines. Windows line endings are tolerated."""

    def __init__(self, text: str, lines: Sequence[int] = (), *, name: str) -> None:
        """Parse the text. `lines` gives the line of each character if they are not simply counted. Raises SpecError."""
        self._text = text.replace("\\\r\n", " \\\n").replace("\r", " ").replace("\0", " ")
        self._content = self._text.encode("utf-8", "replace")
        tree = tree_of(self._content)
        if tree is None:
            raise SpecError("takes too long to be read as a launch script", where=name)
        self.root = tree.root_node
        if lines:
            self._lines = [at for char, at in zip(text, lines, strict=True) for _ in char.encode("utf-8", "replace")]
        else:
            rows = enumerate(self._content.split(b"\n"), start=1)
            self._lines = [number for number, row in rows for _ in range(len(row) + 1)]

    def line(self, at: int) -> int:
        """Return the line of a byte offset."""
        return self._lines[min(at, len(self._lines) - 1)] if self._lines else 1

    def pieces(self, nodes: Sequence[Node]) -> list[Piece]:
        """Split a word, given as adjacent nodes, into pieces without quotes."""
        return list(self._stretch(nodes[0].start_byte, nodes[-1].end_byte, nodes, _UNQUOTED))

    def assignment(self, nodes: Sequence[Node]) -> tuple[str, bool, list[Piece]] | None:
        """Return name, whether it appends, and value of a word `NAME=value` or `NAME+=value`; None for other words."""
        match = _ASSIGNMENT.match(self._content, nodes[0].start_byte, nodes[-1].end_byte)
        if match is None:
            return None
        inner = [one for node in nodes for one in node.children]
        end = next((one.start_byte for one in inner if one.type == "ERROR"), nodes[-1].end_byte)
        start = Piece(kind="text", text="", line=self.line(match.end()), quoted=True)
        inside = nodes if nodes[0].type != "variable_assignment" else [*nodes[0].children[2:], *nodes[1:]]
        return match[1].decode(), bool(match[2]), [start, *self._stretch(match.end(), end, inside, _UNQUOTED)]

    def _stretch(self, start: int, end: int, nodes: Sequence[Node], meaning: re.Pattern[bytes]) -> Iterator[Piece]:
        quoted = meaning is not _UNQUOTED
        for node in _whole(nodes):
            first = node.start_byte - (node.type == "string" and self._content[start : node.start_byte].endswith(b"$"))
            yield from self._literal(start, first, meaning)
            start = node.end_byte
            written = self._content[node.start_byte : start].decode("utf-8", "replace")
            line = self.line(node.start_byte)
            if node.type == "expansion":
                yield _parameter(written, line, quoted=quoted)
            elif node.type in _OPAQUE:
                yield Piece(kind="opaque", text=written, line=line, quoted=True)
            else:
                yield Piece(kind="text", text="", line=line, quoted=True)  # an empty quoted string is a word too
                opening, inside = _QUOTES[node.type]
                yield from self._stretch(node.start_byte + opening, start - 1, node.children, inside)
        yield from self._literal(start, end, meaning)

    def _literal(self, start: int, end: int, meaning: re.Pattern[bytes]) -> Iterator[Piece]:
        """Yield literal text with escapes resolved and continued lines joined, and each `$NAME` as its own piece."""
        quoted = meaning is not _UNQUOTED
        for match in (*meaning.finditer(self._content, start, end), None):
            upto = match.start() if match else end
            if start < upto:
                text = self._content[start:upto].decode("utf-8", "replace")
                yield Piece(kind="text", text=text, line=self.line(start), quoted=quoted)
            if match is None:
                return
            start, line = match.end(), self.line(upto)
            if match[1] is None:
                yield _parameter(match[0].decode(), line, quoted=quoted)
            elif match[1] != b"\n":
                text = (_ANSI_C.get(match[1], match[1]) if meaning is _IN_ANSI_C else match[1]).decode(
                    "utf-8", "replace"
                )
                yield Piece(kind="text", text=text, line=line, quoted=True)

    def words(self, nodes: Sequence[Node]) -> Iterator[list[Node]]:
        """Yield a command's words; adjacent nodes form one word even where the grammar sees several: `$A/$B.tab`."""
        word: list[Node] = []
        for node in nodes:
            if word and self._content[word[-1].end_byte : node.start_byte] not in (b"", b"\\\n"):
                yield word
                word = []
            word.append(node)
        if word:
            yield word

    def ends_between(self, before: Node, after: Node) -> bool:
        """Whether a line, and so a command, ends between two nodes; the grammar misses line ends after assignments."""
        return re.search(rb"(?<!\\)\n", self._content[before.end_byte : after.start_byte]) is not None

    def here_documents(self) -> Iterator[HereDocument]:
        """Yield the here-documents that are terminated, in order."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            parts = {one.type: one for one in node.children} if node.type == "heredoc_redirect" else {}
            start, end = parts.get("heredoc_start"), parts.get("heredoc_end")
            if start is not None and end is not None and not end.is_missing:
                yield HereDocument(
                    line=self.line(start.start_byte),
                    last_line=self.line(end.start_byte) - 1,
                    tabs="<<-" in parts,
                    quoted=start.text is not None and start.text[:1] in (b"'", b'"', b"\\"),
                )
            waiting += reversed(node.children)

    def unclosed(self) -> tuple[str, int] | None:
        """Return a quote, bracket or `if` that is never closed, and its line."""
        if not self.root.has_error:
            return None
        open_: list[re.Match[str]] = []
        for match in _CLOSED.finditer(self._text):
            if match["open"]:
                return match["open"], self._text.count("\n", 0, match.start()) + 1
            if match["bracket"]:
                open_.append(match)
            elif match["end"] and open_:
                open_.pop()
        first = next((match for match in open_ if len(match["bracket"]) > 1), None)
        if first is not None:
            return first["bracket"][-1], self._text.count("\n", 0, first.start()) + 1
        return self._unended()

    def _unended(self) -> tuple[str, int] | None:
        """Return the last `if`, `do` or `case` of a kind that has more openings than ends, and its line."""
        words: dict[str, list[Node]] = {}
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            if not node.children and not node.is_missing and node.type in _ENDS | dict.fromkeys(_ENDS.values(), ""):
                words.setdefault(node.type, []).append(node)
            waiting += reversed(node.children)
        for begins, end in _ENDS.items():
            if len(words.get(begins, ())) > len(words.get(end, ())):
                return begins, self.line(words[begins][-1].start_byte)
        return None


def _whole(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield the nodes of a word with a special meaning: quotes, `${...}`, `$(...)`."""
    for node in nodes:
        if node.type in _WHOLE:
            yield node
        else:
            yield from _whole(node.children)


def _parameter(written: str, line: int, *, quoted: bool) -> Piece:
    """Return the piece for `$NAME` or `${NAME}`."""
    inside = written[2:].removesuffix("}") if written.startswith("${") else written[1:]
    match = _PARAMETER.fullmatch(inside)
    if match is None or (match[1].isdecimal() and match[3] is None):
        return Piece(kind="opaque", text=written, line=line, quoted=quoted)
    default = match[3]
    if default is not None and len(default) > 1 and default[0] == default[-1] and default[0] in "'\"":
        default = default[1:-1]
    every = match[2] is not None
    return Piece(kind="variable", text=written, line=line, quoted=quoted, name=match[1], every=every, default=default)
