"""Read shell text into its commands, each with its words and the variables that it sees. Nothing is ever executed.

Variables that the script itself sets are expanded as bash would (Bash Reference Manual, 3.5.3 and 3.5.7). What only a
running shell knows, such as `$(hostname)` or a variable from outside, is left as written. Both branches of an `if` are
read; variables set in either are unknown after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from topoplan.reading.arithmetic import worked_out
from topoplan.reading.parts import Part
from topoplan.reading.setup import Variable
from topoplan.reading.shell_syntax import Piece, Shell
from topoplan.reading.words import Fields, Word, glue, join

if TYPE_CHECKING:
    from tree_sitter import Node

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_EXPANDED_CHARS = 2_000_000
_MOST_NESTED_SHELLS = 3

_OPENING = frozenset(["if", "for", "while", "until", "case", "select"])
_CLOSING = frozenset(["fi", "done", "esac"])
_BRANCH_ENDS = frozenset(["else", "elif", ";;", ";&", ";;&", *_CLOSING])
_COMMANDS = frozenset(
    ["command", "declaration_command", "unset_command", "variable_assignment", "variable_assignments"]
)
_DECLARE = frozenset(["declare", "typeset", "local", "readonly"])
_LEFT_OUT = frozenset(["test_command", "heredoc_body", "file_redirect", "herestring_redirect", "array"])


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment variables as a linked list, most recent first, so that each command can keep the state it sees."""

    variable: Variable | None
    name: str
    before: Environment | None

    def variables(self) -> tuple[Variable, ...]:
        """Return the variables that a process sees, in the order of their last assignments."""
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
    """Variables exported before the command or set in front of it."""
    first_line: int
    last_line: int
    background: bool = False
    """True if the command ends with `&`."""
    wrappers: tuple[str, ...] = ()
    """Wrappers removed from the front of the command: sudo, ssh, srun, ..."""
    wrapper_words: tuple[tuple[str, ...], ...] = ()
    """The words of each wrapper, in the order of `wrappers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The commands and variables of a piece of shell text."""

    part: Part
    commands: tuple[Command, ...]
    """The commands as written."""
    unwrapped_commands: tuple[Command, ...] = ()
    """The commands without their wrappers: those after `srun`, those in the text of `bash -c`."""
    variables: tuple[Variable, ...]
    """All assignments of environment variables in the script."""
    not_exported: tuple[Variable, ...]
    """Variables that only the shell has; no process sees them."""
    environment: Environment | None
    """The environment at the end of the script."""
    unclosed: tuple[str, int] | None
    """A quote or bracket that is never closed, and its line."""


def read_session(part: Part, environment: Environment | None = None) -> Script:
    """Read the commands and variables of a shell part, given the environment exported so far. Raises SpecError."""
    return _Reader(part, environment, budget=[_MOST_EXPANDED_CHARS]).read(part.text)


