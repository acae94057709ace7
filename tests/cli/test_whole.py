"""The verbs with the real planner, one after the other on the same question."""

import json
from pathlib import Path

import jsonschema
import pytest

from tests.cli.conftest import Cli
from tests.cli.test_rank import SCHEMA

FLAGSHIP = Path(__file__).parents[2] / "cluster_specs" / "h100-4x8.yaml"
SMALL = ("--pin", "tp=4,pp=1,cp=1")


def test_json_follows_the_schema_and_adds_up(cli: Cli) -> None:
    document = json.loads(cli("rank", FLAGSHIP, "--json", "--rejected", "--top", "4", *SMALL).out)
    jsonschema.validate(document, SCHEMA)
    assert len(document["plans"]) == 4
    counts = document["counts"]
    assert counts["candidates"] == sum(number for name, number in counts.items() if name != "candidates")
    assert len(document["rejected"]) == counts["illegal"] + counts["out_of_memory"]
    for plan in document["plans"]:
        assert plan["time"]["band"][0] <= plan["time"]["step_s"] <= plan["time"]["band"][1]
        assert sum(plan["time"]["parts_s"].values()) == pytest.approx(plan["time"]["step_s"], rel=1e-4)


def test_predict_and_generate_agree_with_rank(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    *_, last = ranked = json.loads(cli("rank", FLAGSHIP, "--json", "--top", "100000", *SMALL).out)["plans"]
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
        "layout": ranked[0]["layout"],
    }
    Path("runs.jsonl").write_text(json.dumps(document) + "\n{broken\n")
    done = cli("predict", "runs.jsonl", "--json")
    assert done.code == 0
    answer, broken = (json.loads(line) for line in done.out.splitlines())
    assert broken == {"schema": "topoplan.predict/1", "id": None, "error": broken["error"]}
    assert answer["id"] == "again"
    assert answer["time"]["step_s"] == pytest.approx(ranked[0]["time"]["step_s"])
    assert answer["memory"]["device_gib"] == pytest.approx(ranked[0]["memory"]["device_gib"])
    # A plan that is not in the table, by its id; then the first plan, twice, into the directory named after the
    # cluster.
    assert (
        json.loads(cli("generate", FLAGSHIP, "--plan", last["id"], "--json", "-o", "out").out)["plan"]["id"]
        == (last["id"])
    )
    assert [cli("generate", FLAGSHIP, *SMALL).code for _ in range(2)] == [0, 0]
    assert {"plan.json", "train.yaml", "hosts.json", "README.md", "node-00.sh", "node-03.sh"} <= {
        path.name for path in Path("generated/h100-4x8").iterdir()
    }
