from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoplan.errors import SpecError
from topoplan.specs import dataset
from topoplan.specs.dataset import BYTES_PER_TOKEN, TOKENS_PER_MESSAGE, read_dataset, why_unread
from topoplan.specs.json_source import json_records
from topoplan.specs.lengths import Lengths

TEN = "x" * 43
"""A text of ten tokens."""


def one(*records: dict[str, Any], tmp_path: Path, stage: str = "sft", **keys: Any) -> Lengths:
    (tmp_path / "set.json").write_text(json.dumps(list(records)))
    found = read_dataset("set.json", tmp_path / "data", base=tmp_path, stage=stage, **keys)
    assert found is not None
    return found


def test_ten_tokens_are_ten() -> None:
    assert len(TEN) / BYTES_PER_TOKEN == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"instruction": TEN, "input": "", "output": ""}, 2),
        ({"instruction": "", "input": TEN, "output": ""}, 2),
        ({"prompt": "", "response": TEN}, 2),
        ({"instruction": "", "output": "", "history": [["", TEN[:-1]]]}, 4),
        ({"instruction": "", "output": "", "system": TEN[:-2]}, 3),
        ({"conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": TEN}]}, 2),
        ({"messages": [{"role": "user", "content": TEN}, {"role": "assistant", "content": ""}]}, 2),
    ],
)
def test_every_format_counts_its_text_and_its_template(record: dict[str, Any], messages: int, tmp_path: Path) -> None:
    lengths = one(record, tmp_path=tmp_path)
    assert lengths.samples == 1
    # Line breaks between messages may add a token.
    assert lengths.longest - messages * TOKENS_PER_MESSAGE in (10, 11)


def test_pretraining_text_gets_an_end_and_no_template(tmp_path: Path) -> None:
    assert one({"text": TEN}, tmp_path=tmp_path, stage="pt").counts == ((11, 1),)


def test_a_preference_pair_is_one_sample_and_two_sequences(tmp_path: Path) -> None:
    pair = {"instruction": "", "chosen": TEN, "rejected": TEN * 3}
    talk = {"conversations": [{"value": ""}], "chosen": {"value": TEN}, "rejected": {"value": TEN * 3}}
    for record in (pair, talk):
        lengths = one(record, tmp_path=tmp_path, stage="dpo")
        assert (lengths.samples, lengths.sequences) == (1, 2)
        assert lengths.longest - lengths.counts[0][0] == 20


def test_samples_that_the_trainer_drops_do_not_count(tmp_path: Path) -> None:
    lengths = one({"instruction": "a", "output": "b"}, {"instruction": "a", "output": None}, tmp_path=tmp_path)
    assert lengths.samples == 1
    with pytest.raises(SpecError, match="has no sample that stage sft takes"):
        one({"instruction": "a"}, tmp_path=tmp_path)


def test_text_counts_by_its_utf8_bytes(tmp_path: Path) -> None:
    chinese, english = (one({"text": text}, tmp_path=tmp_path, stage="pt").longest for text in ("学" * 43, "x" * 43))
    assert chinese - 1 == 3 * (english - 1)


def info(tmp_path: Path, **entries: Any) -> None:
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(entries))


def test_dataset_info_says_file_columns_and_tags(tmp_path: Path) -> None:
    info(
        tmp_path,
        talks={
            "file_name": "talks.jsonl",
            "formatting": "sharegpt",
            "columns": {"messages": "turns"},
            "tags": {"role_tag": "who", "content_tag": "says"},
        },
        plain={"file_name": "plain.json", "columns": {"prompt": "q", "response": "a"}},
    )
    talk = {"turns": [{"who": "user", "says": TEN}, {"who": "gpt", "says": ""}], "text": TEN * 50}
    (tmp_path / "data" / "talks.jsonl").write_text(json.dumps(talk) + "\n")
    (tmp_path / "data" / "plain.json").write_text(json.dumps([{"q": TEN, "a": ""}, {"q": TEN, "a": TEN}]))
    found = read_dataset("talks, plain", tmp_path / "data", base=tmp_path, stage="sft")
    assert (found.samples, found.source, found.counts) == (3, "talks.jsonl, plain.json", ((21, 2), (31, 1)))


def test_num_samples_and_max_samples_bound_the_epoch(tmp_path: Path) -> None:
    records = [{"instruction": "a", "output": "b"}] * 5
    assert one(*records, tmp_path=tmp_path, max_samples=3).samples == 3
    info(tmp_path, some={"file_name": "../set.json", "num_samples": 40})
    found = read_dataset("some", tmp_path / "data", base=tmp_path, stage="sft")
    assert found.samples == 40


