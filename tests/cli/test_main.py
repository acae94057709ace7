"""The program as a whole: its version, its ends, and runs from a shell, into a full disk and into a closed pipe."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import topoplan
from tests.cli.conftest import Cli
from tests.cli.live_run import LiveRun
from tests.cli.test_validate import row as measured_run
from topoplan.cli.main import main

ROOT = Path(__file__).parents[2]
FLAGSHIP = ROOT / "cluster_specs" / "h100-4x8.yaml"
SMALL = ("--pin", "tp=4,pp=1,cp=1")
PINS = "--pin tp=4,cp=1,micro_batch_size=1"
RUN = (
    '{"cluster": {"gpu": "h100"}, "model": {"name": "Qwen/Qwen3-8B"}, "job": {"seq_len": 64, "global_batch_size": 8}, '
)


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(cli: Cli, arguments: list[str]) -> None:
    assert cli(*arguments).out == f"topoplan {topoplan.__version__}\n"


def test_ctrl_c_exits_with_130(cli: Cli, spec_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(spec: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("topoplan.planner.search.rank", rank)
    result = cli("rank", spec_file)
    assert result.code == 130
    assert result.err == "topoplan: interrupted\n"


def test_a_defect_is_not_hidden(spec_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(spec: object, **options: object) -> None:
        raise KeyError("tp")

    monkeypatch.setattr("topoplan.planner.search.rank", rank)
    with pytest.raises(KeyError):
        main(["rank", str(spec_file)])


@pytest.mark.parametrize("arguments", [["check"], ["launch"], ["preflight"], ["generate", "--from"]])
def test_a_directory_that_may_not_be_entered_is_bad_input(
    cli: Cli, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is simulated, because root may enter every directory."""
    inside, stat = str(tmp_path / "private") + os.sep, os.stat

    def refusing(path: Any, *rest: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(inside):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *rest, **options)

    (tmp_path / "private").mkdir()
    monkeypatch.setattr(os, "stat", refusing)
    result = cli(*arguments, tmp_path / "private")
    assert result.code == 2
    assert re.fullmatch(rf"topoplan: {re.escape(inside)}\S+: cannot be read: Permission denied\n", result.err)


def run(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "topoplan", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=120,
    )


def test_rank_prints_the_same_plain_table_in_every_process() -> None:
    one, other = (run("rank", FLAGSHIP, *SMALL, PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert (one.returncode, one.stderr) == (0, "")
    assert one.stdout == other.stdout
    *lines, _next = one.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in one.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_any_encoding_of_the_terminal_will_do(encoding: str) -> None:
    done = run("show", "models", PYTHONIOENCODING=encoding)
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


def left_alone(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Return exit code and standard error of a command whose standard output has been closed."""
    reader, writer = os.pipe()
    os.close(reader)
    before, sys.stdout = sys.stdout, os.fdopen(writer, "w")
    try:
        with pytest.raises(SystemExit) as stop:
            main(line.split())
        sys.stdout.close()
    finally:
        sys.stdout = before
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        *("--help", "version", "show gpus", "show models --json", "show schema", "show profile", "runs", "rank --help"),
        *(f"rank SPEC {PINS} --rejected{form}" for form in ("", " --json")),
        f"rank SPEC {PINS} --csv --top 10000",
        *(f"explain SPEC --plan tp4-pp1-dp8-mbs1{form}" for form in ("", " --json")),
        *(f"timeline SPEC --plan tp4-pp2-dp4-mbs1{form}" for form in ("", " --json")),
        *(f"topology SPEC --layout tp=4{form}" for form in ("", " --json")),
        f"what-if SPEC {PINS} --set nodes=2,4",
        f"size SPEC {PINS} --tokens 1M --max-hours 9 --max-nodes 2",
        *(f"predict RUN{form}" for form in ("", " --json")),
        "validate measured.jsonl --rows",
        f"generate SPEC {PINS},pp=1 -o bundle",
        "check run.yaml",
        "show recipes --model Qwen/Qwen3-0.6B --gpu h20-sxm-96gb --context 4096",
    ],
)
def test_a_closed_pipe_is_exit_code_0_without_a_word(
    line: str, spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(RUN + '"layout": {"tp": 1}}')
    Path("run.yaml").write_text("stage: pt\nfinetuning_type: full\n")
    Path("measured.jsonl").write_text(measured_run())
    line = line.replace("SPEC", spec_file.name).replace("RUN", "run.json")
    assert left_alone(line, capsys) == (0, "")


@pytest.mark.parametrize("line", ["runs logs -f --node 0", "runs attach", "runs attach --json"])
def test_following_ends_and_the_run_goes_on(line: str, live: LiveRun, capsys: pytest.CaptureFixture[str]) -> None:
    live.start("while sleep 0.05; do echo more; done", "exec sleep 60")
    code, said = left_alone(line, capsys)
    assert code == 0
    assert not any(word in said for word in ("Broken", "Traceback", "left"))
    live.wait_for(["running", "running"])
