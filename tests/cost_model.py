"""Generates docs/cost-model/: the chapters of the cost model, from the docstrings and code of its rooms.

    python -m tests.cost_model docs/cost-model

Each room is a chapter and each module a section, after the modules that it builds on. A formula is shown with its
docstring, the unit in which its name ends, and the sources that `explain` prints for it.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from textwrap import indent

from topoplan.engines.data_parallel.rules import SHARDED_RULES
from topoplan.engines.megatron.rules import RULES
from topoplan.engines.rule import Rule

PACKAGE = Path(__file__).resolve().parents[1] / "topoplan"
CHAPTERS = {
    "layout": "Layouts",
    "network": "Network and NCCL",
    "operators": "Operators of a layer",
    "engines": "What engines share",
    "engines/megatron": "Megatron-core",
    "engines/data_parallel": "DDP, ZeRO and FSDP2",
}
# These modules pass on, search, arrange or draw what others compute.
LEFT_OUT = {
    "account",
    "engine",
    "fastest",
    "forms",
    "layouts",
    "memory_account",
    "registry",
}
LEFT_OUT |= {"time_account", "timeline"}
RULES_OF = {"engines/megatron": RULES, "engines/data_parallel": SHARDED_RULES}
UNITS = {
    "bytes_per_s": "bytes per second, each way",
    "flops": "FLOPs",
    "bytes": "bytes",
    "elements": "elements",
    "tokens": "tokens",
    "s": "seconds",
}
IN_SIGHT = 12
"""Maximum lines of a function shown unfolded; longer ones open with a click."""
ACRONYMS = {"nccl": "NCCL", "te": "Transformer Engine", "moe": "MoE", "mlp": "MLP", "flops": "FLOPs", "ids": "IDs"}
Definition = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Module:
    """A file of a room."""

    path: Path

    @property
    def name(self) -> str:
        """Return the name used in sources: `engines/megatron/states.py`."""
        return self.path.relative_to(PACKAGE).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> set[Path]:
        """Return the package files that the module builds on."""
        found = [node for node in self.tree.body if isinstance(node, ast.ImportFrom) and node.module]
        return {PACKAGE.parent / f"{(node.module or '').replace('.', '/')}.py" for node in found}

    @property
    def definitions(self) -> list[Definition]:
        return [
            node
            for node in self.tree.body
            if isinstance(node, Definition) and not node.name.startswith("_") and ast.get_docstring(node)
        ]

    def code(self, node: Definition) -> str:
        """Return the lines of a definition without its docstring."""
        lines, said = self.text.splitlines(), node.body[0]
        return "\n".join([*lines[node.lineno - 1 : said.lineno - 1], *lines[said.end_lineno or 0 : node.end_lineno]])


def modules_of(room: str) -> list[Module]:
    """Return the computing modules of a room, each after those that it builds on."""
    files = {path: Module(path) for path in sorted((PACKAGE / room).glob("*.py")) if path.stem not in LEFT_OUT}
    ordered: dict[Path, Module] = {}

    def put(path: Path) -> None:
        if path in files and path not in ordered:
            for below in sorted(files[path].imports):
                put(below)
            ordered[path] = files[path]

    for path in files:
        put(path)
    return [module for module in ordered.values() if module.definitions]


@cache
def sources() -> dict[str, list[str]]:
    """Return formula name -> its origins, from the `source_of(formula, ...)` calls that use it."""
    found: dict[str, list[str]] = defaultdict(list)
    texts = [path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))]
    for text in texts:
        for node in ast.walk(ast.parse(text)) if "source_of(" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "source_of":
                formula, *origins = node.args
                said = [origin for one in origins if (origin := _text(one))]
                found[ast.unparse(formula)] += [one for one in said if one not in found[ast.unparse(formula)]]
    return found


def chapter(room: str) -> str:
    """Return one page."""
    known, parts = sources(), [f"# {CHAPTERS[room]}\n"]
    parts.append(f"Written from `topoplan/{room}/`, a file behind those that it builds on.\n")
    for module in modules_of(room):
        title = " ".join(ACRONYMS.get(word, word) for word in module.path.stem.split("_"))
        parts.append(f"## {title[0].upper()}{title[1:]}\n")
        parts.append(f"`{module.name}`\n")
        parts.append(_prose(ast.get_docstring(module.tree) or ""))
        parts += _constants(module)
        for node in module.definitions:
            parts += _entry(module, node, known)
    parts += _rules(RULES_OF.get(room, ()))
    return "\n".join(parts)


def _entry(module: Module, node: Definition, known: dict[str, list[str]]) -> Iterator[str]:
    yield f"### {node.name}\n"
    code = module.code(node)
    is_short = isinstance(node, ast.FunctionDef) and code.count("\n") < IN_SIGHT
    if isinstance(node, ast.FunctionDef) and not is_short:
        yield f"```python\n{_signature(node)}\n```\n"
    yield _prose(ast.get_docstring(node) or "")
    if isinstance(node, ast.ClassDef):
        yield from _table(("field", "is"), _documented(node.body))
    origins = [*known.get(node.name, ()), *_own_source(node)]
    unit = next((words for end, words in UNITS.items() if node.name.endswith(f"_{end}")), None)
    notes = [f"**Gives** {unit}."] if unit and isinstance(node, ast.FunctionDef) else []
    notes += [f"**Source** {_prose('; '.join(origins)).strip()}"] if origins else []
    if notes:
        yield " ".join(notes) + "\n"
    if is_short:
        yield f"```python\n{code}\n```\n"
    elif any(isinstance(one, ast.FunctionDef) for one in [node, *node.body]):
        yield '??? quote "Code"\n\n' + indent(f"```python\n{code}\n```\n", "    ")


def _signature(node: ast.FunctionDef) -> str:
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{node.name}({ast.unparse(node.args)}){result}"
    if len(line) <= 90:
        return line
    given = [ast.unparse(one) for one in node.args.args]
    named = [ast.unparse(one) for one in node.args.kwonlyargs]
    every = [*given, *(["*"] if named else []), *named]
    return f"{node.name}(\n" + "".join(f"    {one},\n" for one in every) + f"){result}"


def _assigned(node: ast.stmt) -> str | None:
    """Return the name that a statement assigns or annotates."""
    target = (
        node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
    )
    return target.id if isinstance(target, ast.Name) else None


def _text(node: ast.AST | None) -> str | None:
    """Return the value of a string constant."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield (name, docstring) of assignments with a docstring."""
    for one, below in pairwise(body):
        name, text = _assigned(one), _text(below.value) if isinstance(below, ast.Expr) else None
        if name and text and not name.startswith("_"):
            yield f"`{name}`", " ".join(_prose(text).split())