@pytest.mark.parametrize(
    "entry",
    [
        {"hf_hub_url": "a/b"},
        {"hf_hub_url": "a/b", "file_name": "set.json"},
        {"file_name": "nowhere.json"},
        {"file_name": "set.parquet"},
        {"script_url": "x"},
    ],
)
def test_what_is_not_here_is_not_read(entry: dict[str, Any], tmp_path: Path) -> None:
    info(tmp_path, far=entry)
    (tmp_path / "data" / "set.parquet").write_text("x")
    (tmp_path / "data" / "set.json").write_text("broken")
    for names in ("far", "org/name", "not_listed"):
        assert read_dataset(names, tmp_path / "data", base=tmp_path, stage="sft") is None
    assert read_dataset("far", tmp_path / "elsewhere", base=tmp_path, stage="sft") is None


def test_data_with_images_is_left_alone(tmp_path: Path) -> None:
    record = {"messages": [{"content": "<image>"}, {"content": "a cat"}], "images": ["cat.png"]}
    (tmp_path / "set.json").write_text(json.dumps([record]))
    assert read_dataset("set.json", tmp_path / "data", base=tmp_path, stage="sft") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"foo": 1}]', "set.json:1: has no known column; it has foo"),
        ('[{"instruction": "a", "output": "b"},\n{"foo": 1}]', "set.json:2: has no known column; it has foo"),
        ("[]", "set.json: is empty"),
        ('[{"instruction": "a", "output": "b"},\n{"instruction', "set.json:2: is not JSON"),
    ],
)
def test_what_is_no_data_set_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text(text)
    with pytest.raises(SpecError) as caught:
        read_dataset("set.json", tmp_path / "data", base=tmp_path, stage="sft")
    assert message in str(caught.value)


def test_a_file_that_is_not_there_is_taken_for_one_on_the_nodes(tmp_path: Path) -> None:
    assert read_dataset("set.jsonl", tmp_path, base=tmp_path, stage="sft") is None
    (tmp_path / "near.json").write_text("[]")
    assert why_unread("nea.json", tmp_path, tmp_path).endswith("for a file on the nodes; did you mean 'near.json'?")
    assert why_unread("a/b,/data/set.jsonl", tmp_path, tmp_path).startswith("/data/set.jsonl is not on this machine")


def test_of_a_large_file_every_kth_record_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"text": TEN * (1 + n % 3)} for n in range(31)]
    everything = one(*records, tmp_path=tmp_path, stage="pt")
    monkeypatch.setattr(dataset, "BY_BYTES", replace(dataset.BY_BYTES, measured_bytes=1000))
    sampled = one(*records, tmp_path=tmp_path, stage="pt")
    assert sampled.stride == -(-(tmp_path / "set.json").stat().st_size // 1000) > 1
    assert sampled.samples == everything.samples == 31
    assert sampled == one(*records, tmp_path=tmp_path, stage="pt")


def test_a_file_is_read_once_and_again_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[Path] = []

    def records(path: Path, *, stride: int) -> Any:
        readings.append(path)
        return json_records(path, stride=stride)

    monkeypatch.setattr(dataset, "json_records", records)
    first = one({"text": TEN}, tmp_path=tmp_path, stage="pt")
    again = read_dataset("set.json", tmp_path / "data", base=tmp_path, stage="pt")
    assert (again, len(readings)) == (first, 1)
    changed = one({"text": TEN}, {"text": TEN}, tmp_path=tmp_path, stage="pt")
    assert (changed.samples, len(readings)) == (2, 2)


COLUMNS = ["instruction", "input", "output", "history", "messages", "conversations", "text", "chosen", "rejected"]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["value", "content"]), inner),
    max_leaves=5,
)


@given(st.lists(st.dictionaries(st.sampled_from(COLUMNS), ANYTHING), max_size=4), st.sampled_from(["pt", "sft", "dpo"]))
def test_whatever_the_columns_hold_there_are_lengths_or_one_message(records: list[dict[str, Any]], stage: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place, "set.json").write_text(json.dumps(records))
        with contextlib.suppress(SpecError):
            found = read_dataset("set.json", Path(place), base=Path(place), stage=stage)
            assert found.counts[0][0] > 0


class FakeTokenizer:
    """A tokenizer for which each word is a token."""

    @classmethod
    def from_file(cls, path: str) -> FakeTokenizer:
        if Path(path).read_text() != "{}":
            raise Exception("expected value")
        return cls()

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[SimpleNamespace]:
        assert not add_special_tokens
        return [SimpleNamespace(ids=text.split()) for text in texts]


def test_the_models_own_tokenizer_counts_where_its_package_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=FakeTokenizer))
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    record = {"instruction": "five words are in here", "output": "and three here"}
    counted = one(record, tmp_path=tmp_path, tokenizer=tokenizer)
    assert counted.counts == ((8 + 2 * TOKENS_PER_MESSAGE, 1),)
    assert (counted.error, counted.rule) == (0.0, "counted with the model's tokenizer")
    tokenizer.write_text("broken")
    with pytest.raises(SpecError, match=r"tokenizer\.json: is not a tokenizer: expected value"):
        one(record, tmp_path=tmp_path, tokenizer=tokenizer)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert one(record, tmp_path=tmp_path, tokenizer=tokenizer).error == dataset.BYTES_PER_TOKEN_ERROR
