import pytest

from topoplan.cli.options import SpecOptions, variations
from topoplan.cli.output import stdout_console
from topoplan.errors import InputError


def test_a_change_takes_the_place_of_what_options_say_of_the_same_key() -> None:
    said = SpecOptions(nodes="2", pin=["tp=4,pp=1"], overrides=["job.seq_len=4k", "gpu.memory=40GB"])
    changed = said.with_sets(["nodes=8", "seq_len=8k", "pin.tp=2", "gpu=h100"])
    assert (changed.nodes, changed.pin) == ("8", ["pp=1"])
    assert changed.overrides == ["seq_len=8k", "pin.tp=2", "gpu=h100"]
    with_options = said.with_sets(["seq_len=8k", "pin.tp=2"], as_options=True)
    assert (with_options.seq_len, with_options.pin, with_options.overrides) == (
        "8k",
        ["pp=1", "tp=2"],
        ["gpu.memory=40GB"],
    )


def test_a_number_of_nodes_given_with_set_is_not_assumed() -> None:
    words = {"gpu": "h100", "model": "Qwen/Qwen3-8B", "seq_len": "4096", "batch": "64", "finetuning": "full"}
    said = SpecOptions(**words, overrides=["nodes=2"])
    assert said.assumed(None) == []
    assert said.read(None).cluster.nodes == 2
    assert said.read(None, "nodes=4").cluster.nodes == 4
    assert SpecOptions(**words).assumed(None) == ["assumed: 1 node (--nodes)"]


def test_one_value_is_one_combination() -> None:
    assert variations(["nodes=8", "ib_bandwidth = 200Gb/s"], most=9) == [("nodes=8", "ib_bandwidth=200Gb/s")]


def test_values_are_combined_with_the_last_key_the_fastest() -> None:
    assert variations(["nodes=1,2", "seq_len=3, 4"], most=4) == [
        ("nodes=1", "seq_len=3"),
        ("nodes=1", "seq_len=4"),
        ("nodes=2", "seq_len=3"),
        ("nodes=2", "seq_len=4"),
    ]


def test_a_value_that_is_given_twice_is_tried_once() -> None:
    assert variations(["nodes=4,4,2"], most=9) == [("nodes=4",), ("nodes=2",)]


@pytest.mark.parametrize("text", ['dataset="a,b"', "hosts=[a, b]", "fabric={kind: roce, rails: 8}"])
def test_quotes_and_brackets_hold_a_value_together(text: str) -> None:
    assert variations([text], most=9) == [(text,)]


@pytest.mark.parametrize(
    "overrides", [None, [], ["nodes="], ["nodes=1,"], ["a=1", "a=2"], ["a=1", "job.a=2"], ["a=1,2,3", "b=1,2,3,4"]]
)
def test_what_cannot_be_tried_is_refused(overrides: list[str] | None) -> None:
    with pytest.raises(InputError):
        variations(overrides, most=9)


@pytest.mark.parametrize(("columns", "width"), [("72", 72), ("", 100), ("wide", 100), ("9999", 140)])
def test_columns_count_when_piped(monkeypatch: pytest.MonkeyPatch, columns: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert stdout_console().width == width
