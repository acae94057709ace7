import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bundle.samples import CLUSTER, QWEN3_8B, QWEN3_VL_8B, make_spec_and_plan
from topoplan.bundle.bundle import generate
from topoplan.specs.dataset import read_dataset
from topoplan.trainers.llamafactory.common import data_section, dataset_entry
from topoplan.trainers.yaml_text import Section


def entry(**what: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    spec, _ = make_spec_and_plan(**what)
    info, record = dataset_entry(spec.job, spec.model)
    shown = json.loads(record)
    return json.loads(info), shown[0] if isinstance(shown, list) else shown


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


@pytest.mark.parametrize(
    ("stage", "record"),
    [
        ("dpo", {"conversations": [{"from": "human", "value": "a"}], "chosen": {"from": "gpt", "value": "b"}}),
        ("dpo", {"instruction": "a", "input": "b", "output": "never read", "chosen": "b"}),
        ("sft", {"instruction": "a", "input": "", "output": "b", "system": "c", "history": [["d", "e"]]}),
        ("sft", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": "[]"}),
        ("pt", {"prompt": "a"}),
    ],
)
def test_a_file_that_was_read_has_an_entry_of_its_own_columns(
    tmp_path: Path, stage: str, record: dict[str, Any]
) -> None:
    record |= {"rejected": record["chosen"]} if "chosen" in record else {}
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps(record))
    lengths = read_dataset("own.jsonl", tmp_path, base=tmp_path, stage=stage)
    info, shown = entry(model=QWEN3_8B, job={"stage": stage, "dataset": "own.jsonl", "lengths": lengths})
    assert shown.keys() == record.keys() - ({"output"} if stage == "dpo" else set())
    # The record shown is read by the entry shown.
    (tmp_path / "dataset_info.json").write_text(json.dumps({"listed": info["own.jsonl"]}))
    file.write_text(json.dumps(shown))
    again = read_dataset("listed", tmp_path, base=tmp_path, stage=stage)
    assert again is not None
    assert again.sequences == (2 if stage == "dpo" else 1)
    assert info["own.jsonl"].get("ranking", False) == (stage == "dpo")
    listed, _ = entry(model=QWEN3_8B, job={"stage": stage, "dataset": "listed", "lengths": again})
    assert listed == {"listed": info["own.jsonl"]}


def test_images_have_a_column_and_a_place_in_the_text() -> None:
    info, record = entry()
    assert info["identity"]["columns"]["images"] == "images"
    assert record["messages"][0]["content"].count("<image>") == len(record["images"])


@pytest.mark.parametrize(("dataset", "form"), [("mine", list), ("own.json", list), ("own.jsonl", dict)])
def test_a_record_has_the_form_of_its_file(dataset: str, form: type) -> None:
    spec, _ = make_spec_and_plan(job={"dataset": dataset})
    assert isinstance(json.loads(dataset_entry(spec.job, spec.model)[1]), form)


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


def section(**what: Any) -> Section:
    spec, _ = make_spec_and_plan(**{"model": QWEN3_8B, **what})
    return data_section(spec, "in this order", padded="padded so")


def values(**what: Any) -> dict[str, Any]:
    return {entry.key: entry.value for entry in section(**what).entries}


def comments(**what: Any) -> dict[str, str]:
    return {entry.key: entry.comment for entry in section(**what).entries}


def test_a_data_set_that_is_not_named_is_to_be_filled_in() -> None:
    assert values(job={"dataset": None})["dataset"] == "SET_ME"
    assert comments(job={"dataset": None})["dataset"].startswith("a name in dataset_info.json")
    assert values(job={"dataset": "mine"})["dataset"] == "mine"
    assert comments(job={"dataset": "mine"})["dataset"] == "in this order"


def test_packing_is_said_where_the_trainer_reads_it() -> None:
    assert values(job={"packing": True})["packing"] is True
    assert comments(job={"packing": False})["packing"] == "padded so"
    assert "packing" not in values(job={"stage": "pt", "packing": True})  # it would cost one token per sequence
    assert any("lose a token" in note for note in section(job={"stage": "pt", "packing": True}).notes)
    assert values(job={"stage": "pt", "packing": False})["packing"] is False
    assert "packing" not in values(job={"stage": "dpo"})


def test_workers_are_no_more_than_the_cores() -> None:
    few = values(cluster=replace(CLUSTER, cpu_cores=8))
    assert (few["preprocessing_num_workers"], few["dataloader_num_workers"]) == (8, 1)
    many = values(cluster=replace(CLUSTER, cpu_cores=256))
    assert (many["preprocessing_num_workers"], many["dataloader_num_workers"]) == (16, 4)


def test_images_have_their_size() -> None:
    assert "image_max_pixels" in values(model=QWEN3_VL_8B)
    assert "image_max_pixels" not in values()
