"""A closed pipe (`topoplan rank ... | head -1`) is not a failure, whatever the verb had left to print."""

import os
import sys
from pathlib import Path

import pytest

from tests.cli.live_run import LiveRun
from tests.cli.test_validate import row as measured_run
from topoplan.cli.main import main

SMALL = "--pin tp=4,cp=1,micro_batch_size=1"
RUN = (
    '{"cluster": {"gpu": "h100"}, "model": {"name": "Qwen/Qwen3-8B"}, "job": {"seq_len": 64, "global_batch_size": 8}, '
)


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
        *(f"rank SPEC {SMALL} --rejected{form}" for form in ("", " --json")),
        f"rank SPEC {SMALL} --csv --top 10000",
        *(f"explain SPEC --plan tp4-pp1-dp8-mbs1{form}" for form in ("", " --json")),
        *(f"timeline SPEC --plan tp4-pp2-dp4-mbs1{form}" for form in ("", " --json")),
        *(f"topology SPEC --layout tp=4{form}" for form in ("", " --json")),
        f"what-if SPEC {SMALL} --set nodes=2,4",
        f"size SPEC {SMALL} --tokens 1M --max-hours 9 --max-nodes 2",
        *(f"predict RUN{form}" for form in ("", " --json")),
        "validate measured.jsonl --rows",
        f"generate SPEC {SMALL},pp=1 -o bundle",
        "check run.yaml",
        "show recipes --model Qwen/Qwen3-0.6B --gpu h20-sxm-96gb --context 4096",
    ],
)
def test_it_is_exit_code_0_without_a_word(
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
