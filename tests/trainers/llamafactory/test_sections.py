"""The data section, which both of LLaMA-Factory's engines share."""

from dataclasses import replace
from typing import Any

from tests.bundle.samples import CLUSTER, QWEN3_8B, QWEN3_VL_8B, make_spec_and_plan
from topoplan.trainers.llamafactory.sections import data_section
from topoplan.trainers.yaml_text import Section


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
