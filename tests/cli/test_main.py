from pathlib import Path

import pytest

import topoplan
from tests.cli.conftest import Cli
from topoplan.cli.main import main


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(cli: Cli, arguments: list[str]) -> None:
    assert cli(*arguments).out == f"topoplan {topoplan.__version__}\n"


def test_ctrl_c_exits_with_130(cli: Cli, spec_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(spec: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("topoplan.planner.search.rank", rank)
    result = cli("rank", spec_file)
    assert result.code == 130
    assert "Traceback" not in result.err


def test_a_defect_is_not_hidden(spec_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(spec: object, **options: object) -> None:
        raise KeyError("tp")

    monkeypatch.setattr("topoplan.planner.search.rank", rank)
    with pytest.raises(KeyError):
        main(["rank", str(spec_file)])
