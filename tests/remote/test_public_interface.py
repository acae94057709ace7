"""Only public names of paramiko are used."""

import ast
from pathlib import Path

import pytest

import topoplan

FILES = sorted((Path(topoplan.__file__).parent / "remote").glob("*.py"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_nothing_reaches_into_another_object(file: Path) -> None:
    reached = [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and is_private(node.attr)
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]
    assert reached == []


def test_no_subclass_overrides_what_is_private_in_paramiko() -> None:
    from paramiko.packet import Packetizer
    from paramiko.pkey import PKey

    from topoplan.remote.identities import _key_class
    from topoplan.remote.ssh import _clockless

    for own, base in ((_key_class(), PKey), (_clockless(), Packetizer)):
        assert issubclass(own, base)
        assert not {name for name in vars(own) if is_private(name)} & set(dir(base))
