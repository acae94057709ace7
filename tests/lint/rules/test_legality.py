"""Broken layout rules as findings at the key responsible."""

from typing import Any

import pytest

from tests.reading.setups import all_of, configuration, mca
from topoplan.engines.data_parallel.rules import SHARDED_RULES
from topoplan.engines.megatron.rules import RULES_OF_A_GIVEN_LAYOUT
from topoplan.lint.rules.legality import legality_findings
from topoplan.lint.translate import translate
from topoplan.reading.finding import Finding
from topoplan.specs.load import load_cluster
from topoplan.trainers.layout_keys import KEYS_OF_RULE, key_line
from topoplan.trainers.megatron_keys import PP, TP


def found(spec: str = "h100-4x8", **keys: Any) -> list[Finding]:
    one = mca(**keys)
    return list(legality_findings(translate(one, all_of(one), load_cluster(f"cluster_specs/{spec}.yaml"))))


def test_a_legal_layout_breaks_nothing() -> None:
    assert found(tensor_model_parallel_size=4) == []


def test_every_rule_of_a_given_layout_has_its_keys() -> None:
    assert {rule.name for rule in RULES_OF_A_GIVEN_LAYOUT + SHARDED_RULES} == set(KEYS_OF_RULE)


@pytest.mark.parametrize(
    ("keys", "rule", "line", "equation"),
    [
        ({"tensor_model_parallel_size": 3}, "layout-world-size", 1, "world size 32 % (tp 3 * pp 1 * cp 1) = 2"),
        ({"pipeline_model_parallel_size": 8}, "layout-pipeline-split", 5, "36 layers % (pp 8 * vpp 1) = 4"),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "layout-interleaving",
            6,
            "gradient_accumulation_steps 1 % pp 2 = 1 with vpp 2",
        ),
        ({"overlap_param_gather": True}, "layout-overlap", 5, "overlap_param_gather without distributed_optimizer"),
        (
            {"model_name_or_path": "Qwen/Qwen3-30B-A3B", "expert_model_parallel_size": 3},
            "layout-experts",
            5,
            "experts 128 % ep 3 = 2",
        ),
        (
            {"model_name_or_path": "Qwen/Qwen3-30B-A3B", "tensor_model_parallel_size": 4},
            "layout-sequence-parallel",
            1,
            "a mixture of experts with tp 4 and no sequence_parallel",
        ),
        (
            {"max_samples": 10, "dataset": "a"},
            "layout-batch",
            5,
            "samples 10 < micro_batch_size 8 * dp 32 = 256: no rank would get a full micro batch",
        ),
    ],
)
def test_a_broken_rule_is_an_error_at_its_key_with_its_equation(
    keys: dict[str, Any], rule: str, line: int, equation: str
) -> None:
    finding = next(one for one in found(**keys) if one.rule == rule)

    assert (finding.severity, finding.line, finding.what) == ("error", line, equation)
    assert finding.remedy


def test_one_wrong_key_gives_one_finding() -> None:
    # 3 divides neither the GPUs, nor the heads, the widths and the vocabulary
    assert [one.rule for one in found(tensor_model_parallel_size=3)] == ["layout-world-size"]


def test_two_wrong_keys_give_two() -> None:
    rules = [one.rule for one in found(tensor_model_parallel_size=3, pipeline_model_parallel_size=8)]

    assert rules == ["layout-world-size", "layout-pipeline-split"]


def test_tensor_parallel_over_the_network_is_a_warning_because_it_runs() -> None:
    (finding,) = found(tensor_model_parallel_size=16)

    assert (finding.rule, finding.severity) == ("layout-tp-in-nvlink-domain", "warning")
    assert finding.what == "tp 16 > NVLink domain of 8 GPUs"


def test_the_line_is_that_of_the_first_key_that_is_there() -> None:
    one = configuration(f"stage: sft\n{PP}: 2\n")
    assert key_line(one, (TP, PP)) == 2
    assert key_line(one, (TP,)) is None
