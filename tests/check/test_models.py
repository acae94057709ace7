from __future__ import annotations

import json
from pathlib import Path

import pytest

from topoplan import catalog
from topoplan.check.models import is_directory, known_model
from topoplan.check.parts import Part

PART = Part(kind="yaml", name="train.yaml", text="")


@pytest.mark.parametrize(
    "reference", ["Qwen/Qwen3-8B", "qwen3-8b", "/data/models/Qwen3-8B/", "models/Qwen/Qwen3-8B"], ids=str
)
def test_a_model_is_known_by_its_id_or_the_last_part_of_its_path(reference: str) -> None:
    model = known_model(reference, PART)
    assert model is not None
    assert model.name == "Qwen/Qwen3-8B"


def test_a_directory_beside_the_file_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    config = {**catalog.model_config("Qwen/Qwen3-8B"), "num_hidden_layers": 7}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    part = Part(kind="yaml", name=str(tmp_path / "train.yaml"), text="")
    model = known_model("mine", part)
    assert model is not None
    assert model.num_layers == 7
    assert is_directory("mine", part)
    (directory / "config.json").write_text("{}", encoding="utf-8")
    assert known_model("mine", part) is None


@pytest.mark.parametrize("reference", [None, "", 8, "no/such-model", "a" * 10_000, "\0", ["x"]])
def test_anything_else_is_not_known(reference: object) -> None:
    assert known_model(reference, PART) is None
