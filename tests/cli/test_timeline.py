import json
from pathlib import Path
from typing import Any

from tests.cli.conftest import Cli

PLAN = "tp2-pp2-dp8-mbs1"


def test_a_timeline_is_printed(cli: Cli, spec_file: Path, fake_search: list[Any]) -> None:
    result = cli("timeline", spec_file, "--plan", PLAN)
    assert result.code == 0
    assert not fake_search
    assert "2 pipeline ranks x 1 chunk, 8 micro batches per step" in result.out
    assert max(map(len, result.out.splitlines())) <= 100
    assert "\x1b" not in result.out


def test_the_best_plan_of_the_ranking_is_the_default(cli: Cli, spec_file: Path, fake_search: list[Any]) -> None:
    view = json.loads(cli("timeline", spec_file, "--json").out)
    assert len(fake_search) == 1
    assert view["plan"]["id"] == "tp2-pp1-dp16-mbs1"  # the first plan of `usual_ranking`


def test_a_run_document_is_drawn(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    document = {
        "id": "a",
        "cluster": {"gpu": "h100-sxm-80gb", "nodes": 2, "gpus_per_node": 8},
        "model": {"name": "Qwen/Qwen3-8B"},
        "job": {"seq_len": 4096, "global_batch_size": 64},
        "layout": {"backend": "megatron", "tp": 1, "pp": 4, "vpp": 3},
    }
    path.write_text(json.dumps(document))
    assert "4 pipeline ranks x 3 chunks" in cli("timeline", "--run", path).out


def test_a_plan_without_pipeline_has_lanes(cli: Cli, spec_file: Path, tmp_path: Path) -> None:
    result = cli("timeline", spec_file, "--plan", "fsdp2-dp32-mbs1-full")
    assert result.code == 0, result.err
    assert "one of 32 GPUs, which all do the same, 2 micro batches per step" in " ".join(result.out.split())
    for name in ("step.svg", "step.json"):
        assert cli("timeline", spec_file, "--plan", "fsdp2-dp32-mbs1-full", "-o", tmp_path / name).code == 0
        assert (tmp_path / name).stat().st_size > 1000
