"""Architectural decisions that every module must respect: one-way imports, light planning, a small public surface."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import topoplan
from topoplan.trainers.registry import trainer_names

ROOT = Path(topoplan.__file__).parent

# The floors of the hallway: a module imports only from its own floor or from lower ones.
FLOORS = {
    "errors": 0,
    "on_demand": 0,
    "terminal": 0,
    "terms": 0,
    "units": 0,
    "catalog": 1,
    "specs": 2,
    "layout": 3,
    "network": 4,
    "operators": 4,
    "engines": 5,
    "reading": 5,
    "trainers": 6,
    "planner": 7,
    "bundle": 8,
    "remote": 8,
    "lint": 9,
    "hosts": 9,
    "run": 9,
    "report": 10,
    "page": 10,
    "cli": 10,
    "__init__": 11,
    "__main__": 11,
}
HEAVY = {"torch", "transformers", "llamafactory", "megatron", "deepspeed", "accelerate"}
PARSERS = {"tree_sitter", "tree_sitter_bash", "markdown_it"}
"""Parsers of shell and Markdown, which only `check` needs."""
MODULES = sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    """Return the package, or the top-level module, of a file."""
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a module's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))))


@cache
def imported(path: Path) -> frozenset[str]:
    """Return every module that a file imports, anywhere in it: `topoplan.specs.spec`, `yaml`, ..."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import; write the whole name"
            module = node.module or ""
            # In `from topoplan import cli`, the imported name is the room.
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "topoplan" else {module}
    return frozenset(names)


def imported_rooms(path: Path) -> Iterator[str]:
    """Yield the rooms that a file imports from topoplan; importing a constant of the package does not count."""
    for name in imported(path):
        first, *rest = name.split(".")
        if first == "topoplan" and rest and rest[0] != "__version__":
            yield rest[0] if rest[0] in FLOORS else "__init__"


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_room_has_a_floor() -> None:
    assert {room(path) for path in MODULES} <= set(FLOORS)


def test_imports_go_down_the_hallway() -> None:
    climbs = [
        f"{ids(path)} imports {target}"
        for path in MODULES
        for target in imported_rooms(path)
        if FLOORS[target] > FLOORS[room(path)]
    ]
    assert climbs == []


def test_rooms_of_one_floor_import_each_other_one_way() -> None:
    pairs = {(room(path), target) for path in MODULES for target in imported_rooms(path) if room(path) != target}
    level = {(one, other) for one, other in pairs if FLOORS[one] == FLOORS[other]}
    assert not {pair for pair in level if pair[::-1] in level}


def test_engines_know_nothing_of_each_other() -> None:
    for one, other in (("megatron", "data_parallel"), ("data_parallel", "megatron")):
        own = [path for path in MODULES if path.parent == ROOT / "engines" / one]
        crossed = [ids(path) for path in own if any(f"engines.{other}" in name for name in imported(path))]
        assert own
        assert crossed == []


ASKS_NO_ENGINE = ("catalog", "specs", "network", "operators", "planner", "report")
NAMES_OF_ENGINES = {
    "mca",
    "megatron",
    "ddp",
    "deepspeed",
    "fsdp2",
    "is_megatron",
    "MEGATRON_BACKENDS",
    "SHARDED_BACKENDS",
}


def test_nothing_asks_which_engine_a_layout_is_of() -> None:
    """Differences between engines are methods of the engine, and differences between trainers are traits."""
    asked = []
    for path in MODULES:
        if room(path) not in ASKS_NO_ENGINE:
            continue
        for node in nodes(path):
            words: set[object] = set()
            if isinstance(node, ast.Compare):
                words = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
            elif isinstance(node, ast.Attribute | ast.Name):
                words = {node.attr if isinstance(node, ast.Attribute) else node.id} & {"is_megatron"}
            elif isinstance(node, ast.ImportFrom):
                words = {alias.name for alias in node.names if alias.name.isupper()}
            asked += [f"{ids(path)}:{node.lineno} {word}" for word in words & NAMES_OF_ENGINES]
    assert asked == []


