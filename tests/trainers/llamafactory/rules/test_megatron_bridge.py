"""What is said of files that LLaMA-Factory trains with Megatron Bridge."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bundle.samples import CLUSTER
from tests.reading.setups import MEGATRON, PLAIN, make_setup, only, rules, rules_of, setup_of, with_lines
from topoplan.lint.check import Against, check_setup
from topoplan.lint.rules import launch_megatron
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Setup
from topoplan.trainers.llamafactory.rules import llamafactory, mca

BRIDGE = with_lines(
    PLAIN,
    "tensor_model_parallel_size: 2\ncontext_parallel_size: 2\nsequence_parallel: true\nlora_target: all\n"
    "mixed_precision: bf16_mixed\nexport_hf_on_finish: true",
)
"""A job of Megatron Bridge with nothing wrong."""

ON = {"USE_MEGATRON_BRIDGE": "1"}

REFUSED = {
    "stage: dpo": "stage",
    "finetuning_type: freeze": "finetuning_type",
    "quantization_bit: 4": "quantization_bit",
    "deepspeed: z.json": "deepspeed",
    "use_hyper_parallel: true": "use_hyper_parallel",
    "pipeline_model_parallel_size: 0": "pipeline_model_parallel_size",
    "tensor_model_parallel_size: 1": "sequence_parallel",
}
"""Lines that the parser stops at in BRIDGE, and the key that is named."""


def findings(setup: Setup) -> Iterator[Finding]:
    return (one for module in (llamafactory, mca) for one in module.findings(setup))


@pytest.mark.parametrize(
    ("text", "variables", "path"),
    [
        (BRIDGE, {}, "bridge"),
        (with_lines(PLAIN, "use_megatron_bridge: true"), {}, "bridge"),
        (with_lines(PLAIN, "tensor_model_parallel_size: 2"), ON, "bridge"),
        (with_lines(PLAIN, "tensor_model_parallel_size: 2"), {}, "mca"),
        (BRIDGE, {**ON, "USE_MCA": "1"}, "mca"),
        (BRIDGE, {"USE_MCA": "0", "USE_MEGATRON_BRIDGE": "0"}, "plain"),
        (MEGATRON, {}, "mca"),
        (PLAIN, {}, "plain"),
    ],
)
def test_the_variables_say_what_trains_and_else_the_keys(text: str, variables: dict[str, str], path: str) -> None:
    setup = make_setup(text, variables=variables)
    assert setup.path_of(setup.configurations[0]) == path


def test_nothing_that_holds_for_the_adapter_alone_is_said_of_it() -> None:
    found = rules_of(findings, make_setup(BRIDGE, variables=ON))
    assert found.keys() == {"llamafactory-new-key", "bridge-not-judged"}
    assert {one.severity for one in found.values()} == {"note"}
    assert found["llamafactory-new-key"].what.endswith("need LLaMA-Factory newer than 0.9.5 (main of August 2026)")


def test_no_number_is_given_for_it() -> None:
    setup = setup_of("USE_MEGATRON_BRIDGE=1 llamafactory-cli train a.yaml", a_yaml=BRIDGE)
    checked = check_setup(setup, Against(cluster=CLUSTER))
    (finding,) = [one for one in checked.findings if one.rule == "not-predicted"]
    assert "Megatron Bridge is not predicted" in finding.what
    assert not [one for one in checked.findings if one.severity != "note"]


@pytest.mark.parametrize("line", REFUSED)
def test_what_its_parser_stops_at_is_an_error(line: str) -> None:
    found = [one for one in findings(make_setup(with_lines(BRIDGE, line), variables=ON)) if one.severity == "error"]
    assert [one.part.text.splitlines()[(one.line or 1) - 1].partition(":")[0] for one in found] == [REFUSED[line]]


@pytest.mark.parametrize(("processes", "refused"), [(8, False), (4, False), (6, True), (2, True)])
def test_its_sizes_have_to_divide_the_processes(processes: int, refused: bool) -> None:
    text = f"export USE_MEGATRON_BRIDGE=1\ntorchrun --nproc_per_node {processes} -m llamafactory.launcher a.yaml"
    setup = setup_of(text, a_yaml=BRIDGE)
    said = [one.what for one in findings(setup) if one.rule == "llamafactory-refused-together"]
    equation = "tensor 2 * pipeline 1 * context 2 * expert 1 = 4 does not divide"
    assert said == [f"{equation} the {processes} processes of the launch"] * refused


def test_the_models_that_it_takes_are_fewer_than_the_adapters() -> None:
    text = with_lines(BRIDGE, "model_name_or_path: Qwen/Qwen3-VL-8B-Instruct\ntemplate: qwen3_vl")
    assert only(findings, make_setup(text, variables=ON), "bridge-model-type").severity == "error"


def test_the_targets_of_lora_are_its_own() -> None:
    text = with_lines(BRIDGE, "lora_target: q_proj,v_proj")
    assert only(findings, make_setup(text, variables=ON), "bridge-lora-target").severity == "warning"
    full = with_lines(text, "finetuning_type: full")
    assert "bridge-lora-target" not in rules(findings, make_setup(full, variables=ON))


def test_the_key_alone_does_nothing_and_with_the_adapter_is_refused() -> None:
    asked = with_lines(PLAIN, "use_megatron_bridge: true")
    assert only(findings, make_setup(asked, variables={"USE_MEGATRON_BRIDGE": "0"}), "bridge-not-asked-for")
    both = make_setup(with_lines(MEGATRON, "use_megatron_bridge: true"), variables={"USE_MCA": "1"})
    assert "exclude each other" in only(findings, both, "llamafactory-refused-together").what


def test_its_keys_need_its_variable() -> None:
    setup = setup_of("llamafactory-cli train a.yaml", a_yaml=BRIDGE)
    finding = only(launch_megatron.findings, setup, "launch-missing-use-megatron-bridge")
    assert finding.severity == "error"
    assert rules(launch_megatron.findings, setup_of("USE_MEGATRON_BRIDGE=1 lmf train a.yaml", a_yaml=BRIDGE)) == []
    refused = make_setup(BRIDGE, variables={"USE_MEGATRON_BRIDGE": "0", "USE_MCA": "0"})
    (finding,) = [one for one in findings(refused) if "export_hf_on_finish" in one.what]
    assert "is known to Megatron Bridge alone, and without USE_MEGATRON_BRIDGE=1 the file is refused" in finding.what
