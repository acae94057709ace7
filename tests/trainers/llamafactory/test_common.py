import json
from typing import Any

import pytest

from tests.bundle.samples import QWEN3_8B, make_spec_and_plan
from topoplan.bundle.bundle import generate
from topoplan.trainers.llamafactory.common import dataset_entry


def entry(**what: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    spec, _ = make_spec_and_plan(**what)
    info, record = dataset_entry(spec.job, spec.model)
    return json.loads(info), json.loads(record)[0]


def test_each_stage_has_its_form() -> None:
    info, record = entry(model=QWEN3_8B)
    assert info["identity"]["file_name"] == "identity.json"
    assert set(info["identity"]["columns"]) == {"messages"}
    assert [turn["role"] for turn in record["messages"]] == ["user", "assistant"]
    info, record = entry(model=QWEN3_8B, job={"stage": "dpo"})
    assert info["identity"]["ranking"] is True
    assert set(info["identity"]["columns"].values()) == set(record) == {"prompt", "chosen", "rejected"}
    info, record = entry(model=QWEN3_8B, job={"stage": "pt"})
    assert info["identity"]["columns"] == {"prompt": "text"}
    assert set(record) == {"text"}


def test_images_have_a_column_and_a_place_in_the_text() -> None:
    info, record = entry()
    assert info["identity"]["columns"]["images"] == "images"
    assert record["messages"][0]["content"].count("<image>") == len(record["images"])


@pytest.mark.parametrize(
    ("dataset", "name", "file"),
    [
        (None, "my_data", "my_data.json"),
        ("a, b", "a", "a.json"),
        ('say "so"', 'say "so"', 'say "so".json'),
        ("own.jsonl", "own.jsonl", "own.jsonl"),
    ],
)
def test_the_entry_has_the_name_of_the_first_data_set(dataset: str | None, name: str, file: str) -> None:
    info, _ = entry(job={"dataset": dataset})
    assert list(info) == [name]
    assert info[name]["file_name"] == file


def test_data_from_elsewhere_needs_no_entry() -> None:
    assert "```json" in generate(*make_spec_and_plan())["README.md"]
    assert "```json" not in generate(*make_spec_and_plan(job={"dataset_dir": "ONLINE"}))["README.md"]
