from __future__ import annotations

import pytest

from tests.reading.setups import FULL, MEGATRON, MOE, PLAIN, fixed, make_setup, only, rules, with_lines
from topoplan.trainers.llamafactory.rules.llamafactory import findings


@pytest.mark.parametrize("text", [PLAIN, FULL, MEGATRON, MOE, "tensor_model_parallel_size: 8\n"])
def test_right_files_and_a_few_lines_of_one_give_nothing(text: str) -> None:
    assert rules(findings, make_setup(text)) == []


@pytest.mark.parametrize(
    ("lines", "rule", "severity"),
    [
        ("fp16: true", "llamafactory-refused-together", "error"),
        ("learnig_rate: 1.0", "llamafactory-unknown-key", "error"),
        ("dataset: data/mine.json", "llamafactory-dataset-file", "error"),
        ("dataset: identity,./b.jsonl", "llamafactory-dataset-file", "error"),
        ("template: qwen_3", "llamafactory-unknown-template", "error"),
        ("template: llama3", "llamafactory-template-of-another-model", "warning"),
        ("cutoff_len: 65536", "llamafactory-too-long", "warning"),
        ("save_steps: 5", "llamafactory-frequent-saves", "warning"),
        ("val_size: 0.1", "llamafactory-evaluation-unused", "warning"),
        ("freeze_trainable_layers: 2", "llamafactory-ignored-key", "warning"),
        ("gradient_checkpointing: false", "llamafactory-gradient-checkpointing", "warning"),
        ("bf16: -", "llamafactory-no-mixed-precision", "warning"),
        ("model_name_or_path: -", "llamafactory-missing-key", "error"),
        ("dataset: -", "llamafactory-missing-key", "error"),
        ("output_dir: -", "llamafactory-missing-key", "note"),
        ("template: -", "llamafactory-missing-key", "note"),
        ("do_train: false", "llamafactory-nothing-to-do", "error"),
        ("do_train: -", "llamafactory-nothing-to-do", "error"),
    ],
)
def test_a_mistake_in_a_lora_job_is_found_and_nothing_else(lines: str, rule: str, severity: str) -> None:
    setup = make_setup(with_lines(PLAIN, lines))
    assert rules(findings, setup) == [rule]
    assert only(findings, setup, rule).severity == severity


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ("lora_rank: 8", "llamafactory-ignored-key"),
        ("learning_rate: 2.0e-4", "llamafactory-learning-rate"),
    ],
)
def test_a_mistake_in_a_full_job_is_found_and_nothing_else(lines: str, rule: str) -> None:
    assert rules(findings, make_setup(with_lines(FULL, lines))) == [rule]


@pytest.mark.parametrize(
    "lines",
    [
        "dataset: liucong/some-data\ndataset_dir: ONLINE",
        "cutoff_len: 65536\nrope_scaling: yarn",
        "save_steps: 5\nmax_steps: 20",
        "save_steps: 0.1",
        "val_size: 0.1\neval_strategy: steps",
        "gradient_checkpointing: true",
        "disable_gradient_checkpointing: true\ngradient_checkpointing: false",
        "template: qwen3_nothink",
        "template: default",
        "stage: pt\ntemplate: -",
        "bf16: -\nfp16: true",
        "bf16: -\ndeepspeed: ds.json",
        "do_train: -\ndo_eval: true\nval_size: 0.1",
        "model_name_or_path: /models/of-my-own\ntemplate: llama3",
    ],
)
def test_what_is_right_gives_nothing(lines: str) -> None:
    assert rules(findings, make_setup(with_lines(PLAIN, lines))) == []


def test_the_template_of_a_model_without_thoughts_is_named() -> None:
    text = with_lines(PLAIN, "model_name_or_path: Qwen/Qwen3-VL-8B-Instruct\ntemplate: qwen3_vl")
    finding = only(findings, make_setup(text), "llamafactory-template-of-another-model")
    assert "template: qwen3_vl_nothink\n" in fixed(finding)


def test_gradient_checkpointing_is_switched_off_by_its_own_key() -> None:
    setup = make_setup(with_lines(PLAIN, "gradient_checkpointing: false"))
    finding = only(findings, setup, "llamafactory-gradient-checkpointing")
    assert fixed(finding).endswith("disable_gradient_checkpointing: true\n")


def test_a_job_that_does_nothing_gets_its_switch() -> None:
    setup = make_setup(with_lines(PLAIN, "do_train: -"))
    assert "do_train: true\n" in fixed(only(findings, setup, "llamafactory-nothing-to-do"))


def test_megatron_trains_whatever_do_train_says() -> None:
    assert rules(findings, make_setup(with_lines(MEGATRON, "do_train: -\n"))) == []
    assert "llamafactory-nothing-to-do" in rules(findings, make_setup(with_lines(MEGATRON, "do_train: -\nstage: pt")))


@pytest.mark.parametrize(
    "text",
    [
        "model_name_or_path: Qwen/Qwen3-8B\ntemplate: qwen3\ninfer_backend: huggingface\n",
        "model_name_or_path: Qwen/Qwen3-8B\nadapter_name_or_path: a\ntemplate: qwen3\nexport_dir: b\n",
    ],
)
def test_files_for_chat_and_export_give_nothing(text: str) -> None:
    assert rules(findings, make_setup(text)) == []


def test_only_training_needs_a_precision() -> None:
    predicts = with_lines(PLAIN, "do_train: -\ndo_predict: true\nbf16: -\neval_dataset: identity\ndataset: -")
    assert "llamafactory-no-mixed-precision" not in rules(findings, make_setup(predicts))
    assert "llamafactory-no-mixed-precision" in rules(findings, make_setup(with_lines(PLAIN, "bf16: -")))
