"""No configuration makes a rule crash, and no edit makes a file unreadable."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.reading.setups import MEGATRON, MOE, PLAIN, make_setup, make_values, with_lines
from tests.samples import no_search
from tests.sizes import examples
from topoplan.lint.compare import predict_configuration
from topoplan.lint.prediction_target import PredictionTarget
from topoplan.lint.rules import deepspeed
from topoplan.reading.edits import applied
from topoplan.reading.setup import Setup, Trainer
from topoplan.specs.load import load_cluster
from topoplan.specs.source import parse_source
from topoplan.trainers.llamafactory import rules as llamafactory
from topoplan.trainers.llamafactory.key_list import known_keys, plain_keys
from topoplan.trainers.swift import rules as swift
from topoplan.trainers.trinity import rules as trinity

MODULES = (llamafactory, deepspeed, swift, trinity)
TRAINERS: tuple[Trainer, ...] = ("llamafactory", "swift", "swift-megatron", "deepspeed", "trinity")

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -1, 0, 1, 2, 3, 2**31]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["no", "Off", "null", "None", "full", "lora", "steps", "${a", "${a}", "auto", "yarn", "cpu", "4"]),
    st.sampled_from(["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-VL-8B-Instruct", "Et*9|tL", "core_attn, mlp"]),
)
NAMES = st.one_of(
    st.sampled_from(sorted(known_keys().keys() | plain_keys().keys())),
    st.sampled_from(["zero_optimization", "stage", "offload_optimizer", "device", "fp16", "bf16", "enabled", "model"]),
    st.sampled_from(["rope_scaling", "factor", "ulysses_sequence_parallel_size", "train_batch_size", "optimizer"]),
    st.text(min_size=1, max_size=8),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=8,
)
MEGATRON_NAMES = sorted(name for name, key in known_keys().items() if key.package == "mcore_adapter")


def check(setup: Setup) -> None:
    for module in MODULES:
        for finding in module.findings(setup):
            assert finding.what
            assert not finding.what.endswith(".")
            assert finding.what.isprintable()
            assert finding.remedy.isprintable()
            assert finding.line is None or finding.line >= 1


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@example({"reward_model_quantization_bit": ["\x1f"]}, "llamafactory")
@given(st.dictionaries(NAMES, VALUES, max_size=10), st.sampled_from(TRAINERS))
def test_values_of_any_kind_never_crash_a_rule(data: dict[str, Any], trainer: Trainer) -> None:
    check(make_values(data, trainer))


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.sampled_from(MEGATRON_NAMES), LEAVES, max_size=6), st.sampled_from([MEGATRON, MOE, PLAIN]))
def test_a_job_with_some_odd_values_never_crashes_a_rule(odd: dict[str, Any], text: str) -> None:
    check(make_values({**parse_source(text, name="a").data, **odd}))


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(known_keys())), LEAVES, max_size=5))
def test_every_edit_leaves_a_file_that_can_be_read(odd: dict[str, Any]) -> None:
    lines = "\n".join(f"{key}: {json.dumps(value)}" for key, value in odd.items() if _is_plain(value))
    setup = make_setup(with_lines(MEGATRON, lines))
    text = setup.parts[0].text
    for module in MODULES:
        for finding in module.findings(setup):
            for edit in finding.edits:
                parse_source(applied(text, [edit]), name="fixed")


TRAINING_NAMES = [
    *("finetuning_type", "deepspeed", "fsdp", "fsdp_config", "optim", "quantization_bit", "lora_target", "lora_rank"),
    *("stage", "packing", "cutoff_len", "per_device_train_batch_size", "gradient_accumulation_steps", "fp16", "fp8"),
    *("freeze_trainable_layers", "image_max_pixels", "pure_bf16", "disable_gradient_checkpointing", "use_galore"),
]
SWIFT_NAMES = [
    *("tuner_type", "train_type", "max_length", "deepspeed", "fsdp", "optim", "torch_dtype", "quant_bits", "fp16"),
    *("target_modules", "sequence_parallel_size", "gradient_accumulation_steps", "packing", "freeze_parameters"),
]
ZERO_NAMES = ["stage", "offload_optimizer", "offload_param", "device", "ratio", "autotp_size", "zero_optimization"]


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.one_of(
        st.tuples(st.just("llamafactory"), st.dictionaries(st.sampled_from(TRAINING_NAMES), VALUES, max_size=4)),
        st.tuples(st.just("swift"), st.dictionaries(st.sampled_from(SWIFT_NAMES), VALUES, max_size=4)),
        st.tuples(
            st.just("deepspeed"),
            st.fixed_dictionaries(
                {"zero_optimization": st.one_of(VALUES, st.dictionaries(st.sampled_from(ZERO_NAMES), VALUES))},
                optional={"train_batch_size": LEAVES, "gradient_accumulation_steps": LEAVES, "fp16": VALUES},
            ),
        ),
    )
)
def test_a_prediction_of_odd_values_ends_calmly(odd: tuple[Trainer, dict[str, Any]]) -> None:
    trainer, values = odd
    base = {"llamafactory": {"model_name_or_path": "Qwen/Qwen3-8B", "bf16": True}, "swift": {"model": "Qwen/Qwen3-8B"}}
    setup = make_values(base.get(trainer, {}) | values, trainer)
    predict_configuration(
        setup.configurations[0], setup, PredictionTarget(cluster=A100S, search=no_search, model="Qwen/Qwen3-8B")
    )


A100S = load_cluster("cluster_specs/a100-1x8.yaml")


def _is_plain(value: Any) -> bool:
    return not isinstance(value, float | str) and (not isinstance(value, int) or abs(value) < 10**9)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_empty_configuration_gives_nothing(trainer: Trainer) -> None:
    setup = make_values({}, trainer)
    assert [finding.rule for module in MODULES for finding in module.findings(setup)] == []
