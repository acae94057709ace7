"""Known faults of packages, found in other people's files."""

from __future__ import annotations

import pytest

from tests.reading.setups import MEGATRON, fixed, make_setup, rules_of, setup_of, with_lines
from topoplan.reading.finding import Finding
from topoplan.trainers.llamafactory.rules.mca_faults import findings

SAVES = with_lines(MEGATRON, "use_distributed_optimizer: true")
INTERLEAVED = with_lines(
    MEGATRON,
    "pipeline_model_parallel_size: 2\nvirtual_pipeline_model_parallel_size: 2\ngradient_accumulation_steps: 8",
)
OVERLAPPED = with_lines(SAVES, "overlap_grad_reduce: true\noverlap_param_gather: true")


def found(text: str, rule: str) -> Finding | None:
    return next((one for one in findings(make_setup(text)) if one.rule == rule), None)


@pytest.mark.parametrize(
    ("text", "rule", "severity", "key"),
    [
        (SAVES, "fault-checkpoint-plan", "warning", "use_distributed_optimizer"),
        (INTERLEAVED, "fault-interleaving-frees-early", "warning", "virtual_pipeline_model_parallel_size"),
        (
            with_lines(INTERLEAVED, "overlap_p2p_comm: false"),
            "fault-interleaving-batched-sends",
            "error",
            "overlap_p2p_comm",
        ),
        (
            with_lines(INTERLEAVED, "additional_configs:\n  overlap_p2p_comm: false"),
            "fault-interleaving-batched-sends",
            "error",
            "additional_configs",
        ),
        (with_lines(OVERLAPPED, 'save_strategy: "no"'), "fault-stale-final-weights", "error", "save_strategy"),
    ],
)
def test_it_stands_at_the_key_that_brings_it_about(text: str, rule: str, severity: str, key: str) -> None:
    finding = found(text, rule)
    assert finding is not None
    assert finding.severity == severity
    assert text.splitlines()[(finding.line or 0) - 1].startswith(f"{key}:")
    assert finding.remedy
    assert finding.why


def test_the_correction_takes_it_away() -> None:
    for text, rule in (
        (with_lines(INTERLEAVED, "overlap_p2p_comm: false"), "fault-interleaving-batched-sends"),
        (with_lines(OVERLAPPED, 'save_strategy: "no"'), "fault-stale-final-weights"),
    ):
        finding = found(text, rule)
        assert finding is not None
        assert found(fixed(finding), rule) is None


def test_what_meets_none_is_left_alone() -> None:
    plain = with_lines(MEGATRON, "use_distributed_optimizer: false")
    assert rules_of(findings, make_setup(plain)) == {}
    assert rules_of(findings, make_setup(with_lines(plain, 'save_strategy: "no"\noverlap_p2p_comm: false'))) == {}


@pytest.mark.parametrize(
    ("install", "severity"),
    [
        ("pip install torch==2.13.0", "error"),
        ("pip3 install --quiet \\\n  'torch==2.12.1' transformers", "error"),
        ("uv pip install torch==2.11.0 # tried", None),
        ("python -m pip install torch==2.11.*", None),
        ("pip install torch", "warning"),
        ("pip install 'torch>=2.4'", "warning"),
        ("pip install -r requirements.txt", "warning"),
    ],
)
def test_the_version_that_is_installed_beside_it_decides(install: str, severity: str | None) -> None:
    setup = setup_of(f"{install}\nUSE_MCA=1 llamafactory-cli train a.yaml\n", a_yaml=SAVES)
    told = [one for one in findings(setup) if one.rule == "fault-checkpoint-plan"]
    assert [one.severity for one in told] == ([severity] if severity else [])
    if severity == "error":
        assert told[0].line == 1
        assert "is installed" in told[0].what
