"""Host memory needed for offloading."""

import pytest

from tests.reading.setups import all_of, configuration
from topoplan.lint.offload import offload_findings
from topoplan.lint.translate import translate
from topoplan.planner.predict import memory_of, plan_of
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Configuration
from topoplan.specs.load import load_cluster
from topoplan.trainers.case import case_of

PARAMETERS = 72_706_203_648
"""Parameters of Qwen2-72B."""
RECIPE = """\
model_name_or_path: Qwen/Qwen2-72B
stage: sft
finetuning_type: full
deepspeed: {deepspeed}
cutoff_len: 2560
per_device_train_batch_size: 4
fp16: true
"""
WITHOUT_PARAMETERS = '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}'


MEGATRON = """\
model: Qwen/Qwen2.5-72B-Instruct
load_safetensors: true
tensor_model_parallel_size: 8
micro_batch_size: 1
global_batch_size: 16
max_length: 4096
recompute_granularity: full
recompute_method: uniform
recompute_num_layers: 1
optimizer_cpu_offload: true
optimizer_offload_fraction: 1
"""


def told(deepspeed: str = "ds_z3_offload_config.json", **keys: str) -> list[Finding]:
    return told_of(configuration(RECIPE.format(deepspeed=deepspeed)), **keys)


def told_of(one: Configuration, **keys: str) -> list[Finding]:
    overrides = [f"{key}={value}" for key, value in keys.items()]
    cluster = load_cluster("cluster_specs/a100-1x8.yaml", overrides=overrides)
    translation = translate(one, all_of(one), cluster)
    case = case_of(translation.spec, translation.layout.backend)
    plan = plan_of(translation.spec, case, translation.layout, memory_of(case, translation.layout, all_stages=True))
    return list(offload_findings(translation, plan))


def needed_gb(finding: Finding) -> float:
    return float(finding.what.partition("(")[2].partition(" GB")[0].replace(",", ""))


def test_800_gb_are_too_little_for_all_of_a_72b_model_and_its_optimizer() -> None:
    (finding,) = told(host_memory="800GB")

    assert (finding.rule, finding.severity, finding.line) == ("layout-host-memory", "error", 4)
    # 12 bytes of optimizer, 2 of weight and at least 2 of gradient; 6 of gradient if all have fp32 gradients.
    assert 16 * PARAMETERS / 1e9 < needed_gb(finding) < 20.1 * PARAMETERS / 1e9
    assert "and it has 745 GiB (800 GB): Linux kills a process that asks for more (exit code -9)" in finding.what
    assert "582 GB of optimizer: Adam's moments (8 bytes x 72.71B)" in finding.why
    assert "145 GB of weights: trained (2 bytes x 72.71B)" in finding.why
    assert f"DeepSpeed's own estimate is 18 bytes per parameter ({18 * PARAMETERS / 2**30:,.0f} GiB)" in finding.why


def test_leaving_the_parameters_on_the_gpus_saves_their_two_bytes() -> None:
    (with_them,) = told(host_memory="100GB")
    (without,) = told(WITHOUT_PARAMETERS, host_memory="100GB")

    assert needed_gb(with_them) - needed_gb(without) == pytest.approx(2 * PARAMETERS / 1e9, rel=0.01)
    less_gib = needed_gb(without) * 1e9 / 2**30
    assert f"without offload_param it needs {less_gib:,.0f} GiB" in with_them.remedy
    assert "GB of weights" not in without.why
    assert "16 bytes per parameter" in without.why


def test_enough_memory_is_no_finding() -> None:
    assert told(host_memory="2TB") == []
    assert told("ds_z3_config.json") == []


def test_two_nodes_share_it_out() -> None:
    (one,), (two,) = told(host_memory="100GB"), told(host_memory="100GB", nodes="2", ib_bandwidth="200Gbit/s")

    assert needed_gb(two) == pytest.approx(needed_gb(one) / 2, rel=0.03)


def test_a_spec_that_does_not_say_it_is_told_what_is_needed() -> None:
    (finding,) = told()

    assert (finding.rule, finding.severity) == ("layout-host-memory", "warning")
    assert "of host memory on each node of 8 GPUs" in finding.what
    assert "--set host_memory" in finding.remedy


def test_megatrons_offloaded_optimizer_is_held_against_the_host_memory_too() -> None:
    one = configuration(MEGATRON, trainer="swift-megatron")
    (too_much,) = told_of(one, host_memory="500GiB")
    (not_said,) = told_of(one)

    assert (too_much.rule, too_much.severity, too_much.line) == ("layout-host-memory", "error", 11)
    # 16 bytes of state and 4 of fp32 gradients per parameter, all on one node
    assert needed_gb(too_much) == pytest.approx(20 * PARAMETERS / 1e9, rel=0.01)
    assert "DeepSpeed" not in too_much.why
    assert "pin_memory" not in too_much.remedy
    assert not_said.severity == "warning"
    assert "--set host_memory" in not_said.remedy
    assert told_of(one, host_memory="2TiB") == []
