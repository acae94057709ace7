"""Relations between keys: combinations that a trainer refuses though each value is valid alone, listed in TOML tables.

    [defaults]                                   # the trainer's defaults, as far as relations need them
    steps_per_generation = 1
    [values]                                     # named expressions over keys
    generation_batch = "global_batch_size * steps_per_generation"
    [[refused]]
    at = ["num_generations"]                     # the finding points at the first of these keys that is present
    when = "generation_batch % num_generations"
    what = "num_generations {num_generations} does not divide the {generation_batch} samples of a step"
    remedy = "choose a divisor"

`keys` repeats a relation for several keys; each key's name replaces KEY. `[[unwise]]` has the form of `[[refused]]`,
for combinations that are accepted but do not do what they appear to. Two tables are short for rows of `[[refused]]`
that need no words of their own: what a condition is refused without, and with what.

    [needs]
    overlap_param_gather = ["overlap_grad_reduce"]
    [excludes]
    "ckpt_format == 'torch_dcp'" = ["pipeline_model_parallel_size > 1"]

`[choices]` and `numbers` constrain the values of single keys that are missing from the key lists of the catalog. `when`
is a Python expression over keys (`block.key` inside a block), values, and the facts about launch and model that
`context_of` gives. Its logic is three-valued: what only the shell or the machine knows is unknown, and so is everything
that depends on it. `each` selects blocks by patterns (`rewards.*`), whose keys `when` calls `it.key`. `env.NAME` is an
environment variable that the script sets for the command, and `versions.PACKAGE` the version that the files state.

`shared = ["megatron_core.toml"]` includes the rows, values and names of tables that several trainers build on, by their
path from this directory. With `shared_within`, the keys in those rows are looked up in the named blocks.

    [names]
    template = "ms_swift_names.template"         # makes a list of the catalog available as `names.template`
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from packaging.version import Version

from topoplan.catalog import key_list
from topoplan.errors import nearest
from topoplan.reading.finding import Finding
from topoplan.reading.interpolation import filled
from topoplan.reading.rules import Rule
from topoplan.reading.setup import Configuration
from topoplan.reading.values import FALSE_WORDS, as_whole, word_boolean
from topoplan.reading.words import is_open
from topoplan.specs.source import KeyPath, at, path_of, plain_scalar
from topoplan.trainers.around import UNKNOWN
from topoplan.units import quote, shown

Names = Callable[[str], Any]
Functions = Mapping[str, Callable[..., Any]]

_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
}
_COMPARISONS: Mapping[type, Callable[[Any, Any], Any]] = {
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le},
    **{ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not},
    ast.In: lambda value, among: value in among,
    ast.NotIn: lambda value, among: value not in among,
}

_NUMBER = re.compile(r"\d*\.?\d+")
_SETTING = re.compile(r"[\w.]+( [\w.+-]+)?")
_IN_WORDS = (
    (r" is not None| not in \(None, 'none'\)", ""),
    (r" not in \(([^)]*)\)", r" other than \1"),
    (r" in \(([^)]*)\)| == ([\w.'+-]+)", r" \1\2"),
)
"""Parts of conditions, with what they read as in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """One combination that is refused or unwise."""

    at: tuple[str, ...]
    when: ast.expr
    what: str
    remedy: str = ""
    each: tuple[str, ...] = ("",)
    is_refused: bool = True
    within: bool = False
    """True if all keys are looked up inside the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relations:
    """A table of relations."""

    defaults: Mapping[str, Any]
    values: Mapping[str, ast.expr]
    names: Mapping[str, str]
    """Name in expressions -> a list in the catalog's key lists, as `document.list`."""
    choices: Mapping[str, tuple[str, ...]]
    """Key -> allowed values, for keys that are missing from the catalog's key lists."""
    numbers: tuple[str, ...]
    """Keys that take only whole numbers."""
    refused: tuple[Relation, ...]

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Relations:
        """Build the relations from a parsed TOML document."""
        shared = [_table("topoplan.trainers", name) for name in document.get("shared", ())]
        within = {"each": document["shared_within"], "within": True} if "shared_within" in document else {}
        told = [*_told(document), *(({**row, **within}, known) for table in shared for row, known in _told(table))]
        every = [*shared, document]
        values = {key: text for table in every for key, text in table.get("values", {}).items()}
        return cls(
            defaults={key: value for table in every for key, value in table.get("defaults", {}).items()},
            values={key: _parsed(text) for key, text in values.items()},
            names={f"names.{key}": held for table in every for key, held in table.get("names", {}).items()},
            choices={key: tuple(values) for key, values in document.get("choices", {}).items()},
            numbers=tuple(document.get("numbers", ())),
            refused=tuple(relation for one, is_refused in told for relation in _relations(one, is_refused)),
        )

    def findings(
        self,
        rule: Rule,
        configuration: Configuration,
        around: Mapping[str, Any],
        functions: Functions = MappingProxyType({}),
        unwise: Rule | None = None,
        base: KeyPath = (),
    ) -> Iterator[Finding]:
        """Yield what is refused in a configuration, as findings of `rule`, whose text contains `{refusal}` and
        `{remedy}`.

        Unwise combinations become findings of `unwise`, or of `rule` if `unwise` is None. The keys are those of the
        block at `base`.
        """
        yield from self._wrong_values(rule, configuration, around, base)
        functions, data = {**_FUNCTIONS, **functions}, at(configuration.source.data, base)
        for relation in self.refused:
            for inner in (one for pattern in relation.each for one in _blocks(data, pattern)):
                block = (*base, *inner)
                read = _Evaluator(self, configuration, around, functions, block, block if relation.within else base)
                if (found := read.value(relation.when)) is UNKNOWN or not read.is_true(found):
                    continue
                what = read.text(relation.what)
                its, place = rule if relation.is_refused else unwise or rule, read.place(relation.at)
                if relation.is_refused or place is not None:  # a default is not meant to have an effect
                    yield its.at(configuration, place, refusal=what, remedy=relation.remedy)

    def _wrong_values(
        self, rule: Rule, configuration: Configuration, around: Mapping[str, Any], base: KeyPath
    ) -> Iterator[Finding]:
        read = _Evaluator(self, configuration, around, {}, base, base)
        for key in (*self.choices, *self.numbers):
            value = read.value(_parsed(key))
            choices = self.choices.get(key, ())
            if (
                value is UNKNOWN
                or value is None
                or isinstance(value, list)
                or str(value) in choices
                or (not choices and as_whole(value) is not None)
            ):
                continue
            remedy = f"expected one of {', '.join(choices)}" if choices else "expected a whole number"
            yield rule.at(configuration, (*base, *path_of(key)), refusal=f"{key} is {_said(value)}", remedy=remedy)


