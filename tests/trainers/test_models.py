import json
from pathlib import Path

import pytest

from tests.reading.setups import configuration
from topoplan import catalog
from topoplan.errors import ModelError
from topoplan.reading.parts import Part
from topoplan.specs.model import Model
from topoplan.trainers.models import is_directory, model_at_hand, model_of

PART = Part(kind="yaml", name="train.yaml", text="")


@pytest.mark.parametrize(
    "reference", ["Qwen/Qwen3-8B", "qwen3-8b", "/data/models/Qwen3-8B/", "models/Qwen/Qwen3-8B"], ids=str
)
def test_a_model_is_known_by_its_id_or_the_last_part_of_its_path(reference: str) -> None:
    model = model_at_hand(reference, PART)
    assert model.name == "Qwen/Qwen3-8B"


def test_a_directory_beside_the_file_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    config = {**catalog.model_config("Qwen/Qwen3-8B"), "num_hidden_layers": 7}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    part = Part(kind="yaml", name=str(tmp_path / "train.yaml"), text="")
    model = model_at_hand("mine", part)
    assert model.num_layers == 7
    assert is_directory("mine", part)
    (directory / "config.json").write_text("{}", encoding="utf-8")
    assert model_at_hand("mine", part) is None


@pytest.mark.parametrize("reference", [None, "", 8, "no/such-model", "a" * 10_000, "\0", ["x"]])
def test_anything_else_is_not_known(reference: object) -> None:
    assert model_at_hand(reference, PART) is None


def named(reference: str, directory: Path) -> tuple[Model, str]:
    return model_of(configuration("model_name_or_path: a", name=str(directory / "train.yaml")), reference)


def test_a_catalog_name_is_taken_without_an_assumption(tmp_path: Path) -> None:
    model, assumption = named("qwen/qwen3-8b", tmp_path)

    assert (model.name, assumption) == ("Qwen/Qwen3-8B", "")


@pytest.mark.parametrize("path", ["/data/models/Qwen3-8B", "models/Qwen/Qwen3-8B/", "/x/Qwen/Qwen3-8B"])
def test_the_end_of_a_path_names_a_model_and_that_is_said(path: str, tmp_path: Path) -> None:
    model, assumption = named(path, tmp_path)

    assert model.name == "Qwen/Qwen3-8B"
    assert assumption == f"{path} is taken for Qwen/Qwen3-8B, by the end of its path"


def test_a_directory_of_the_hubs_cache_names_its_model(tmp_path: Path) -> None:
    model, assumption = named("/root/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/abc", tmp_path)

    assert (model.name, assumption) == ("Qwen/Qwen3-8B", "")


def test_a_directory_beside_the_file_needs_no_assumption(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    config = catalog.model_config("Qwen/Qwen3-8B") | {"num_hidden_layers": 12}
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))

    model, assumption = named("mine", tmp_path)

    assert (model.num_layers, assumption) == (12, "")


def test_a_path_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="was not found"):
        named("/data/checkpoints/final", tmp_path)