def _constants(module: Module) -> Iterator[str]:
    values = {
        f"`{_assigned(node)}`": ast.unparse(node.value) for node in module.tree.body if isinstance(node, ast.Assign)
    }
    rows = []
    for name, text in _documented(module.tree.body):
        value = values.get(name, "")
        rows.append((name, f"`{value}`" if 0 < len(value) <= 40 else "", text))
    yield from _table(("constant", "value", "is"), rows)


def _own_source(node: Definition) -> Iterator[str]:
    for one in node.body:
        if _assigned(one) == "source" and isinstance(one, ast.Assign) and (text := _text(one.value)):
            yield text


def _rules(rules: Iterable[Rule]) -> Iterator[str]:
    rows = [(f"`{rule.name}`", _prose(rule.source).strip(), _prose(rule.fix).strip()) for rule in rules]
    if rows:
        yield "## Rules of a layout\n"
        yield "A layout that breaks one is illegal. `topoplan rank --rejected` shows the equation that failed.\n"
        yield from _table(("rule", "source", "what would help"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    if lines:
        yield "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines]) + "\n"


def _prose(docstring: str) -> str:
    """Convert a docstring to Markdown: separate lists, link arXiv numbers, and escape everything that is not markup."""
    lines: list[str] = []
    for line in docstring.splitlines():
        if line.startswith("- ") and lines and lines[-1] and not lines[-1].startswith(("- ", "  ")):
            lines.append("")
        lines.append(line if line.startswith("    ") else _escaped(line))
    return "\n".join(lines) + "\n"


def _escaped(line: str) -> str:
    """Escape text outside of code spans."""
    pieces = re.split(r"(`[^`]*`)", line)
    for place in range(0, len(pieces), 2):
        text = re.sub(r"[<\[*]|__|(?<=\w)_(?=\w)", lambda mark: "\\" + mark[0], pieces[place])
        pieces[place] = re.sub(r"\barXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    return "".join(pieces)


def write(directory: Path) -> None:
    """Write all chapters next to the introductory page."""
    for room in CHAPTERS:
        (directory / f"{room.replace('/', '-')}.md").write_text(chapter(room), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
