from __future__ import annotations

import pytest

from tests.reading.setups import make_setup, only, rules
from topoplan.trainers.trinity.rules import findings

GUIDE = """model:
  model_path: ${oc.env:MODEL_PATH,Qwen/Qwen3-0.6B}
  max_prompt_tokens: 2048
  max_model_len: ${oc.env:MAX_MODEL_LEN,4096}
  rope_scaling:
    rope_type: yarn
    factor: ${oc.decode:${oc.env:FACTOR}}
    original_max_position_embeddings: 40960
"""


def long(length: int, factor: str, original: int = 32768, path: str = "Qwen/Qwen3-8B") -> str:
    return (
        f"model:\n  model_path: {path}\n  max_model_len: {length}\n  rope_scaling:\n    rope_type: yarn\n"
        f"    factor: {factor}\n    original_max_position_embeddings: {original}\n"
    )


def test_the_guide_takes_the_number_of_config_json_for_that_of_the_model_card() -> None:
    finding = only(findings, make_setup(GUIDE, "trinity"), "trinity-rope-original")
    assert (finding.severity, finding.line) == ("note", 8)
    assert rules(findings, make_setup(GUIDE, "trinity")) == ["trinity-rope-original"]


def test_what_a_script_exports_is_filled_in() -> None:
    exported = {"FACTOR": "0.5", "MODEL_PATH": "/models/of-my-own", "MAX_MODEL_LEN": "20480"}
    setup = make_setup(GUIDE, "trinity", variables=exported)
    assert rules(findings, setup) == ["trinity-rope-factor"]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (long(20480, "0.5"), "trinity-rope-factor"),
        (long(131072, "2.0"), "trinity-rope-too-short"),
        (long(16384, "4.0"), "trinity-rope-not-needed"),
        (long(131072, "3.2", 40960), "trinity-rope-original"),
    ],
)
def test_a_mistake_is_found_and_nothing_else(text: str, rule: str) -> None:
    assert rules(findings, make_setup(text, "trinity")) == [rule]


@pytest.mark.parametrize(
    "text",
    [
        long(131072, "4.0"),
        long(131072, "3.2", 40960, "/models/of-my-own"),
        "model:\n  model_path: Qwen/Qwen3-8B\n",
        "model:\n  rope_scaling: null\n",
        "trainer:\n  ulysses_sequence_parallel_size: 3\n",
    ],
)
def test_what_is_right_or_not_known_gives_nothing(text: str) -> None:
    assert rules(findings, make_setup(text, "trinity")) == []


@pytest.mark.parametrize(("size", "wrong"), [(1, False), (2, False), (8, False), (16, False), (3, True), (64, True)])
def test_sequence_parallel_ranks_divide_the_heads(size: int, wrong: bool) -> None:
    text = f"model:\n  model_path: Qwen/Qwen3-8B\ntrainer:\n  inner:\n    ulysses_sequence_parallel_size: {size}\n"
    found = rules(findings, make_setup(text, "trinity"))
    assert found == (["trinity-sequence-parallel"] if wrong else [])
