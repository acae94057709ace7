from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import SPEC, Cli
from tests.run.test_bundle_reader import bundle_at


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


def replace_in(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda bundle: (bundle / "node-01.sh").unlink(), "lacks node-01.sh"),
        (lambda bundle: (bundle / "train.yaml").unlink(), "lacks train.yaml"),
        (lambda bundle: replace_in(bundle / "hosts.json", "10.0.0.2", "10.0.0.9"), "and plan.json says"),
        (lambda bundle: (bundle / "train.yaml").write_text("a: [b\n"), "train.yaml"),
    ],
)
def test_a_bundle_that_launch_refuses_is_refused_before_a_host_is_asked(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object], message: str
) -> None:
    def ask(*arguments: object, **options: object) -> None:
        pytest.fail("a host was asked")

    monkeypatch.setattr("topoplan.remote.fanout.logged_in", ask)
    bundle = bundle_at(tmp_path / "bundle")
    damage(bundle)
    assert cli("launch", bundle).is_refused(message)
    refusal = cli("launch", bundle).err
    for named in (bundle, bundle / "plan.json"):
        found = cli("preflight", named)
        assert found.is_refused(message)
        assert found.err == refusal.replace("topoplan launch", "topoplan preflight")
