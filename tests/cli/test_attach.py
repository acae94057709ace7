from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.cli.conftest import Cli
from tests.cli.live_run import LiveRun
from topoplan.launch import record


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 7), 7), ((5, 7), 5)])
def test_shows_all_nodes_and_ends_with_the_runs_code(
    cli: Cli, live: LiveRun, codes: tuple[int, int], expected: int
) -> None:
    live.start(*(f"echo {code}; sleep 0.3; exit {code}" for code in codes))
    shown = cli("attach")
    assert shown.code == expected
    assert sorted(shown.out.splitlines()) == sorted(f"[node-{node:02d}] {code}" for node, code in enumerate(codes))
    assert record.load().code == expected


def test_a_node_that_never_started_is_named(cli: Cli, live: LiveRun) -> None:
    live.start("exit 0")
    shown = cli("attach")
    assert (shown.code, shown.err) == (1, "topoplan: node-01: never started\n")


def test_ctrl_c_leaves_the_run_as_it_is(cli: Cli, live: LiveRun) -> None:
    live.start("echo up; exec sleep 61", "echo up; exec sleep 62")
    command = [sys.executable, "-m", "topoplan", "attach", "live"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout is not None
        assert {process.stdout.readline(), process.stdout.readline()} == {b"[node-00] up\n", b"[node-01] up\n"}
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert said.decode() == (
        "topoplan: left; the run goes on. `topoplan attach live-1` watches it again, `topoplan stop` ends it\n"
    )
    live.wait_for(["running", "running"])
