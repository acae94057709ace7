"""Collect the names that ms-swift registers: `python -m tests.verify.swift_names VERSION=DIR...`.

Updates `topoplan/catalog/trainer_keys/ms_swift_names.json` to the given versions, oldest first. DIR is a checkout or an
unpacked wheel of a version; it is only parsed, so neither torch nor ms-swift has to be installed.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.verify.key_lists import FOLDER, Document, bring_names_up, read, text_of

NAME = "ms_swift_names.json"
SOURCE = (
    "ms-swift: constants of swift/model and swift/template, and the dictionaries of its plug-ins, by the argument that "
    "takes a name of them. tests/verify/swift_names.py writes it. since, until: versions that have a name, where not "
    "all do."
)
_CLASSES = {"ModelType": "model_type", "TemplateType": "template"}
"""Ending of the name of a class of constants -> the argument that takes one of the constants."""
_CALLS = {"register_model": "model_type", "register_template": "template"}
_MAPS = {
    "agent_template_map": "agent_template",
    "agent_templates": "agent_template",
    "callbacks_map": "callbacks",
    "eval_metrics_map": "eval_metric",
    "loss_map": "loss_type",
    "loss_scale_map": "loss_scale",
    "megatron_callbacks_map": "megatron_callbacks",
    "multi_turns": "multi_turn_scheduler",
    "optimizers_map": "optimizer",
    "rm_plugins": "reward_model_plugin",
}
"""Dictionary of plug-ins -> the argument that takes one of its keys."""


def names_in(package: Path) -> dict[str, set[str]]:
    """Return the names that one version registers, by argument."""
    found: dict[str, set[str]] = {key: set() for key in (*_CLASSES.values(), *_MAPS.values())}
    for path in package.rglob("*.py"):
        for key, name in _of_file(ast.parse(path.read_text(encoding="utf-8"))):
            found[key].add(name)
    return found


def _of_file(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name, body=body):
                key = next((key for end, key in _CLASSES.items() if name.endswith(end)), None)
                for one in body if key else ():
                    if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant):
                        yield str(key), str(one.value.value)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if name in _MAPS:
                yield from ((_MAPS[name], str(one.value)) for one in keys if isinstance(one, ast.Constant))
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[ast.Call(args=[ast.Constant(value=text), *_])])):
                if name in _CALLS and isinstance(text, str):
                    yield _CALLS[name], text


def main(versions: list[str]) -> None:
    """Update the file."""
    found = {version: names_in(Path(directory)) for version, directory in (one.split("=", 1) for one in versions)}
    known = list(found)
    document: Document = {
        "schema": "topoplan.swift_names/1",
        "source": SOURCE,
        "versions": {"ms_swift": known},
    }
    if (FOLDER / NAME).exists():
        document |= {key: value for key, value in read(NAME).items() if key not in document}
    for _ in range(2):  # since and until are right once each version has been brought up twice
        for version, names_by_key in found.items():
            for key, names in names_by_key.items():
                document.setdefault(key, [])
                bring_names_up(document, key, names, version, known)
    bounds = {word: document.pop(word) for word in ("since", "until") if word in document}
    (FOLDER / NAME).write_text(text_of(document | bounds), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
