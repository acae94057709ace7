import json
import re
from pathlib import Path

import pytest

from tests.bundle.shell_scripts import assert_sound
from tests.cli.conftest import SPEC, Cli
from tests.run.test_bundle_reader import bundle_at

FEW = ("--set", "nodes=1", "--pin", "pp=1,micro_batch_size=1")


@pytest.fixture
def with_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "cluster.yaml"
    path.write_text(SPEC.replace("nodes: 4", "nodes: 1") + "hosts: [{address: 127.0.0.1, port: 9}]\n")
    return path


def test_a_dry_run_shows_the_trials_and_their_cost(cli: Cli, with_hosts: Path, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    document = json.loads(cli("tune", with_hosts, *FEW, "--dry-run", "--json", "--no-cache").out)
    assert (document["schema"], document["made_up_samples"]) == ("topoplan.tune/1", True)
    first = document["trials"][0]
    assert first["at_most_s"] > first["seconds"] > first["steps"] * first["step_s"]
    assert first["gpu_hours"] == pytest.approx(8 * first["seconds"] / 3600, rel=1e-4)
    shown = cli("tune", with_hosts, *FEW, "--dry-run", "--no-cache").out
    assert first["plan"].partition("-full")[0].replace("-", " ") in shown
    assert "GPU hours together" in shown
    assert set(tmp_path.iterdir()) == before


def test_hosts_that_cannot_be_reached_end_it_before_anything_is_written(
    cli: Cli, with_hosts: Path, tmp_path: Path
) -> None:
    result = cli("tune", with_hosts, *FEW)
    assert result.code == 1
    assert "127.0.0.1:9: nothing listens there" in result.err or "127.0.0.1" in result.err
    assert "the hosts could not be used; nothing was measured" in " ".join(result.out.split())
    assert not list(tmp_path.glob("*-profile.yaml"))


def test_what_is_refused_before_anything_is_spent(cli: Cli, with_hosts: Path, tmp_path: Path) -> None:
    (tmp_path / "there.yaml").write_text("mine\n")
    assert cli("tune", with_hosts, *FEW, "-o", "there.yaml").is_refused("there.yaml: exists; name another with -o")
    assert cli("tune", with_hosts, *FEW, "-o", "no/where.yaml").is_refused("no: no such directory")
    bundle = bundle_at(tmp_path / "bundle")
    assert cli("tune", bundle, *FEW, "--dry-run").is_refused("a bundle says its job and its cluster")
    with_hosts.write_text(SPEC)
    assert cli("tune", with_hosts, *FEW).is_refused("the spec names no hosts")


def test_trials_of_slurm_are_a_job_from_which_it_goes_on(cli: Cli, with_hosts: Path, tmp_path: Path) -> None:
    """The job itself is run by a real Slurm in tests/verify; here its results are simulated."""
    with_hosts.write_text(SPEC + "slurm: {partition: gpu, time: '1-00', requeue: true}\n")
    words = ("tune", with_hosts, "--set", "nodes=1", "--pin", "pp=1,micro_batch_size=1", "--plans", "2")
    shown = cli(*words).out
    assert "sbatch generated/test-2x8-trials/job-1/trials.sbatch" in shown
    assert "relative paths (models) start in generated/test-2x8-trials" in " ".join(shown.split())
    job = tmp_path / "generated/test-2x8-trials/job-1"
    script = (job / "trials.sbatch").read_text()
    assert_sound(script)
    assert {"#SBATCH --partition=gpu", "#SBATCH --no-requeue"} <= set(script.splitlines())
    (limit,) = re.findall(r"^#SBATCH --time=([0-9]+)$", script, re.MULTILINE)
    trials = re.findall(r"^trial (\S+) ([0-9]+) ([0-9]+) ([0-9]+)$", script, re.MULTILINE)
    assert len(trials) == 2
    assert sum(int(at_most) for _, _, at_most, _ in trials) < 60 * int(limit) < 24 * 3600

    waiting = cli(*words, "--go-on")
    assert waiting.code == 1
    assert all(plan in " ".join(waiting.out.split()) for plan, *_ in trials)
    assert not (job.parent / "job-2").exists()

    for number, (plan, *_) in enumerate(trials):
        logs = job / plan / "trial"
        logs.mkdir()
        (logs / "result.json").write_text(json.dumps({"began": number, "seconds": 90, "ended": "steps", "code": 1}))
    (plan, steps, *_), (other, *_) = trials
    bars = [f"\r 1%|#| {step}/200 [{step // 15:02d}:{4 * step % 60:02d}<0:00]" for step in range(1, int(steps) + 1)]
    (job / plan / "trial/node-00.log").write_text("".join(bars))
    (job / other / "trial/node-00.log").write_text("CUDA error\n")
    document = json.loads(cli(*words, "--go-on", "--json").out)
    assert [(one["plan"], one["step_s"]) for one in document["trials"]] == [
        (plan, pytest.approx(4.0, rel=0.01)),
        (other, None),
    ]
    assert document["trials"][1]["why"] == "too few steps completed before it was stopped"
    assert document["gpu_hours"] == pytest.approx(2 * 90 * 8 / 3600)
    assert other not in [one["plan"] for one in document["ahead"]]
    assert document["why"] == "queued"
    assert document["next"][-1].endswith("--go-on")
    assert (job.parent / "job-2/trials.sbatch").exists()
    assert (tmp_path / "test-2x8-profile.yaml").exists()
