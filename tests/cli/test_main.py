from pathlib import Path

import pytest

import topoplan
from tests.cli.conftest import Cli
from topoplan.cli.main import main


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(cli: Cli, arguments: list[str]) -> None:
    assert cli(*arguments).out == f"topoplan {topoplan.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rank", "x.yaml", "--jsno"], "No such option: --jsno; did you mean '--json'?; `topoplan rank --help`"),
        (["rank", "x.yaml", "--top"], "Option '--top' requires an argument; `topoplan rank --help` has all options"),
        (["size", "x.yaml"], "Missing option '--max-hours'; as in `topoplan size cluster.yaml --max-hours 24`"),
        (["status", "--accpet-new"], "did you mean '--accept-new'?; `topoplan runs status --help`"),
        (["predict"], "Missing argument 'RUNS'; as in `topoplan predict runs.jsonl`"),
        (["--verison"], "did you mean '--version'?; see `topoplan --help`"),
        ([""], "'' is not a command"),
        (["preflight", "."], ".: is not a bundle: no plan.json"),
        (["rank", "x.yaml", "--top", "0"], "--top"),
        (["rank", "x.yaml", "--top", "many"], "Invalid value for '--top': expected a whole number"),
        (["rank", "x.yaml", "--json", "--csv"], "--json and --csv cannot be used together"),
        (["rank", "x.yaml", "--csv", "--rejected"], "--csv has no rows for rejected layouts"),
        (["rank", "absent.yaml"], "absent.yaml: no such file"),
        (["predict", "absent.jsonl"], "absent.jsonl: no such file"),
    ],
)
def test_bad_arguments_are_one_message_and_exit_code_2(cli: Cli, arguments: list[str], message: str) -> None:
    assert cli(*arguments).is_refused(message)


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