def read_relations(package: str, name: str) -> Relations:
    """Read a table of relations from a package."""
    return Relations.of(_table(package, name))


@lru_cache
def _table(package: str, name: str) -> Mapping[str, Any]:
    return tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))


def _told(table: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Yield the rows of a table, each with whether it is refused."""
    yield from ((row, True) for row in (*table.get("refused", ()), *_pairs(table)))
    yield from ((row, False) for row in table.get("unwise", ()))


def _pairs(table: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows for which `[needs]` and `[excludes]` are short."""
    for section, word, unless in (("needs", "without", "not "), ("excludes", "with", "")):
        for first, other in ((one, each) for one, every in table.get(section, {}).items() for each in every):
            names, is_plain = (_plain(first), _plain(other)), first.isidentifier()
            if unless:
                verb = f"set {names[1]}" if _SETTING.fullmatch(names[1]) else "change it"
                remedy = f"{verb}, or remove {first}" if is_plain else verb
            else:
                remedy = "remove one of them" if is_plain and other.isidentifier() else "change one of them"
            yield {
                "at": [*_keys_of(first), *_keys_of(other)],
                "when": f"({first}) and {unless}({other})",
                "what": f"{names[0]} {word} {names[1]}",
                "remedy": remedy,
            }


def _keys_of(expression: str) -> list[str]:
    """Return the keys that an expression reads, as `block.key`, in order."""
    skipped: set[ast.AST] = set()
    found = []
    for node in ast.walk(_parsed(expression)):
        if isinstance(node, ast.Call):
            skipped.add(node.func)
        if isinstance(node, ast.Attribute):
            skipped.add(node.value)
        if isinstance(node, ast.Name | ast.Attribute) and node not in skipped:
            found.append(ast.unparse(node))
    return found


def _plain(condition: str) -> str:
    """Return a condition as it reads in a sentence: `ckpt_format torch_dcp`, or the key alone if any value will do."""
    for pattern, said in _IN_WORDS:
        condition = re.sub(pattern, said, condition)
    return condition.replace("', '", " or ").replace("'", "")


def _relations(told: Mapping[str, Any], is_refused: bool) -> Iterator[Relation]:
    """Yield the relation of a section, or one for each of its `keys`."""
    told = {"is_refused": is_refused, **told}  # a copy
    for key in told.pop("keys", ("KEY",)):
        own = told | {name: told[name].replace("KEY", key) for name in ("when", "what", "remedy") if name in told}
        places = tuple(one.replace("KEY", key) for one in told["at"])
        yield Relation(**{**own, "at": places, "when": _parsed(own["when"])})


@lru_cache(maxsize=1 << 12)
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _blocks(data: Any, pattern: str, path: KeyPath = ()) -> Iterator[KeyPath]:
    head, _, rest = pattern.partition(".")
    if not head:
        yield path
        return
    held = at(data, path)
    keys = held.keys() if isinstance(held, Mapping) else range(len(held)) if isinstance(held, list) else ()
    for key in keys:
        if head in ("*", key) and isinstance(at(data, (*path, key)), Mapping | list):
            yield from _blocks(data, rest, (*path, key))


class _Evaluator:
    """Evaluates a table's expressions for one configuration and one of its blocks."""

    def __init__(
        self,
        table: Relations,
        configuration: Configuration,
        around: Mapping[str, Any],
        functions: Functions,
        block: KeyPath,
        base: KeyPath,
    ) -> None:
        self.table, self.configuration, self.around = table, configuration, around
        self.functions, self.block, self.base = functions, block, base

    def place(self, keys: tuple[str, ...]) -> KeyPath | None:
        """Return the path of the first key that is present, preferring keys whose value is not the default."""
        values = {key: at(self.configuration.source.data, self._path(key)) for key in keys}
        written = [key for key, value in values.items() if value is not None]
        telling = [key for key in written if values[key] != self.table.defaults.get(key)]
        return next((self._path(key) for key in (*telling, *written)), self.block or None)

    def text(self, template: str) -> str:
        return re.sub(r"\{([^{}]+)\}", lambda match: _said(self.value(_parsed(match[1]))), template)

    def value(self, node: ast.expr) -> Any:
        """Evaluate an expression.

        UNKNOWN if it depends on unknown values, or on values of a wrong type, which other rules refuse.
        """
        try:
            return self._value(node)
        except (TypeError, ValueError, IndexError, ZeroDivisionError, OverflowError, RecursionError):
            return UNKNOWN

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._value(one) for one in items]
            case ast.BoolOp(op=ast.And(), values=parts):
                return self._joined(parts, ends=False)
            case ast.BoolOp(values=parts):
                return self._joined(parts, ends=True)
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                found = self.value(inner)
                return UNKNOWN if found is UNKNOWN else not self.is_true(found)
            case ast.Compare(left=left, ops=[compared], comparators=[right]):
                return self._applied(_COMPARISONS[type(compared)], self.value(left), self.value(right))
            case ast.BinOp(left=left, op=done, right=right):
                return self._applied(_number_of(_ARITHMETIC[type(done)]), self.value(left), self.value(right))
            case ast.Call(func=ast.Name(id=name), args=inner, keywords=[]):
                return self._applied(self.functions[name], *(self.value(one) for one in inner))
            case ast.Name(id=name):
                return self._name(name)
        return self._name(ast.unparse(node))

    def _joined(self, parts: list[ast.expr], *, ends: bool) -> Any:
        found: Any = None
        is_open = False
        for part in parts:
            value = self.value(part)
            if value is UNKNOWN:
                is_open = True
            elif self.is_true(value) is ends:
                return value
            else:
                found = value
        return UNKNOWN if is_open else found

    @staticmethod
    def _applied(function: Callable[..., Any], *values: Any) -> Any:
        return UNKNOWN if any(one is UNKNOWN for one in values) else function(*values)

    @staticmethod
    def is_true(value: Any) -> bool:
        """Interpret a value as a boolean, as the trainers' parsers do."""
        return value.lower() not in FALSE_WORDS and bool(value) if isinstance(value, str) else bool(value)

    def _path(self, name: str) -> KeyPath:
        first, *rest = path_of(name)
        return (*self.block, *rest) if first == "it" else (*self.base, first, *rest)

    def _name(self, name: str) -> Any:
        if name in self.table.values:
            return self.value(self.table.values[name])
        if name in self.table.names:
            document, _, key = self.table.names[name].partition(".")
            return key_list(document)[key]
        path = self._path(name)
        value = self._written(path)
        if value is not None:
            return value
        if name in self.around:
            return self.around[name]
        if self.around.get("is_piece"):
            return UNKNOWN  # the rest of the configuration may set it
        return self.table.defaults.get(name)

    def _written(self, path: KeyPath) -> Any:
        configuration, data = self.configuration, self.configuration.source.data
        value = at(data, path)
        if not isinstance(value, str):
            return value
        if (word := word_boolean(configuration, path)) is not None:
            return word
        if "$" in value:
            meant = None if configuration.from_command else filled(value, data, self.around["environment"])
            return UNKNOWN if meant is None else meant
        return plain_scalar(value) if configuration.from_command else value


