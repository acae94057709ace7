import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli


def row(name: str = "a", **changes: Any) -> str:
    return json.dumps(
        {
            "id": name,
            "family": "bench",
            "document": {
                "cluster": {"gpu": "h100-sxm-80gb", "nodes": 1, "gpus_per_node": 8},
                "model": {"name": "Qwen/Qwen3-8B"},
                "job": {"seq_len": 4096, "global_batch_size": 64},
                "layout": {"backend": "megatron", "tp": 2},
            },
            "measured": {"allocated_gib": 50, "step_s": 4},
        }
        | changes
    )


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs.jsonl"
    path.write_text(row() + "\n" + row("b", measured={"reserved_gib": 60}) + "\n")
    return path


@pytest.mark.usefixtures("graded_before")
def test_the_shipped_runs_are_graded_by_default(cli: Cli) -> None:
    result = cli("validate")
    assert result.code == 0
    assert "SimuMax B200" in result.out
    assert "pairs are as measured" in result.out
    assert max(map(len, result.out.splitlines())) <= 100
    assert "\x1b" not in result.out


def test_a_file_of_ones_own_is_graded(cli: Cli, runs: Path) -> None:
    result = cli("validate", runs, "--rows")
    assert result.code == 0
    assert "2 measured runs, 3 figures." in result.out
    assert "reserved GiB" in result.out


def test_json_has_a_schema(cli: Cli, runs: Path) -> None:
    view = json.loads(cli("validate", runs, "--json").out)
    assert view["schema"] == "topoplan.validate/1"
    assert [figure["id"] for figure in view["rows"]] == ["a", "a", "b"]


def test_standard_input_is_read(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(row().encode())))
    assert json.loads(cli("validate", "-", "--json").out)["runs"] == 1


def test_bad_input_is_one_message(cli: Cli, tmp_path: Path, runs: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("")
    assert "nothing in it" in cli("validate", path).err
    path.write_text("{}\n")
    result = cli("validate", path)
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert "`id` is missing" in result.err
    assert "no such file" in cli("validate", tmp_path / "absent.jsonl").err
    assert "cannot be used together" in cli("validate", runs, "--json", "-o", tmp_path / "x").err


def test_when_nothing_can_be_predicted_the_input_is_bad(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(row(measured={"oom": True}).replace('"tp": 2', '"tp": 3'))
    result = cli("validate", path)
    assert result.code == 2
    assert "1 run could not be predicted" in result.out