def read_inner(part: Part, word: Word, environment: Environment | None) -> Script:
    """Read a word that is passed to another shell, such as the argument of `bash -c`."""
    return _Reader(part, environment, budget=[_MOST_EXPANDED_CHARS // 10]).read(word.text, word.lines)


class _Reader:
    def __init__(self, part: Part, environment: Environment | None, *, budget: list[int], depth: int = 0) -> None:
        self.part, self.environment = part, environment
        self.commands: list[Command] = []
        self.variables: list[Variable] = []
        self.not_exported: list[Variable] = []
        self.values: dict[str, tuple[Word, ...] | None] = {}
        """Values of shell variables, several words for an array; None if unknown."""
        self.exported: set[str] = set()
        for one in environment.variables() if environment else ():
            self.exported.add(one.name)
            is_known = one.value != f"${one.name}"
            self.values[one.name] = (Word(text=one.value, line=one.line, assumed=one.assumed),) if is_known else None
        self.branches: list[set[str]] = []
        self._budget, self._depth = budget, depth
        self._all_exported = self._ends_command = False

    def read(self, text: str, lines: Sequence[int] = ()) -> Script:
        self.shell = Shell(text, lines, name=self.part.name)
        waiting: list[Node | tuple[Node, ...]] = [self.shell.root]
        while waiting:  # an explicit stack, because nesting may be arbitrarily deep
            node = waiting.pop()
            if isinstance(node, tuple):
                self._statement(node)
            else:
                waiting += reversed(list(self._visit(node)))
        return Script(
            part=self.part,
            commands=tuple(self.commands),
            variables=tuple(self.variables),
            not_exported=tuple(self.not_exported),
            environment=self.environment,
            unclosed=self.shell.unclosed(),
        )

    def _visit(self, node: Node) -> Iterable[Node | tuple[Node, ...]]:
        """Process a command or keyword; return the nodes to visit in place of this one."""
        kind, children = node.type, node.children
        if not node.is_named:
            self._keyword(kind)
        elif kind in _LEFT_OUT or (kind == "compound_statement" and children and children[0].type == "(("):
            return ()
        elif kind in _COMMANDS:
            self._statement(_words(node))
            return ()
        elif kind == "redirected_statement" and children[0].type in _COMMANDS:
            self._statement(_words(node))
            return children[1:]
        elif kind == "c_style_for_statement":
            self.branches.append(set())
            return [one for one in children if one.type in ("do_group", "compound_statement")]
        elif kind == "ERROR":
            return _loose(children)
        elif kind == "for_statement" and (variable := node.child_by_field_name("variable")):
            self._forget(_text(variable))
        return children

    def _keyword(self, word: str) -> None:
        if word == "&" and self.commands and not self._ends_command:
            self.commands[-1] = replace(self.commands[-1], background=True)
        self._ends_command = True
        if word in _OPENING:
            self.branches.append(set())
        elif word in _BRANCH_ENDS:
            self._end_branch(close=word in _CLOSING)

    # Commands --------------------------------------------------------------------------------------------------------

    def _statement(self, nodes: Sequence[Node]) -> None:
        """Process a command, or several: the grammar misses some line ends."""
        words: list[list[Node]] = []
        for word in self.shell.words(nodes):
            if words and self.shell.ends_between(words[-1][-1], word[0]):
                self._command(words)
                words = []
            words.append(word)
        if words:
            self._command(words)

    def _command(self, nodes: Sequence[Sequence[Node]]) -> None:
        given = list(takewhile(self._is_assignment, nodes))
        if len(given) == len(nodes):
            for one in given:
                self._assign(one)
            return
        words = [word for one in nodes[len(given) :] for word in self._expand(self.shell.pieces(one), splits=True)]
        while words and words[0].text == "time":
            words = words[1:]
        if not words:
            return
        name, flags = words[0].text, [word.text for word in words[1:]]
        if name == "export" or name in _DECLARE:
            self._declare(name, nodes[len(given) + 1 :])
        elif name == "unset":
            for flag in flags:
                self._unset(flag)
        elif name == "set":
            if "-a" in flags or "allexport" in flags:
                self._all_exported = "-a" in flags or flags[0] != "+o"
        elif name == "eval" and flags:
            self._evaluate(join(words[1:]))
        else:
            environment = self.environment
            for one in given:
                key, _, value = self._assigned(one)
                variable = self._variable(key, value, one)
                self.variables.append(variable)
                environment = Environment(variable, variable.name, environment)
            first, last = nodes[0][0], max((one[-1] for one in nodes), key=lambda node: node.end_byte)
            command = Command(
                words=tuple(words),
                environment=environment,
                first_line=self.shell.line(first.start_byte),
                last_line=self.shell.line(last.end_byte - 1),
            )
            self.commands.append(command)
            self._ends_command = False

    def _evaluate(self, word: Word) -> None:
        """Process `eval`: the same shell reads the words once more."""
        if self._depth >= _MOST_NESTED_SHELLS:
            return
        inner = _Reader(self.part, self.environment, budget=self._budget, depth=self._depth + 1)
        inner.values, inner.exported = self.values, self.exported
        found = inner.read(word.text, word.lines)
        self.variables += found.variables
        self.commands += found.commands
        self.environment = found.environment

    def _end_branch(self, *, close: bool = False) -> None:
        """Mark the variables set in a branch as unknown after it."""
        if not self.branches:
            return
        names = self.branches[-1]
        for name in sorted(names):
            self._forget(name, note=False)
            if name in self.exported and (last := self._last(name)):
                unknown = Variable(name=name, value=f"${name}", part=last.part, line=last.line)
                self.environment = Environment(unknown, name, self.environment)
        names.clear()  # they remain unknown in the enclosing branches too, until set again
        if close:
            self.branches.pop()

    def _last(self, name: str) -> Variable | None:
        here = self.environment
        while here is not None:
            if here.name == name:
                return here.variable
            here = here.before
        return None

    # Variables -------------------------------------------------------------------------------------------------------

    def _variable(self, name: str, word: Word, nodes: Sequence[Node]) -> Variable:
        line = self.shell.line(nodes[0].start_byte)
        return Variable(name=name, value=word.text, part=self.part, line=line, assumed=word.assumed)

    def _is_assignment(self, nodes: Sequence[Node]) -> bool:
        return self.shell.assignment(nodes) is not None

    def _assigned(self, nodes: Sequence[Node]) -> tuple[str, bool, Word]:
        """Return the name in `NAME=value`, whether the value is appended (`+=`), and the value."""
        name, is_more, pieces = self.shell.assignment(nodes) or ("", False, [])
        return name, is_more, self._expand(pieces, splits=False)[0]

    def _assign(self, nodes: Sequence[Node], *, export: bool = False) -> None:
        name, is_more, word = self._assigned(nodes)
        old = self.values.get(name) if is_more else None
        if nodes[0].children and nodes[0].children[-1].type == "array":
            items = (*(old or ()), *self._words(_words(nodes[0].children[-1])))
            if len(items) <= _MOST_EXPANDED_CHARS // 100:
                self._set(name, items)
            return
        if old and len(old) == 1:
            word = glue([old[0], word])
        self._set(name, (word,))
        variable = self._variable(name, word, nodes)
        if export or self._all_exported or name in self.exported:
            self._export(name, variable)
        else:
            self.not_exported.append(variable)

    def _set(self, name: str, value: tuple[Word, ...]) -> None:
        self.values[name] = value
        if self.branches:
            self.branches[-1].add(name)

    def _forget(self, name: str, *, note: bool = True) -> None:
        self.values[name] = None
        if note and self.branches:
            self.branches[-1].add(name)

    def _export(self, name: str, variable: Variable) -> None:
        self.exported.add(name)
        self.variables.append(variable)
        self.environment = Environment(variable, name, self.environment)

    def _unset(self, name: str) -> None:
        if _NAME.fullmatch(name):
            self.values.pop(name, None)
            if self.branches:
                self.branches[-1].add(name)
            else:
                self.exported.discard(name)
                self.environment = Environment(None, name, self.environment)

    def _declare(self, keyword: str, words: Iterable[Sequence[Node]]) -> None:
        export = keyword == "export"
        for nodes in words:
            word = "".join(map(_text, nodes))
            if self._is_assignment(nodes):
                self._assign(nodes, export=export)
            elif word.startswith("-"):
                export = export or "x" in word
                if keyword == "export" and "n" in word:
                    return
            elif export and _NAME.fullmatch(word):
                line = self.shell.line(nodes[0].start_byte)
                value = self.values.get(word)
                found = value[0] if value else Word(text=f"${word}", line=line)
                variable = self._variable(word, found, nodes)
                self._export(word, replace(variable, line=found.line or line))
                self.not_exported = [other for other in self.not_exported if other.name != word]

    # Expansion -------------------------------------------------------------------------------------------------------

    def _words(self, nodes: Sequence[Node]) -> list[Word]:
        return [word for one in self.shell.words(nodes) for word in self._expand(self.shell.pieces(one), splits=True)]

    def _expand(self, pieces: Iterable[Piece], *, splits: bool) -> list[Word]:
        found = Fields()
        for piece in pieces:
            value = self.values.get(piece.name) if piece.kind == "variable" else None
            if value is not None and self._affords(value, every=piece.every):
                found.put(value if piece.every else value[:1], quoted=piece.quoted, splits=splits)
            elif piece.default is not None and piece.name not in self.values:
                word = Word(text=piece.default, line=piece.line, assumed=True)
                found.put((word,), quoted=piece.quoted, splits=splits)
            elif piece.kind == "opaque" and (number := self._worked_out(piece)) is not None:
                found.put((number,), quoted=piece.quoted, splits=splits)
            else:
                found.add(piece.word())
        return found.words()

    def _worked_out(self, piece: Piece) -> Word | None:
        """Evaluate arithmetic over known variables."""
        used: list[Word] = []

        def value(name: str) -> str | None:
            held = self.values.get(name)
            used.extend(held or ())
            return held[0].text if held else None

        number = worked_out(piece.text, value)
        assumed = any(word.assumed for word in used)
        return None if number is None else Word(text=number, line=piece.line, assumed=assumed)

    def _affords(self, value: tuple[Word, ...], *, every: bool) -> bool:
        """Whether an expansion fits the script's size budget; nested values could otherwise grow without bound."""
        size = sum(len(word.text) + 1 for word in (value if every else value[:1]))
        if size > self._budget[0]:
            return False
        self._budget[0] -= size
        return True


_OF_WORDS = frozenset(
    [
        *("command_name", "word", "number", "string", "raw_string", "ansi_c_string", "concatenation", "expansion"),
        *("simple_expansion", "command_substitution", "process_substitution", "arithmetic_expansion", "test_operator"),
        *("brace_expression", "extglob_pattern", "regex", "variable_name", "unset", "export", "declare"),
        *("typeset", "local", "readonly", "$"),
    ]
)


def _text(node: Node) -> str:
    return (node.text or b"").decode("utf-8", "replace")


def _words(node: Node) -> list[Node]:
    """Return the nodes of a command's or array's words, including words after a redirection: `torchrun >log a.py`."""
    if node.type == "variable_assignment":
        return [node]
    found: list[Node] = []
    for one in node.children:
        if one.type in _OF_WORDS:
            found.append(one)
        elif one.type in _COMMANDS or one.type == "heredoc_redirect":
            found += _words(one)
        elif one.type == "file_redirect":
            found += _words(one)[1:]
    return found


def _loose(children: Sequence[Node]) -> Iterator[Node | tuple[Node, ...]]:
    """Group the nodes inside a syntax error: adjacent words on one line are treated as a command."""
    run: list[Node] = []
    for one in children:
        if run and (one.type not in _OF_WORDS or one.start_point.row != run[-1].end_point.row):
            yield tuple(run)
            run = []
        if one.type in _OF_WORDS:
            run.append(one)
        else:
            yield one
    if run:
        yield tuple(run)
