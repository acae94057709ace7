"""Which model a path or a name means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from topoplan import catalog
from topoplan.check.model_named import named_model
from topoplan.errors import ModelError


def test_a_catalog_name_is_taken_without_an_assumption(tmp_path: Path) -> None:
    model, assumption = named_model("qwen/qwen3-8b", base=tmp_path)

    assert (model.name, assumption) == ("Qwen/Qwen3-8B", "")


@pytest.mark.parametrize("path", ["/data/models/Qwen3-8B", "models/Qwen/Qwen3-8B/", "/x/Qwen/Qwen3-8B"])
def test_the_end_of_a_path_names_a_model_and_that_is_said(path: str, tmp_path: Path) -> None:
    model, assumption = named_model(path, base=tmp_path)

    assert model.name == "Qwen/Qwen3-8B"
    assert assumption == f"{path} is taken for Qwen/Qwen3-8B, by the end of its path"


def test_a_directory_of_the_hubs_cache_names_its_model(tmp_path: Path) -> None:
    model, assumption = named_model("/root/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/abc", base=tmp_path)

    assert (model.name, assumption) == ("Qwen/Qwen3-8B", "")


def test_a_directory_beside_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    config = catalog.model_config("Qwen/Qwen3-8B") | {"num_hidden_layers": 12}
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))

    model, assumption = named_model("mine", base=tmp_path)

    assert (model.num_layers, assumption) == (12, "")


def test_a_path_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="was not found"):
        named_model("/data/checkpoints/final", base=tmp_path)
