"""Completions for a TAB in a shell, and three real shells that request them."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from topoplan.cli.verbs import below
from topoplan.run import record
from topoplan.run.record import RunRecord

ROOT = Path(__file__).parents[2]
Tab = Callable[[str], list[str]]


@pytest.fixture
def tab(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tab:
    """Return the completions that fish gets at the end of a line, without descriptions."""
    monkeypatch.setenv("_TOPOPLAN_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def offered(line: str) -> list[str]:
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", f"topoplan {line}")
        shown = cli()
        assert shown.err == ""
        return [entry.partition("\t")[0] for entry in shown.out.splitlines() if entry]

    return offered


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("", [verb.word for verb in below("")]),
        ("ru", ["runs"]),
        ("runs ", [verb.word for verb in below("runs")]),
        ("show r", ["recipes"]),
        ("rank --gpu b3", ["b300-sxm-288gb"]),
        ("rank --gpu=b3", ["b300-sxm-288gb"]),
        ("rank --model Qwen/Qwen3-8B-", ["Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B-FP8"]),
        ("show recipes --model Qwen/Qwen3-4B,Qwen/Qwen3-8B-B", ["Qwen/Qwen3-4B,Qwen/Qwen3-8B-Base"]),
        ("rank --backend mca,fs", ["mca,fsdp2"]),
        ("rank --trainer s", ["swift"]),
        ("rank --finetuning q", ["qlora"]),
        ("rank --gp", ["--gpu", "--gpus-per-node"]),
        ("generate --scheduler ", ["slurm", "none"]),
        ("preflight x.yaml --skip gpu-", ["gpu-kind", "gpu-peer-access"]),
        ("show profile l40", ["l40s-48gb"]),
        ("profile l40", ["l40s-48gb"]),
        # File names are completed by the shell itself, and unknown values not at all.
        ("rank clus", []),
        ("explain absent.yaml --plan ", []),
        ("explain --plan ", []),
    ],
)
def test_what_is_offered(tab: Tab, line: str, offered: list[str]) -> None:
    assert tab(line) == offered


def test_plans_of_the_spec_before_are_offered_by_rank(tab: Tab, fake_search: list[Any], spec_file: Path) -> None:
    assert tab(f"explain {spec_file} --set nodes=2 --plan ")[:2] == ["tp2-pp1-dp16-mbs1", "tp4-pp1-dp8-mbs1"]
    assert tab(f"explain {spec_file} --plan 1 --versus tp4-pp1") == ["tp4-pp1-dp8-mbs1"]
    assert fake_search[0]["spec"].cluster.nodes == 2


def test_a_search_that_takes_long_is_given_up(tab: Tab, spec_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"explain {spec_file} --pin tp=8,cp=1,micro_batch_size=1 --plan "
    assert "tp8-pp1-dp4-mbs1" in tab(line)
    monkeypatch.setattr("topoplan.cli.completion.PATIENCE_S", 0.0)
    assert tab(line) == []


def test_runs_and_bundles_are_offered(tab: Tab, tmp_path: Path) -> None:
    for run_id in ("a-1", "b-1"):
        record.create(RunRecord(run_id=run_id, name="x", bundle="/b", created=f"2030 {run_id}"))
    for bundle in ("here", "generated/there", "too/far/below"):
        (tmp_path / bundle).mkdir(parents=True)
        (tmp_path / bundle / "plan.json").touch()
    assert tab("stop ") == tab("runs attach ") == ["b-1", "a-1"]
    assert tab("launch ") == ["generated/there", "here"]
    assert tab("launch generated/t") == ["generated/there"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_once_it_is_told_to(shell: str, tmp_path: Path) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"no {shell}")
    program = tmp_path / "bin" / "topoplan"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m topoplan "$@"\n')
    program.chmod(0o755)
    environment = {
        **{"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "TERM": "xterm", "LANG": "C.UTF-8"},
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
    }
    told = subprocess.run(
        [path, "-c", "topoplan --install-completion; true"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert f"{shell} completion installed in" in told.stdout
    assert "b300-sxm-288gb" in typed(path, "topoplan rank --gpu b3\t", "b300-sxm-288gb", environment, tmp_path)


def typed(shell: str, text: str, awaited: str, environment: dict[str, str], cwd: Path) -> str:
    """Return what a shell's terminal shows after typing `text`, once it shows `awaited` or the time is up."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execve(shell, [shell, "-i"], environment)
    shown, until, is_typed = b"", time.monotonic() + 30, False
    while awaited.encode() not in shown and time.monotonic() < until:
        if select.select([terminal], [], [], 0.5)[0]:
            shown += os.read(terminal, 4096)
        elif not is_typed:  # the shell has finished its start-up output
            is_typed = bool(os.write(terminal, text.encode()))
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    os.close(terminal)
    return shown.decode(errors="replace")
