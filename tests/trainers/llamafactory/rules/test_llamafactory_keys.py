from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reading.setups import MEGATRON, PLAIN, fixed, make_command, make_setup, only, rules, with_lines
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Setup
from topoplan.trainers.llamafactory.rules.llamafactory_keys import key_findings


def findings(setup: Setup) -> Iterator[Finding]:
    return (finding for one in setup.of("llamafactory") for finding in key_findings(setup, one))


def test_a_renamed_key_gets_its_new_name_and_its_quotes() -> None:
    finding = only(findings, make_setup("evaluation_strategy: no # or steps\n"), "llamafactory-renamed-key")
    assert finding.severity == "error"
    assert fixed(finding) == 'eval_strategy: "no" # or steps\n'


def test_a_renamed_key_beside_the_new_one_is_dropped() -> None:
    text = "evaluation_strategy: steps\neval_strategy: epoch\n"
    assert fixed(only(findings, make_setup(text), "llamafactory-renamed-key")) == "eval_strategy: epoch\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("learnig_rate: 1.0e-4", "did you mean 'learning_rate'"),
        ("tensor_model_parallel_size: 2\nray_num_workers: 4", "not known with USE_MCA=1"),
        ("tensor_model_parallel_size: 2\nnum_layers_in_first_pipeline_stage: 8", "pipeline_model_parallel_layout"),
    ],
)
def test_an_unknown_key_is_refused_with_what_to_do(line: str, said: str) -> None:
    finding = only(findings, make_setup(line + "\n"), "llamafactory-unknown-key")
    assert finding.severity == "error"
    assert said in f"{finding.what} {finding.remedy}"


def test_a_megatron_key_without_megatron_says_so() -> None:
    setup = make_setup(with_lines(PLAIN, "tensor_model_parallel_size: 2"), variables={"USE_MCA": "0"})
    assert "Megatron path alone" in only(findings, setup, "llamafactory-unknown-key").what


def test_overwrite_output_dir_is_taken_without_megatron_alone() -> None:
    line = "overwrite_output_dir: true"
    assert rules(findings, make_setup(with_lines(PLAIN, line))) == []
    finding = only(findings, make_setup(with_lines(MEGATRON, line)), "llamafactory-removed-key")
    assert line not in fixed(finding)


@pytest.mark.parametrize("line", ["save_safetensors: true", "group_by_length: true", "no_cuda: false"])
def test_what_transformers_5_took_away_is_refused(line: str) -> None:
    assert rules(findings, make_setup(line + "\n")) == ["llamafactory-removed-key"]


@pytest.mark.parametrize("line", ["warmup_ratio: 0.03", "logging_dir: logs"])
def test_a_deprecated_key_is_a_note(line: str) -> None:
    assert only(findings, make_setup(line + "\n"), "llamafactory-deprecated-key").severity == "note"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("cutoff_len: four", "expected a whole number"),
        ("cutoff_len: 4.5", "expected a whole number"),
        ("stage: sfft", "did you mean 'sft'"),
        ("dataset: [a, b]", "expected a string"),
        ("bf16: maybe", "expected true or false"),
        ("cutoff_len: null", "expected a whole number"),
        ("save_total_limit: true", "expected a whole number"),
        ("tensor_model_parallel_size: 2\nrecompute_method: recompute", "expected one of uniform, block"),
    ],
)
def test_a_value_of_another_kind_says_what_was_expected(line: str, said: str) -> None:
    finding = only(findings, make_setup(line + "\n"), "llamafactory-wrong-value")
    assert said in finding.remedy


def test_a_key_of_a_newer_version_is_a_note_with_that_version() -> None:
    text = with_lines(PLAIN, "kt_cpu_activation: retain\nhyper_parallel_cp_size: 2")
    finding = only(findings, make_setup(text), "llamafactory-new-key")
    assert finding.severity == "note"
    assert finding.what.startswith("kt_cpu_activation, hyper_parallel_cp_size need LLaMA-Factory newer than 0.9.5")
    newer = only(findings, make_setup(with_lines(PLAIN, "ddp_static_graph: true")), "llamafactory-new-key")
    assert "needs transformers 5.6.0 or newer" in newer.what


def test_each_path_has_its_own_choices() -> None:
    line = "lr_scheduler_type: polynomial"
    assert rules(findings, make_setup(with_lines(PLAIN, line))) == []
    assert rules(findings, make_setup(with_lines(MEGATRON, line))) == ["llamafactory-wrong-value"]


def test_a_secret_is_found_and_never_shown() -> None:
    finding = only(findings, make_setup("hf_hub_token: hf_abcdef\n"), "llamafactory-secret")
    assert "hf_abcdef" not in repr((finding.what, finding.why, finding.remedy, finding.edits))
    assert rules(findings, make_setup("hub_token: null\n")) == []


@pytest.mark.parametrize("line", ["eval_strategy: no", "packing: 'false'", "learning_rate: '1e-4'", "dataset: ${a}"])
def test_what_yaml_made_of_it_is_told_once(line: str) -> None:
    assert rules(findings, make_setup(line + "\n")) == []


def test_the_text_of_a_command_is_taken_as_argparse_takes_it() -> None:
    arguments = {"bf16": "true", "cutoff_len": "4096", "eval_strategy": "no", "learning_rate": "1e-4", "do_train": True}
    assert rules(findings, make_command(arguments, "llamafactory")) == []
    assert rules(findings, make_command({"cutoff_len": "four"}, "llamafactory")) == ["llamafactory-wrong-value"]


@pytest.mark.parametrize("text", [PLAIN, MEGATRON])
def test_a_right_file_gives_nothing(text: str) -> None:
    assert rules(findings, make_setup(text)) == []
