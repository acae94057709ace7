from pathlib import Path

import pytest

from tests.cli.conftest import SPEC, Cli


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([str(Path("generated/h100-4x8").resolve())], "names no hosts"),
        (["twice.yaml"], "hosts[1]: a is listed twice"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(
    cli: Cli, spec_file: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(spec_file.parent)
    Path("twice.yaml").write_text(SPEC.replace("nodes: 4", "nodes: 2") + "hosts: [a, a]\n")
    assert cli("preflight", *arguments).is_refused(message)
