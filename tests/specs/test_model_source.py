"""Where a model is searched for, and the messages if it is not found."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.specs.test_config_json import LLAMA
from topoplan.errors import ModelError
from topoplan.specs import known
from topoplan.specs.model_source import load_model


def write(directory: Path, text: str, name: str = "config.json") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(text, encoding="utf-8")
    return directory / name


def test_a_catalog_name_wins_and_needs_no_file(tmp_path: Path) -> None:
    assert load_model("qwen3-8b", base=tmp_path) is known.model("Qwen/Qwen3-8B")


def test_a_directory_is_read_relative_to_the_spec(tmp_path: Path) -> None:
    write(tmp_path / "my model", json.dumps(LLAMA))
    for reference in ("my model", "./my model", str(tmp_path / "my model"), "my model/config.json"):
        model = load_model(reference, base=tmp_path)
        assert model.name == "my model"
        assert model.config_path == str(tmp_path / "my model")
        assert model.num_layers == 4


def test_a_config_file_of_another_name_is_read(tmp_path: Path) -> None:
    write(tmp_path, json.dumps(LLAMA), "tiny.json")
    assert load_model("tiny.json", base=tmp_path).name == "tiny"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hidden_size": 512,\n "vocab_size": }', "config.json:2: is not JSON"),
        ("[1, 2]", "is not a JSON object"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "hidden_size is missing"),
    ],
)
def test_a_broken_config_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path / "broken", text)
    with pytest.raises(ModelError) as caught:
        load_model("broken", base=tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path / "broken") in str(caught.value)


def test_a_config_that_is_not_text_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "binary", "").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="is not a text file in UTF-8"):
        load_model("binary", base=tmp_path)


def test_a_directory_without_a_config_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty: has no config\.json"):
        load_model("empty", base=tmp_path)


@pytest.mark.parametrize(
    "reference", ["/nowhere/at/all", "./nowhere", "nowhere.json", "a/b/c", "~nobody-of-that-name/x"]
)
def test_a_path_that_is_not_there_is_named(tmp_path: Path, reference: str) -> None:
    with pytest.raises(ModelError, match="was not found"):
        load_model(reference, base=tmp_path)


@pytest.mark.parametrize("reference", ["", "  ", "nowhere", "x" * 5000, "nul\0byte"])
def test_a_reference_that_is_nothing_is_refused(tmp_path: Path, reference: str) -> None:
    with pytest.raises(ModelError):
        load_model(reference, base=tmp_path)


def test_an_unknown_hub_id_says_what_was_tried_where_the_hub_client_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError) as caught:
        load_model("Qwen/Qwen3-8C", base=tmp_path)
    message = str(caught.value)
    assert "did you mean 'Qwen/Qwen3-8B'?" in message
    assert f"there is no directory {tmp_path / 'Qwen/Qwen3-8C'}" in message
    assert "huggingface_hub is not installed" in message
    assert "download the model's config.json" in message


def fake_hub(**functions: Any) -> SimpleNamespace:
    constants = SimpleNamespace(HF_HUB_OFFLINE=True, ENDPOINT="http://127.0.0.1:9")
    return SimpleNamespace(constants=constants, **functions)


def test_a_hub_id_in_the_local_cache_is_read_without_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "cache", json.dumps(LLAMA))
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake_hub(try_to_load_from_cache=lambda *_: str(file)))
    model = load_model("someone/some-model", base=tmp_path)
    assert (model.name, model.config_path) == ("someone/some-model", None)


def test_a_hub_that_fails_is_an_error_for_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError("401 Client Error.\nlong text")

    hub = fake_hub(try_to_load_from_cache=lambda *_: None, hf_hub_download=refuse)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(ModelError, match=r"did not give its config\.json \(401 Client Error\)"):
        load_model("someone/some-model", base=tmp_path)


def test_a_hub_out_of_reach_is_given_up_before_its_client_repeats_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = fake_hub(try_to_load_from_cache=lambda *_: None)  # no hf_hub_download: calling it would be an AttributeError
    hub.constants.HF_HUB_OFFLINE = False
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(ModelError, match="Connection refused"):
        load_model("someone/some-model", base=tmp_path)