def _number_of(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def of_numbers(left: Any, right: Any) -> Any:
        if isinstance(left, list) and isinstance(right, list):
            return [*left, *right]
        if not all(isinstance(one, int | float) and math.isfinite(one) for one in (left, right)):
            raise TypeError
        return function(left, right)

    return of_numbers


def _items(value: Any) -> list[Any]:
    """Return a list as it is, or split text at commas and whitespace."""
    if value is None:
        return []
    return value if isinstance(value, list) else [one for one in re.split(r"[,\s]+", str(value)) if one]


def _keys(value: Any) -> list[Any]:
    """Return the keys of a mapping, which may be given as JSON text."""
    held = json.loads(value) if isinstance(value, str) else value
    return list(held.keys() if isinstance(held, Mapping) else ()) if held is not None else []


def _numbers(value: Any) -> list[Any]:
    """Return the numbers in a list; none if an expansion may add items to it."""
    items = value if isinstance(value, list) and not is_open(str(value)) else []
    return [one for one in items if _NUMBER.fullmatch(str(one))]


_FUNCTIONS: Functions = {
    **{"len": len, "sum": sum, "max": max, "ceil": math.ceil},
    "product": lambda items: math.prod(int(one) for one in items),
    "items": _items,
    "keys": _keys,
    "numbers": _numbers,
    "has_word": lambda value, words: any(word in str(value).lower() for word in words),
    "has_whole_word": lambda value, words: str(value).lower() in words,
    "items_in": lambda items, among: any(one in among for one in items),
    "others": lambda items, known: [one for one in items if one not in known],
    "ends_in": lambda items, names: [one for one in items if str(one).rpartition(".")[2] in names],
    "last_parts": lambda items: [str(one).rpartition(".")[2] for one in items],
    "nearest": lambda value, names: f"; {close}" if (close := nearest(str((_items(value) or [""])[0]), names)) else "",
    "is_name": lambda value: isinstance(value, str) and re.fullmatch(r"[A-Za-z]\w*(?:[-.]\w+)*", value) is not None,
    "is_word": lambda value: isinstance(value, str) and re.fullmatch(r"[A-Za-z]\w*", value) is not None,
    "number": lambda value, place: float(_items(value)[place]),
    "before": lambda version, other: Version(version) < Version(other),
    "split": lambda value, mark: str(value).split(mark),
    "count": lambda value, part: str(value).count(part),
    "is_whole": lambda value: isinstance(value, int) or str(value).isdecimal(),
    "is_whole_number": lambda value: float(value).is_integer(),
}


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(quote, value))
    return f"{value:g}" if isinstance(value, float) else shown(value)
