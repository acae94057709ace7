"""List what sources refuse and no table covers: `python -m tests.verify.refusals_of_sources SOURCE...`.

Finds every `raise`, `assert` and warning in the given directories or files that is guarded by a condition on
configuration keys, and prints its place, its conditions and its message. Keys are those of the catalog's key lists, or
those in the file of `--keys`, one per line. A place is printed if no row of the tables of relations names all keys of
its innermost condition; with `--all` the others are printed too, with the first row that does. Since a row that names
the keys may ask another question, a person has to judge the list.
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
    """A statement that refuses a configuration, or warns about it."""

    place: str
    kind: str
    conditions: tuple[str, ...]
    """The enclosing conditions, outermost first."""
    keys: frozenset[str]
    """Keys in the innermost condition that reads any."""
    alternatives: tuple[frozenset[str], ...]
    """`keys` by operand if the condition is an `or`; otherwise one set."""
    says: str


def refusals(path: Path, known: frozenset[str]) -> Iterator[Refusal]:
    """Yield the refusals in a file that depend on a known key."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from _below(tree, str(path), (), known)


def _below(node: ast.AST, place: str, around: tuple[ast.expr, ...], known: frozenset[str]) -> Iterator[Refusal]:
    """Yield the refusals below a node, which is guarded by the conditions `around`."""
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
    """Return the names and attributes that an expression reads, including those read by `getattr`."""
    found = set()
    for one in ast.walk(node):
        match one:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                found.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                found.add(name)
    return frozenset(found)


def known_keys() -> frozenset[str]:
    """Return the keys of all key lists in the catalog."""
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
    """Yield each row of the tables: its text, and the names that it reads."""
    for path in sorted(PACKAGE.rglob("*.toml")):
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        values = {key: words(text) for key, text in document.get("values", {}).items()}
        yield from ((f"{path.name}: {key}", frozenset([key])) for key in document.get("choices", ()))
        for row in (*document.get("refused", ()), *document.get("unwise", ())):
            if isinstance(row, dict) and "when" in row:
                for key in row.get("keys", ["KEY"]):
                    reads = words(" ".join([row["when"], *row["at"]]).replace("KEY", key))
                    for _ in range(3):  # named values may use other named values
                        reads |= {inner for one in reads & values.keys() for inner in values[one]}
                    yield f"{path.name}: {row['what'].replace('KEY', key)}", reads
        for section in ("needs", "excludes"):
            for first, others in document.get(section, {}).items():
                yield from ((f"{path.name}: {first} {section} {other}", words(f"{first} {other}")) for other in others)


def words(text: str) -> frozenset[str]:
    """Return the names in an expression of a table."""
    return frozenset("".join(char if char.isalnum() or char == "_" else " " for char in text).split())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the refusals that no row covers."""
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
