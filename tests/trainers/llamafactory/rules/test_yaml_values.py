from __future__ import annotations

from dataclasses import replace

import pytest

from tests.reading.setups import PLAIN, fixed, make_command, make_setup, only, rules, with_lines
from topoplan.lint.rules.yaml import findings as broken_lines
from topoplan.trainers.llamafactory.rules.yaml_values import findings


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("eval_strategy: no", 'eval_strategy: "no"'),
        ("save_strategy: off  # none", 'save_strategy: "no"  # none'),
        ("evaluation_strategy: No", 'eval_strategy: "no"'),
        ("report_to: no", "report_to: none"),
        ("template: yes", 'template: "yes"'),
    ],
)
def test_a_bare_word_that_becomes_a_boolean_is_quoted(text: str, line: str) -> None:
    finding = only(findings, make_setup(f"{text}\nbf16: true\n"), "yaml-boolean-word")
    assert finding.severity == "error"
    assert finding.line == 1
    assert fixed(finding) == f"{line}\nbf16: true\n"


@pytest.mark.parametrize(
    ("text", "severity", "line"),
    [
        ("packing: 'false'", "error", "packing: false"),
        ('packing: "no"', "error", "packing: false"),
        ("bf16: 'true'", "warning", "bf16: true"),
        ("streaming: n", "error", "streaming: false"),
    ],
)
def test_text_for_a_switch_counts_as_true(text: str, severity: str, line: str) -> None:
    finding = only(findings, make_setup(text + "\n"), "yaml-quoted-boolean")
    assert finding.severity == severity
    assert "text" in finding.what
    assert fixed(finding) == line + "\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('learning_rate: "2e-5"', "learning_rate: 2.0e-05"),
        ("cutoff_len: '4096'", "cutoff_len: 4096"),
        ("max_samples: '1_000'", "max_samples: 1000"),
    ],
)
def test_a_number_in_quotes_is_text(text: str, line: str) -> None:
    finding = only(findings, make_setup(text + "\n"), "yaml-quoted-number")
    assert fixed(finding) == line + "\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("resume_from_checkpoint: None", "resume_from_checkpoint: null"),
        ("max_samples: 'null'", "max_samples: null"),
        ('tensor_model_parallel_size: 2\nrecompute_granularity: "null"', "recompute_granularity: null"),
        ("report_to: None", "report_to: none"),
    ],
)
def test_a_word_for_nothing_is_text_all_the_same(text: str, line: str) -> None:
    finding = only(findings, make_setup(text + "\n"), "yaml-null-text")
    assert fixed(finding).splitlines()[-1] == line


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("${HOME}/images", "stays as it stands"),
        ("${oc.env:HOME}/images", "stays as it stands"),
        ("'${HOME'", "without its end"),
        ("'${}'", "without its end"),
    ],
)
def test_a_variable_is_never_filled_in(value: str, said: str) -> None:
    finding = only(findings, make_setup(f"media_dir: {value}\n"), "yaml-interpolation")
    assert said in finding.what


def test_a_secret_is_never_quoted() -> None:
    assert rules(findings, make_setup("hf_hub_token: ${TOKEN}\n")) == []


@pytest.mark.parametrize(
    "text",
    [
        "eval_strategy: 'no'",
        "packing: no",  # the boolean that it looks like
        "bf16: yes",
        "learning_rate: 2e-5",  # a number for OmegaConf
        "max_samples: null",
        "report_to: none",
        "no_such_key: no",
        "dataset: a,b",
        "lr_scheduler_kwargs: {min_lr: 1e-6}",
        "output_dir: $HOME/saves",
    ],
)
def test_what_is_read_as_it_is_meant_gives_nothing(text: str) -> None:
    assert rules(findings, make_setup(text + "\n")) == []


def test_a_command_is_no_yaml() -> None:
    assert rules(findings, make_command({"eval_strategy": "no", "packing": "false"}, "llamafactory")) == []


@pytest.mark.parametrize(("label", "severity"), [("", "error"), ("yaml block 1", "note")])
def test_a_configuration_whose_line_breaks_were_lost_is_told(label: str, severity: str) -> None:
    setup = make_setup("stage: sft\nbf16: true\n")
    (configuration,) = setup.configurations
    part = replace(configuration.part, unfolded=True, label=label, lines=(9, 9))
    folded = replace(setup, configurations=(replace(configuration, part=part),))
    finding = only(broken_lines, folded, "yaml-lost-line-breaks")
    assert finding.severity == severity
    assert finding.place == "train.yaml:9"
    assert finding.what.startswith("2 keys stand on one line")
    assert not rules(findings, setup)


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("output_dir: \N{LEFT DOUBLE QUOTATION MARK}b c\N{RIGHT DOUBLE QUOTATION MARK}", 'output_dir: "b c"'),
        ("output_dir: \N{LEFT SINGLE QUOTATION MARK}b\N{RIGHT SINGLE QUOTATION MARK}  # why", "output_dir: b  # why"),
        ("dataset: b\N{FULLWIDTH COMMA}c", 'dataset: "b,c"'),
        ("dataset: b \N{IDEOGRAPHIC COMMA} c", 'dataset: "b,c"'),
    ],
)
def test_quotes_and_commas_of_print_are_no_syntax(line: str, typed: str) -> None:
    name = line.partition(":")[0]
    finding = only(findings, make_setup(with_lines(PLAIN, line)), "yaml-typographic")
    assert finding.severity == "error"
    assert fixed(finding) == with_lines(PLAIN, typed)
    text = f"{name}_of_mine: \N{LEFT DOUBLE QUOTATION MARK}b\N{RIGHT DOUBLE QUOTATION MARK} c\N{FULLWIDTH COMMA}"
    assert "yaml-typographic" not in rules(findings, make_setup(with_lines(PLAIN, text)))
