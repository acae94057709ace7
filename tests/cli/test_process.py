"""The installed program, with the real planner, as a shell sees it."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

ROOT = Path(__file__).parents[2]
FLAGSHIP = ROOT / "cluster_specs" / "h100-4x8.yaml"
SCHEMA = json.loads((ROOT / "tests" / "data" / "rank.schema.json").read_text())
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


def test_rank_prints_a_table_that_fits_100_columns() -> None:
    done = topoplan("rank", FLAGSHIP)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "\x1b" not in done.stdout


def test_rank_is_the_same_twice() -> None:
    first, second = (topoplan("rank", FLAGSHIP, *SMALL, PYTHONHASHSEED=seed).stdout for seed in ("1", "2"))
    assert first == second


def test_json_follows_the_schema() -> None:
    document = json.loads(topoplan("rank", FLAGSHIP, "--json", "--rejected", "--top", "4", *SMALL).stdout)
    jsonschema.validate(document, SCHEMA)
    assert len(document["plans"]) == 4
    counts = document["counts"]
    assert counts["candidates"] == sum(number for name, number in counts.items() if name != "candidates")
    assert len(document["rejected"]) == counts["illegal"] + counts["out_of_memory"]
    for plan in document["plans"]:
        assert plan["time"]["band"][0] <= plan["time"]["step_s"] <= plan["time"]["band"][1]
        assert sum(plan["time"]["parts_s"].values()) == pytest.approx(plan["time"]["step_s"], rel=1e-4)


def test_csv_is_as_long_as_top() -> None:
    rows = list(csv.DictReader(io.StringIO(topoplan("rank", FLAGSHIP, "--csv", "--top", "3", *SMALL).stdout)))
    assert [row["tp"] for row in rows] == ["4", "4", "4"]


def test_predict_agrees_with_rank(tmp_path: Path) -> None:
    ranked = json.loads(topoplan("rank", FLAGSHIP, "--json", "--top", "1", *SMALL).stdout)["plans"][0]
    document = {
        "id": "again",
        "cluster": {"gpu": "h100-sxm-80gb", "nodes": 4, "gpus_per_node": 8},
        "model": {"name": "Qwen/Qwen3-VL-8B-Instruct"},
        "job": {
            "seq_len": 4096,
            "global_batch_size": 64,
            "image_max_pixels": 451584,
            "freeze_vision_tower": False,
            "freeze_multi_modal_projector": False,
        },
        "layout": ranked["layout"],
    }
    runs = tmp_path / "runs.jsonl"
    runs.write_text(json.dumps(document) + "\n{broken\n")
    done = topoplan("predict", runs, "--json")
    assert done.returncode == 0
    answer, broken = (json.loads(line) for line in done.stdout.splitlines())
    assert broken == {"schema": "topoplan.predict/1", "id": None, "error": broken["error"]}
    assert answer["id"] == "again"
    assert answer["time"]["step_s"] == pytest.approx(ranked["time"]["step_s"])
    assert answer["memory"]["device_gib"] == pytest.approx(ranked["memory"]["device_gib"])


def test_generate_in_an_empty_directory(tmp_path: Path) -> None:
    done = topoplan("generate", FLAGSHIP, *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    bundle = tmp_path / "generated" / "h100-4x8"
    assert {"plan.json", "train.yaml", "hosts.json", "README.md", "node-00.sh", "node-03.sh"} <= {
        path.name for path in bundle.iterdir()
    }
    again = topoplan("generate", FLAGSHIP, *SMALL, cwd=tmp_path)
    assert again.returncode == 0


def test_a_legal_plan_outside_the_top_is_generated_by_id(tmp_path: Path) -> None:
    ranked = json.loads(topoplan("rank", FLAGSHIP, "--json", "--top", "100000", *SMALL).stdout)["plans"]
    last = ranked[-1]["id"]
    done = topoplan("generate", FLAGSHIP, "--plan", last, "--json", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["id"] == last


def test_nothing_fits_is_exit_code_1() -> None:
    done = topoplan("rank", FLAGSHIP, "--model", "deepseek-ai/DeepSeek-V3", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["plans"] == []
    assert done.stderr.startswith("topoplan: no layout fits")
    assert "nearest misses:" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rank", "missing.yaml"], "no such file"),
        (["rank", FLAGSHIP, "--model", "Qwen/Qwen3-8b-typo"], "Qwen3"),
        (["rank", FLAGSHIP, "--set", "seq_length=4096"], "seq_len"),
        (["rank", FLAGSHIP, "--set", "ib_bandwidth=400"], "400Gb/s"),
        (["rank", FLAGSHIP, "--set", "gpu=h100-sxm-81gb"], "h100-sxm-80gb"),
        (["rank", FLAGSHIP, "--pin", "tp=3"], "tp"),
        (["rank", FLAGSHIP, "--set", "global_batch_size=63", "--pin", "tp=1,pp=1,cp=1"], "63"),
        (["rank", FLAGSHIP, "--unknown"], "--unknown"),
        (["generate", FLAGSHIP, "-o", "/dev/null"], "/dev/null"),
        (["predict", "missing.jsonl"], "no such file"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments: list[object], message: str, tmp_path: Path) -> None:
    done = topoplan(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("topoplan: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="pipes of POSIX")
@pytest.mark.parametrize("verb", [["show", "models"], ["rank", str(FLAGSHIP), *SMALL, "--rejected", "--json"]])
def test_a_reader_that_leaves_is_no_error(verb: list[str]) -> None:
    command = " ".join([sys.executable, "-m", "topoplan", *verb])
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -c 10 >/dev/null; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_said() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "topoplan", "show", "gpus"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
    assert done.returncode == 1
    assert done.stderr.startswith("topoplan: No space left on device")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_of_the_terminal_will_do(encoding: str) -> None:
    done = topoplan("rank", FLAGSHIP, *SMALL, PYTHONIOENCODING=encoding)
    assert done.returncode == 0
    assert done.stderr == ""