def test_nothing_outside_the_wings_asks_which_trainer_it_has() -> None:
    """Differences between trainers are values in their wings; data may be keyed by a trainer's name."""
    names = {*trainer_names(), "swift-megatron"}
    asked = set()
    for path in MODULES:
        if room(path) == "trainers":
            continue
        for node in nodes(path):
            sides: list[ast.expr] = []
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                sides += [
                    one for side in sides if isinstance(side, ast.Tuple | ast.Set | ast.List) for one in side.elts
                ]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                sides = node.args if node.func.attr in ("of", "startswith") else []
            words = {side.value for side in sides if isinstance(side, ast.Constant)}
            asked |= {f"{ids(path)}:{node.lineno} {word}" for word in words & names}
    assert not asked


def test_only_engines_and_layouts_know_which_backends_are_megatrons() -> None:
    words = {"is_megatron", "MEGATRON_BACKENDS", "SHARDED_BACKENDS"}
    asked = set()
    for path in MODULES:
        if room(path) in ("engines", "layout", "specs"):
            continue
        for node in nodes(path):
            word = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            asked |= {f"{ids(path)}:{node.lineno} {word}"} if word in words else set()
    assert not asked


@pytest.mark.parametrize("folder", ["bench", "soak", "verify"])
def test_scripts_that_make_test_does_not_run_import_only_what_exists(folder: str) -> None:
    missing = []
    for path in sorted((Path(__file__).parent / folder).glob("*.py")):
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("topoplan"):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    is_module = hasattr(module, "__path__") and find_spec(f"{node.module}.{alias.name}")
                    is_there = hasattr(module, alias.name) or is_module
                    missing += [] if is_there else [f"{path.name}:{node.lineno} {node.module}.{alias.name}"]
    assert not missing


def test_no_module_imports_a_trainer() -> None:
    here = [path for path in MODULES if path.parent.name != "scripts"]  # scripts run on hosts, in the trainer's Python
    heavy = {ids(path): {name.split(".")[0] for name in imported(path)} & HEAVY for path in here}
    assert not {path: names for path, names in heavy.items() if names}


def test_planning_loads_no_trainer_and_no_ssh() -> None:
    code = (
        "import sys, topoplan\n"
        "for name in topoplan.__all__: getattr(topoplan, name)\n"
        f"print(*sorted({HEAVY | PARSERS | {'paramiko'}!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_what_people_paste_and_script_is_parsed_in_one_room() -> None:
    users = {room(path) for path in MODULES if {name.split(".")[0] for name in imported(path)} & PARSERS}
    assert users <= {"reading"}


def test_help_reads_nothing_of_the_planner() -> None:
    code = (
        "import sys\n"
        "from topoplan.cli.commands import command\n"
        "from topoplan.cli.verbs import VERBS\n"
        "for verb in VERBS: command(verb)\n"
        "loaded = {name.split('.')[1] for name in sys.modules if name.startswith('topoplan.')}\n"
        "print(*sorted(loaded), *sorted({'yaml', 'jinja2', 'paramiko'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cli", "errors", "terminal"]


def test_public_names_are_sorted_and_all_there() -> None:
    assert topoplan.__all__ == sorted(topoplan.__all__)
    assert set(topoplan.__all__) == {
        "HostError",
        "InputError",
        "LayoutError",
        "ModelError",
        "NoLayoutFitsError",
        "OutputError",
        "SpecError",
        "TopoplanError",
        "UnitError",
        "__version__",
        "generate",
        "load_spec",
        "predict",
        "rank",
    }
    assert dir(topoplan) == topoplan.__all__
    for name in topoplan.__all__:
        assert getattr(topoplan, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plan_everything'"):
        topoplan.plan_everything  # noqa: B018


def test_errors_of_the_exception_tree_are_all_public() -> None:
    from topoplan import errors

    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert classes <= set(topoplan.__all__)


def test_input_is_never_checked_with_assert() -> None:
    found = [f"{ids(path)}:{node.lineno}" for path in MODULES for node in nodes(path) if isinstance(node, ast.Assert)]
    assert not found


def test_a_function_fits_on_a_screen() -> None:
    long = [
        f"{ids(path)}:{node.name}"
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.end_lineno is not None and node.end_lineno - node.lineno >= 60
    ]
    assert long == []
