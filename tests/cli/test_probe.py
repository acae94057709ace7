"""What `topoplan probe` refuses before it connects to any host. The rest is in tests/hosts/test_probe.py."""

from pathlib import Path

import pytest

from tests.cli.conftest import Cli


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "no host is given"),
        (["node0", "--name", "two words"], "--name"),
        (["node0", "--venv", "relative"], "venv"),
        (["--", "-oProxyCommand=x"], "HOST '-oProxyCommand=x'"),
        (["node0", "node0"], "already given"),
        (["--hosts-file", "absent"], "absent"),
    ],
)
def test_bad_input_is_one_message(
    cli: Cli, arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("probe", *arguments).is_refused(complaint)
