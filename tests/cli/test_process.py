"""The installed program with the real planner, run from a shell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGSHIP = ROOT / "cluster_specs" / "h100-4x8.yaml"
SMALL = ("--pin", "tp=4,pp=1,cp=1")


def topoplan(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "topoplan", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=120,
    )


def test_rank_prints_the_same_plain_table_in_every_process() -> None:
    one, other = (topoplan("rank", FLAGSHIP, *SMALL, PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert (one.returncode, one.stderr) == (0, "")
    assert one.stdout == other.stdout
    *lines, _next = one.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in one.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_any_encoding_of_the_terminal_will_do(encoding: str) -> None:
    done = topoplan("show", "models", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m topoplan show models | head -c 10 >/dev/null; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_said() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "topoplan", "show", "gpus"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
    assert done.returncode == 1
    assert done.stderr.startswith("topoplan: No space left on device")
