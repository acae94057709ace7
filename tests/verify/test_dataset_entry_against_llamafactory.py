"""Read the entry of dataset_info.json that a bundle's README shows with LLaMA-Factory."""

from pathlib import Path
from typing import Any

import pytest

from tests.bundle.samples import QWEN3_8B, QWEN3_VL_8B, make_spec_and_plan
from tests.verify.llamafactory import need_llamafactory
from topoplan.trainers.llamafactory.common import dataset_entry

pytestmark = pytest.mark.verify


def aligned(folder: Path, **what: Any) -> dict[str, Any]:
    """Return the record as LLaMA-Factory's processors receive it."""
    need_llamafactory()
    import json

    from llamafactory.data.converter import get_dataset_converter
    from llamafactory.data.parser import get_dataset_list
    from llamafactory.hparams import DataArguments

    spec, _ = make_spec_and_plan(**what)
    info, records = dataset_entry(spec.job, spec.model)
    (folder / "dataset_info.json").write_text(info, encoding="utf-8")
    (folder / "path/to").mkdir(parents=True)
    (folder / "path/to/image.png").touch()
    (attributes,) = get_dataset_list(["identity"], str(folder))
    assert attributes.dataset_name == "identity.json"
    arguments = DataArguments(dataset="identity", dataset_dir=str(folder))
    converted: dict[str, Any] = get_dataset_converter(attributes.formatting, attributes, arguments)(
        json.loads(records)[0]
    )
    return converted


def test_a_chat_with_an_image(tmp_path: Path) -> None:
    seen = aligned(tmp_path, model=QWEN3_VL_8B)
    assert seen["_prompt"] == [{"role": "user", "content": "<image>A question?"}]
    assert seen["_response"] == [{"role": "assistant", "content": "The answer."}]
    assert seen["_images"] == [str(tmp_path / "path/to/image.png")]


def test_a_chat_without(tmp_path: Path) -> None:
    seen = aligned(tmp_path, model=QWEN3_8B)
    assert (len(seen["_prompt"]), len(seen["_response"]), seen["_images"]) == (1, 1, None)


def test_a_pair(tmp_path: Path) -> None:
    seen = aligned(tmp_path, model=QWEN3_8B, job={"stage": "dpo"})
    assert [turn["content"] for turn in seen["_response"]] == ["The better answer.", "The worse answer."]


def test_a_text(tmp_path: Path) -> None:
    seen = aligned(tmp_path, model=QWEN3_8B, job={"stage": "pt"})
    assert seen["_prompt"] == [{"role": "user", "content": "A whole document."}]
    assert seen["_response"] == []
