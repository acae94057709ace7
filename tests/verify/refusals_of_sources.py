"""What sources refuse, beside the tables of relations: `python -m tests.verify.refusals_of_sources CHECKOUT...`.

Every `raise`, `assert` and warning below the directories or files is listed that stands under a condition on a
configuration: with its place, the keys that the conditions around it read, and what it says. Keys are those of the key
lists (or of `--keys`, a file with one a line). It is told when no row of the tables names all keys of the innermost
condition; `--all` tells the others too, with the first row that does. A row that names the keys may still ask another
question: the list shows where to look, and what is looked at is for a person to say.
"""

import argparse
import ast
import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "topoplan"
KEY_LISTS = PACKAGE / "catalog" / "trainer_keys"
_WARNINGS = ("warning", "warning_once", "warning_rank0", "warning_rank0_once", "warn", "warning_advice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One place that refuses, or warns."""

    place: str
    kind: str
    conditions: tuple[str, ...]
    """Outermost first."""
    keys: frozenset[str]
    """Keys that the innermost condition reads; conditions without keys are passed over."""
    alternatives: tuple[frozenset[str], ...]
    """The same keys by the operands of the condition, if it is an `or`."""
    says: str


def refusals(path: Path, known: frozenset[str]) -> Iterator[Refusal]:
    """Those of one file that depend on a key."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from _below(tree, str(path), (), known)


def _below(node: ast.AST, place: str, around: tuple[ast.expr, ...], known: frozenset[str]) -> Iterator[Refusal]:
    """Those below a node; the conditions of a block hold for its statements."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            place = f"{place}:{name}" if place.endswith(".py") else f"{place}.{name}"
            around = ()
        case ast.If(test=test, body=body, orelse=otherwise):
            for inner in body:
                yield from _below(inner, place, (*around, test), known)
            for inner in otherwise:
                yield from _below(inner, place, (*around, ast.UnaryOp(op=ast.Not(), operand=test)), known)
            return
        case ast.Raise(exc=exc) if exc is not None:
            yield from _told("raise", exc, f"{place}:{node.lineno}", around, known)
        case ast.Assert(test=test, msg=says):
            yield from _told("assert", says or test, f"{place}:{node.lineno}", (*around, test), known)
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name)) as call) if name in _WARNINGS:
            yield from _told("warning", call, f"{place}:{node.lineno}", around, known)
    for child in ast.iter_child_nodes(node):
        yield from _below(child, place, around, known)


def _told(
    kind: str, says: ast.expr, place: str, around: tuple[ast.expr, ...], known: frozenset[str]
) -> Iterator[Refusal]:
    inner = next((test for test in reversed(around) if names(test) & known), None)
    if inner is None:
        return
    operands = inner.values if isinstance(inner, ast.BoolOp) and isinstance(inner.op, ast.Or) else [inner]
    yield Refusal(
        place=place,
        kind=kind,
        conditions=tuple(ast.unparse(test) for test in around),
        keys=names(inner) & known,
        alternatives=tuple(keys for one in operands if (keys := names(one) & known)),
        says=ast.unparse(says),
    )


def names(node: ast.AST) -> frozenset[str]:
    """Names and attributes that an expression reads, and texts that `getattr` asks for."""
    found = set()
    for one in ast.walk(node):
        match one:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                found.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                found.add(name)
    return frozenset(found)


def known_keys() -> frozenset[str]:
    """All keys of the lists."""
    found: set[str] = set()

    def walk(held: object) -> None:
        if isinstance(held, dict):
            found.update(held)
            for inner in held.values():
                walk(inner)

    for path in KEY_LISTS.glob("*.json"):
        walk(json.loads(path.read_text(encoding="utf-8")))
    return frozenset(one for one in found if not one.endswith("_args")) - {"model", "types", "default", "choices"}


def rows() -> Iterator[tuple[str, frozenset[str]]]:
    """The rows of all tables: what each says, and the names that it reads."""
    for path in sorted(PACKAGE.rglob("*.toml")):
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        values = {key: words(text) for key, text in document.get("values", {}).items()}
        yield from ((f"{path.name}: {key}", frozenset([key])) for key in document.get("choices", ()))
        for row in (*document.get("refused", ()), *document.get("unwise", ())):
            if isinstance(row, dict) and "when" in row:
                for key in row.get("keys", ["KEY"]):
                    reads = words(" ".join([row["when"], *row["at"]]).replace("KEY", key))
                    for _ in range(3):  # values of values
                        reads |= {inner for one in reads & values.keys() for inner in values[one]}
                    yield f"{path.name}: {row['what'].replace('KEY', key)}", reads


def words(text: str) -> frozenset[str]:
    """The names in an expression of a table."""
    return frozenset("".join(char if char.isalnum() or char == "_" else " " for char in text).split())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args(arguments)
    known = frozenset(given.keys.read_text(encoding="utf-8").split()) if given.keys else known_keys()
    tables = list(rows())
    for source in given.sources:
        for path in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            for one in refusals(path, known):
                row = next((what for what, reads in tables if one.keys <= reads), "")
                parts = [next((what for what, reads in tables if keys <= reads), "") for keys in one.alternatives]
                row = row or (" | ".join(parts) if all(parts) else "")
                if given.all or not row:
                    print(f"{one.kind} {one.place}\n    {' && '.join(one.conditions)}\n    {one.says}\n    {row}")


if __name__ == "__main__":
    main()
