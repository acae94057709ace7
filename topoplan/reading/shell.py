"""Shell text -> the commands in it, each with its words and the variables that it sees. Nothing is ever run.

Variables that the script itself sets are put in place, as bash would (Bash Reference Manual, 3.5.3 and 3.5.7); what
only a running shell knows, `$(hostname)` or a variable from outside, stays as it is written. Both branches of an `if`
are read; what one of them sets is not known behind it.

No library does this: bashlex is under the GPL and gives a syntax tree without values; shlex gives words without lines,
and knows neither expansions nor here-documents.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from topoplan.errors import SpecError
from topoplan.reading.parts import Part
from topoplan.reading.setup import Variable
from topoplan.reading.shell_words import Piece, Token, split
from topoplan.reading.words import Fields, Word, glue, join

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_EXPANDED_CHARS = 2_000_000
_MOST_NESTED_SHELLS = 3

_OPENING = frozenset(["if", "for", "while", "until", "case", "select"])
_MIDDLE = frozenset(["then", "else", "elif", "do", "in"])
_CLOSING = frozenset(["fi", "done", "esac"])
_BRANCH_ENDS = frozenset(["else", "elif", *_CLOSING])
_NO_COMMAND = frozenset(["!", "{", "}", "time", "function"])
_DECLARE = frozenset(["declare", "typeset", "local", "readonly"])


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment variables, the last one set first: a chain, so that each command can keep the one it sees."""

    variable: Variable | None
    name: str
    before: Environment | None

    def variables(self) -> tuple[Variable, ...]:
        """What a process sees, in the order in which it was set; the last one of a name."""
        found: dict[str, Variable | None] = {}
        here: Environment | None = self
        while here is not None:
            found.setdefault(here.name, here.variable)
            here = here.before
        return tuple(variable for variable in reversed(found.values()) if variable is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One simple command."""

    words: tuple[Word, ...]
    environment: Environment | None
    """Exported before it, or given in front of it."""
    first_line: int
    last_line: int
    background: bool = False
    """It ends with `&`."""


@dataclass(slots=True, kw_only=True)
class Script:
    """What a piece of shell text says."""

    part: Part
    commands: list[Command] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    """Set in the environment, anywhere in it."""
    not_exported: list[Variable] = field(default_factory=list)
    """Set for the shell alone: no process sees them."""
    environment: Environment | None = None
    """At its end."""
    unclosed: tuple[str, int] | None = None
    """A quote or bracket that is never closed, and its line."""


def read_script(part: Part, environment: Environment | None = None) -> Script:
    """The commands and variables of a shell part; `environment` is what was exported before it."""
    return _Reader(part, environment, budget=[_MOST_EXPANDED_CHARS]).read(part.text, ())


@dataclass(slots=True)
class _Value:
    """What a shell variable holds; an array has several words."""

    words: tuple[Word, ...]


class _Reader:
    def __init__(self, part: Part, environment: Environment | None, *, budget: list[int], depth: int = 0) -> None:
        self.script = Script(part=part, environment=environment)
        self.values: dict[str, _Value | None] = {}
        self.exported: set[str] = set()
        for variable in environment.variables() if environment else ():
            self.exported.add(variable.name)
            self.values[variable.name] = _value_of(variable)
        self.branches: list[set[str]] = []
        self._budget = budget
        self._depth = depth
        self._all_exported = False

    def read(self, text: str, starts: Sequence[tuple[int, int]]) -> Script:
        words = split(text, starts)
        if words.too_many:
            raise SpecError("holds too many words for a launch script", where=self.script.part.name)
        self.script.unclosed = words.unclosed
        tokens = words.tokens
        command: list[Token] = []
        at, redirected = 0, False
        while at < len(tokens):
            token = tokens[at]
            at += 1
            if token.operator == "<>":
                redirected = True
            elif token.operator:
                self._command(command, after=token.operator)
                if token.operator.startswith(";;"):
                    self._end_branch()
                command, redirected = [], False
            elif redirected:
                redirected = False
            elif token.array:
                items: list[Token] = []
                while at < len(tokens) and tokens[at].operator != ")":
                    if not tokens[at].operator:
                        items.append(tokens[at])
                    at += 1
                at += 1
                self._array(token, items)
            else:
                command.append(token)
        return self.script

    # Commands --------------------------------------------------------------------------------------------------------

    def _command(self, tokens: list[Token], *, after: str) -> None:
        tokens = self._without_keywords(tokens)
        if not tokens:
            return
        given: list[Variable] = []
        count = 0
        for token in tokens:
            match = _leading_assignment(token)
            if match is None:
                break
            count += 1
            if count == len(tokens):
                for one in tokens:
                    self._assign(one)
                return
            name, _, word = self._assigned(token)
            given.append(self._variable(name, word, token.line))
        words = [word for token in tokens[count:] for word in self._expand(token)]
        if not words:
            return
        name = words[0].text
        if name == "export" or name in _DECLARE:
            self._declare(name, tokens[count + 1 :])
            return
        if name == "unset":
            for word in words[1:]:
                self._unset(word.text)
            return
        if name == "set":
            flags = [word.text for word in words[1:]]
            if "-a" in flags or "allexport" in flags:
                self._all_exported = "-a" in flags or flags[0] != "+o"
            return
        environment = self.script.environment
        for variable in given:
            self.script.variables.append(variable)
            environment = Environment(variable, variable.name, environment)
        command = Command(
            words=tuple(words),
            environment=environment,
            first_line=tokens[0].line,
            last_line=max(token.last_line for token in tokens),
            background=after == "&",
        )
        if name == "eval" and len(words) > 1:
            self._evaluate(join(words[1:]))
            return
        self.script.commands.append(command)

    def _evaluate(self, word: Word) -> None:
        """`eval`: one more reading by the same shell."""
        if self._depth >= _MOST_NESTED_SHELLS:
            return
        inner = _Reader(self.script.part, self.script.environment, budget=self._budget, depth=self._depth + 1)
        inner.values, inner.exported = self.values, self.exported
        found = inner.read(word.text, word.starts)
        self.script.variables += found.variables
        self.script.commands += found.commands
        self.script.environment = found.environment

    def _without_keywords(self, tokens: list[Token]) -> list[Token]:
        at = 0
        while at < len(tokens):
            word = _plain(tokens[at])
            if word in _BRANCH_ENDS:
                self._end_branch(close=word in _CLOSING)
            elif word in _OPENING:
                self.branches.append(set())
                if word in ("for", "select") and at + 1 < len(tokens):
                    self._forget(_plain(tokens[at + 1]))
                if word in ("for", "select", "case"):
                    return []
            elif word not in _MIDDLE and word not in _NO_COMMAND:
                break
            at += 1
        return tokens[at:]

    def _end_branch(self, *, close: bool = False) -> None:
        """What was set in a branch is not known behind it."""
        if not self.branches:
            return
        names = self.branches[-1]
        for name in sorted(names):
            self._forget(name, note=False)
            if name in self.exported and (last := self._last(name)):
                unknown = Variable(name=name, value=f"${name}", part=last.part, line=last.line)
                self.script.environment = Environment(unknown, name, self.script.environment)
        names.clear()  # unknown they stay in the branches around it as well, until they are set again
        if close:
            self.branches.pop()

    def _last(self, name: str) -> Variable | None:
        here = self.script.environment
        while here is not None:
            if here.name == name:
                return here.variable
            here = here.before
        return None

    # Variables -------------------------------------------------------------------------------------------------------

    def _variable(self, name: str, word: Word, line: int) -> Variable:
        return Variable(name=name, value=word.text, part=self.script.part, line=line, assumed=word.assumed)

    def _assigned(self, token: Token) -> tuple[str, bool, Word]:
        head = token.pieces[0]
        name, more, value = _ASSIGNMENT.split(head.text, maxsplit=1)[1:]
        rest = Piece(kind="text", text=value, line=head.line, quoted=head.quoted)
        pieces = [Piece(kind="text", text="", line=token.line, quoted=True), rest, *token.pieces[1:]]
        word = self._expand_pieces(pieces, line=token.line, splits=False)[0]
        return name, bool(more), word

    def _assign(self, token: Token, *, export: bool = False) -> None:
        name, more, word = self._assigned(token)
        if more and (old := self.values.get(name)) and len(old.words) == 1:
            word = glue([old.words[0], word])
        self._set(name, _Value((word,)))
        if export or self._all_exported or name in self.exported:
            self._export(name, self._variable(name, word, token.line))
        else:
            self.script.not_exported.append(self._variable(name, word, token.line))

    def _array(self, token: Token, items: list[Token]) -> None:
        match = _leading_assignment(token)
        if match is None:
            return
        words = tuple(word for item in items for word in self._expand(item))
        old = self.values.get(match.group(1))
        if match.group(2) and old:
            words = (*old.words, *words)
        if len(words) <= _MOST_EXPANDED_CHARS // 100:
            self._set(match.group(1), _Value(words))

    def _set(self, name: str, value: _Value) -> None:
        self.values[name] = value
        if self.branches:
            self.branches[-1].add(name)

    def _forget(self, name: str, *, note: bool = True) -> None:
        self.values[name] = None
        if note and self.branches:
            self.branches[-1].add(name)

    def _export(self, name: str, variable: Variable) -> None:
        self.exported.add(name)
        self.script.variables.append(variable)
        self.script.environment = Environment(variable, name, self.script.environment)

    def _unset(self, name: str) -> None:
        if _NAME.fullmatch(name):
            self.values.pop(name, None)
            if self.branches:
                self.branches[-1].add(name)
            else:
                self.exported.discard(name)
                self.script.environment = Environment(None, name, self.script.environment)

    def _declare(self, keyword: str, tokens: list[Token]) -> None:
        export = keyword == "export"
        for token in tokens:
            word = _plain(token)
            if word.startswith("-"):
                export = export or "x" in word
                if keyword == "export" and "n" in word:
                    return
            elif _leading_assignment(token) is not None:
                self._assign(token, export=export)
            elif export and _NAME.fullmatch(word):
                value = self.values.get(word)
                text = value.words[0] if value and value.words else Word(text=f"${word}", line=token.line)
                self._export(word, self._variable(word, text, text.line or token.line))
                self.script.not_exported = [one for one in self.script.not_exported if one.name != word]

    # Expansion -------------------------------------------------------------------------------------------------------

    def _expand(self, token: Token) -> list[Word]:
        return self._expand_pieces(token.pieces, line=token.line, splits=True)

    def _expand_pieces(self, pieces: Sequence[Piece], *, line: int, splits: bool) -> list[Word]:
        found = Fields(line)
        for piece in pieces:
            value = self.values.get(piece.name) if piece.kind == "variable" else None
            if piece.kind != "variable":
                found.add(piece.text, piece.line, quoted=piece.quoted)
            elif value is not None and self._affords(value, every=piece.every):
                found.put(value.words if piece.every else value.words[:1], piece, splits=splits)
            elif value is None and piece.default is not None and piece.name not in self.values:
                word = Word(text=piece.default, line=piece.line, assumed=True)
                found.put((word,), piece, splits=splits)
            else:
                found.add(piece.text, piece.line, quoted=piece.quoted)
        return found.words()

    def _affords(self, value: _Value, *, every: bool) -> bool:
        """Values of values grow without bound; what is put in place is counted over the whole script."""
        size = sum(len(word.text) + 1 for word in (value.words if every else value.words[:1]))
        if size > self._budget[0]:
            return False
        self._budget[0] -= size
        return True


def nested_commands(script: Script, word: Word, environment: Environment | None, *, depth: int) -> list[Command]:
    """The commands of a word that another shell reads, such as that of `bash -c`; its variables go to the script."""
    if depth > _MOST_NESTED_SHELLS:
        return []
    found = _Reader(script.part, environment, budget=[_MOST_EXPANDED_CHARS // 10]).read(word.text, word.starts)
    script.variables += found.variables
    return found.commands


def _plain(token: Token) -> str:
    return "".join(piece.text for piece in token.pieces) if not any(p.quoted for p in token.pieces) else ""


def _leading_assignment(token: Token) -> re.Match[str] | None:
    first = token.pieces[0] if token.pieces else None
    if first is None or first.kind != "text" or first.quoted:
        return None
    return _ASSIGNMENT.match(first.text)


def _value_of(variable: Variable) -> _Value | None:
    if variable.value == f"${variable.name}":
        return None
    return _Value((Word(text=variable.value, line=variable.line, assumed=variable.assumed),))
