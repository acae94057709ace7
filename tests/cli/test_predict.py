import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli

pytestmark = pytest.mark.usefixtures("fake_predict")


def document(run_id: Any = "run", **changes: Any) -> dict[str, Any]:
    return {
        "id": run_id,
        "cluster": {"gpu": "h100-sxm-80gb", "nodes": 4, "gpus_per_node": 8},
        "model": {"name": "Qwen/Qwen3-8B"},
        "job": {"seq_len": 4096, "global_batch_size": 64, "precision": "bf16", "finetuning": "full"},
        "layout": {"backend": "megatron", "tp": 4, "pp": 1, "micro_batch_size": 1},
    } | changes


def answers(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_each_line_is_answered_in_order_and_broken_ones_do_not_stop_the_rest(cli: Cli, tmp_path: Path) -> None:
    lines = [
        json.dumps(document("a")),
        '{"id": "b", "cluster": ',
        json.dumps(document("c", cluster={"gpu": "h100-sxm-81gb", "nodes": 4, "gpus_per_node": 8})),
        "",
        json.dumps(document("d", layout={"tp": 16})),
        json.dumps(document("e", layout={"tp": 7})),
        json.dumps({"id": "f", "layout": {"tp": 1}}),
        json.dumps(document(8)),
        "[1, 2]",
        json.dumps({key: value for key, value in document("g").items() if key != "layout"}),
    ]
    runs = tmp_path / "runs.jsonl"
    runs.write_text("\n".join(lines) + "\n")
    result = cli("predict", runs, "--json")
    assert result.code == 0
    found = answers(result.out)
    assert [answer["id"] for answer in found] == ["a", None, "c", "d", "e", "f", 8, None, "g"]
    assert ["error" in answer for answer in found] == [False, True, True, True, True, True, False, True, True]
    assert found[0]["layout"]["tp"] == 4
    assert "runs.jsonl:2: not JSON" in found[1]["error"]
    assert "h100-sxm-80gb" in found[2]["error"]
    assert "tp 16 > 8" in found[3]["error"]
    assert "defect in topoplan: ZeroDivisionError" in found[4]["error"]
    assert "cluster" in found[5]["error"]
    assert "no `layout`" in found[8]["error"]


@pytest.mark.parametrize("name", ["run.json", "run.yaml", "run.yml", "run"])
def test_a_file_with_one_document(cli: Cli, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(document("one"), indent=2))
    assert [answer["id"] for answer in answers(cli("predict", path, "--json").out)] == ["one"]


def test_yaml_as_people_write_it(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "cluster: {gpu: h100-sxm-80gb, nodes: 4, gpus_per_node: 8}\nmodel: {name: Qwen/Qwen3-8B}\n"
        "job:\n  seq_len: 4096\n  global_batch_size: 64\nlayout: {tp: 2}\n"
    )
    assert answers(cli("predict", path, "--json").out)[0]["plan_id"] == "tp2-pp1-dp16-mbs1"


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(document("x")),
        json.dumps(document("x"), indent=1),
        json.dumps(document("x")) + "\n" + json.dumps(document("y")) + "\n",
        "{broken\n" + json.dumps(document("y")) + "\n",
    ],
)
def test_standard_input_is_json_lines_or_one_document(cli: Cli, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    found = answers(cli("predict", "-", "--json").out)
    assert len(found) == (2 if text.endswith("\n") else 1)
    assert not found[-1].get("error")


def test_a_table_without_json(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(document("good")) + "\n" + json.dumps(document("bad", layout={"tp": 16})) + "\n")
    result = cli("predict", path)
    assert result.code == 0
    assert "tp4 pp1 dp8 mbs1" in result.out
    assert "1 of 2 could not be predicted" in result.out
    assert max(map(len, result.out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("runs.jsonl", b"", "nothing in it"),
        ("runs.jsonl", b"\xff\xfe\x00", "not a text file in UTF-8"),
        ("run.yaml", b"a: [1", "not valid YAML"),
        ("run.yaml", b"[1, 2]", "list"),
    ],
)
def test_unreadable_files(cli: Cli, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    result = cli("predict", path)
    assert result.code == 2
    assert message in result.err
    assert name in result.err


def test_deep_nesting_is_one_error(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text("[" * 100_000 + "\n" + json.dumps(document("y")) + "\n")
    found = answers(cli("predict", path, "--json").out)
    assert "error" in found[0]
    assert found[1]["id"] == "y"
