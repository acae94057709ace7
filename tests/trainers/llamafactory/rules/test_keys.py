"""Which of LLaMA-Factory's training paths a configuration takes, and the keys of each path."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.reading.setups import MEGATRON, PLAIN, make_setup, with_lines
from topoplan.lint.check import check_setup
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.trainers.llamafactory.key_list import known_keys, megatron_settings, plain_keys
from topoplan.trainers.llamafactory.rules.keys import RENAMED, keys_of

TENSOR = with_lines(PLAIN, "tensor_model_parallel_size: 2")
BRIDGE = with_lines(TENSOR, "export_hf_on_finish: true")
ON = {"USE_MEGATRON_BRIDGE": "1"}


@pytest.mark.parametrize(
    ("text", "variables", "path"),
    [
        (BRIDGE, {}, "bridge"),
        (with_lines(PLAIN, "use_megatron_bridge: true"), {}, "bridge"),
        (TENSOR, ON, "bridge"),
        (TENSOR, {}, "mca"),
        (BRIDGE, {**ON, "USE_MCA": "1"}, "mca"),
        (BRIDGE, {"USE_MCA": "0", "USE_MEGATRON_BRIDGE": "0"}, "plain"),
        (MEGATRON, {}, "mca"),
        (PLAIN, {}, "plain"),
        ("fp8: true", {}, "plain"),
    ],
)
def test_the_variables_say_what_trains_and_else_the_keys(text: str, variables: dict[str, str], path: str) -> None:
    setup = make_setup(text, variables=variables)
    assert setup.training_path(setup.configurations[0]) == path


def test_the_path_decides_which_keys_there_are() -> None:
    for text, keys in ((PLAIN, plain_keys()), (MEGATRON, known_keys())):
        setup = make_setup(text)
        assert keys_of(setup, setup.configurations[0]) is keys
    assert {"moe_z_loss_coeff", "num_layers_in_first_pipeline_stage", "rotary_base"} <= megatron_settings().keys()


def test_an_old_name_leads_to_a_key_of_today() -> None:
    assert not RENAMED.keys() & (known_keys().keys() | plain_keys().keys())
    assert set(RENAMED.values()) <= plain_keys().keys()


@pytest.mark.parametrize(
    ("lines", "version", "severity"),
    [
        ("image_resolution: 262144", "", "note"),
        ("image_resolution: 262144", "0.9.1", ""),
        ("image_resolution: 262144", "0.9.4", "error"),
        ("quantization_bit: 4\nquantization_method: bitsandbytes\nupcast_layernorm: true", "", "note"),
        ("quantization_bit: 4\nquantization_method: bitsandbytes\nupcast_layernorm: true", "0.9.2", ""),
        ("task: mmlu_test\nlang: en\nn_shot: 5\nsave_dir: saves", "", ""),
        ("lang: en", "", "error"),
        ("template: own", "", "error"),
    ],
)
def test_what_other_versions_and_commands_have(lines: str, version: str, severity: str) -> None:
    setup = make_setup(with_lines(PLAIN, lines))
    setup = replace(setup, versions={"llamafactory": version} if version else {})
    assert {one.severity for one in check_setup(setup, PredictionTarget()).findings} == (
        {severity} if severity else set()
    )


def test_a_checkout_of_ones_own_may_have_templates_of_its_own(tmp_path: Path) -> None:
    source = tmp_path / "src" / "llamafactory" / "data" / "template.py"
    source.parent.mkdir(parents=True)
    source.write_text('register_template(\n    name="own",\n)\n')
    setup = make_setup(with_lines(PLAIN, "template: own"), name=str(tmp_path / "examples" / "train.yaml"))
    assert check_setup(setup, PredictionTarget()).findings == ()
