"""The bed itself: everything that it creates is gone afterwards, whatever happens."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.bed.bed import STATE, Bed, Machine, remove_leftovers, removing

ROOT = Path(__file__).parents[2]


def namespaces() -> str:
    return subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout


def test_two_beds_do_not_meet(bed: Bed, tmp_path: Path) -> None:
    with Bed(tmp_path, [Machine(name="alpha")]) as other:
        assert other.number != bed.number
        assert other["alpha"].address != bed["alpha"].address
        assert set(other.processes("alpha")).isdisjoint(bed.processes("alpha"))
        process = other["alpha"].sshd
    assert process.returncode is not None
    assert not (STATE / f"{other.number}.json").exists()


def test_what_a_bed_that_died_has_left_is_removed(bed: Bed, tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path; from tests.bed.bed import Bed, Machine\n"
        f"bed = Bed(Path({str(tmp_path)!r}), [Machine(name='alpha')])\n"
        "print(bed.number, bed['alpha'].sshd.pid, flush=True); input(); os._exit(1)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as dying:
        number, pid = dying.stdout.readline().split()
        state = STATE / f"{number}.json"
        left = json.loads(state.read_text())
        with removing():  # otherwise another process would, as soon as it creates a bed
            dying.communicate("\n")
            assert Path(f"/proc/{pid}").exists()
            assert state.exists()
            remove_leftovers()
    if state.exists():  # another bed has the number by now
        assert json.loads(state.read_text() or "{}") != left
    else:
        assert not any(name in namespaces().split() for name in left["namespaces"])
    assert bed.processes("alpha"), "another bed was harmed"
    status = Path(f"/proc/{pid}/stat")
    assert not status.exists() or status.read_text().split()[2] in "ZX"


def test_a_host_knows_its_name_and_the_others(cables: Bed) -> None:
    command = ["ip", "netns", "exec", f"tpbed{cables.number}-alpha", "getent", "ahostsv4", "beta"]
    assert subprocess.run(command, capture_output=True, text=True).stdout.startswith(cables["beta"].address)
