from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.bundle.samples import DEEPSEEK, QWEN3_8B, QWEN3_30B, QWEN3_VL_8B, make_spec_and_layout
from tests.reading.setups import MEGATRON, MOE, PLAIN, fixed, make_setup, only, rules, with_lines
from topoplan.layout.layout import Recompute
from topoplan.lint.rules import deepspeed
from topoplan.reading.finding import Finding
from topoplan.reading.setup import Setup
from topoplan.trainers.llamafactory.mca_yaml import trainer_file
from topoplan.trainers.llamafactory.rules import llamafactory, mca, mca_layouts, yaml_values
from topoplan.trainers.llamafactory.rules.mca import megatron_settings

EVERY_RULE = (yaml_values, llamafactory, deepspeed)


def findings(setup: Setup) -> Iterator[Finding]:
    """Of the keys, and of the layout that they make."""
    yield from mca.findings(setup)
    yield from mca_layouts.findings(setup)


VISION = with_lines(
    MEGATRON,
    "model_name_or_path: models/Qwen/Qwen3-VL-8B-Instruct\ntemplate: qwen3_vl_nothink\nfreeze_vision_tower: true",
)

GENERATED = {
    "dense": {"model": QWEN3_8B},
    "vision": {"model": QWEN3_VL_8B, "tp": 2, "pp": 2, "vpp": 2},
    "vision with larger micro batches": {"model": QWEN3_VL_8B, "micro_batch_size": 2},
    "experts": {"model": QWEN3_30B, "tp": 2, "pp": 4, "ep": 4},
    "experts in slices": {"model": QWEN3_30B, "tp": 2, "etp": 2},
    "latent attention": {"model": DEEPSEEK, "tp": 1, "ep": 8},
    "context": {"model": QWEN3_8B, "tp": 2, "cp": 4},
    "selective": {"recompute": Recompute(granularity="selective", modules=("core_attn", "mlp"))},
    "uniform": {"recompute": Recompute(granularity="full", method="uniform", num_layers=2), "model": QWEN3_8B},
    "block": {"pp": 2, "recompute": Recompute(granularity="full", method="block", num_layers=3)},
    "uneven": {"model": QWEN3_8B, "tp": 1, "pp": 2, "pipeline_layout": "Et*17|t*19,L"},
    "offload": {"model": QWEN3_8B, "optimizer_offload_fraction": 0.5},
    "pt": {"model": QWEN3_8B, "job": {"stage": "pt"}},
    "dpo": {"model": QWEN3_8B, "job": {"stage": "dpo"}},
    "fp8": {"model": QWEN3_8B, "job": {"precision": "fp8"}},
    "no packing": {"model": QWEN3_8B, "job": {"packing": False}},
    "keys of the user": {
        "model": QWEN3_8B,
        "overlap_param_gather": False,
        "job": {
            "trainer": {"additional_configs": {"moe_z_loss_coeff": 1e-3}, "neat_packing": True, "save_strategy": "no"}
        },
    },
}


def test_a_plan_s_own_choice_of_sequence_parallel_is_not_judged() -> None:
    setup = make_setup(with_lines(MEGATRON, "sequence_parallel: false"), name="bundle/train.yaml")
    assert "mca-sequence-parallel-off" in [one.rule for one in findings(setup)]
    assert "mca-sequence-parallel-off" not in [one.rule for one in findings(replace(setup, bundles=(Path("bundle"),)))]


@pytest.mark.parametrize("case", GENERATED, ids=str)
def test_what_topoplan_writes_gives_nothing(case: str) -> None:
    text = trainer_file(*make_spec_and_layout(**GENERATED[case])).text
    setup = make_setup(text)
    assert setup.uses_mca(setup.configurations[0])
    found = [finding for module in EVERY_RULE for finding in module.findings(setup)] + list(findings(setup))
    assert [(finding.rule, finding.what) for finding in found] == []


def test_the_bundle_of_the_readme_gives_nothing() -> None:
    path = Path(__file__).parents[4] / "generated/h100-4x8/train.yaml"
    setup = make_setup(path.read_text(encoding="utf-8"))
    assert [rule for module in EVERY_RULE for rule in rules(module.findings, setup)] + rules(findings, setup) == []


@pytest.mark.parametrize("text", [PLAIN, MEGATRON, MOE, VISION])
def test_right_files_give_nothing(text: str) -> None:
    assert rules(findings, make_setup(text)) == []


@pytest.mark.parametrize(
    ("lines", "rule", "severity"),
    [
        ("deepspeed: ds.json", "mca-ignored-key", "warning"),
        ("gradient_checkpointing: true", "mca-ignored-key", "warning"),
        ("optim: adamw_8bit", "mca-ignored-key", "warning"),
        ("disable_shuffling: true", "mca-ignored-key", "warning"),
        ("ddp_find_unused_parameters: false", "mca-ignored-key", "note"),
        ("report_to: wandb", "mca-wandb-dropped", "warning"),
        ("report_to: [wandb, tensorboard]", "mca-wandb-dropped", "warning"),
        ("finetuning_type: lora", "mca-trains-everything", "error"),
        ("stage: kto", "mca-stage", "error"),
        ("model_name_or_path: Qwen/Qwen3-8B", "mca-hub-id", "error"),
        ("model_name_or_path: someone/a-model", "mca-hub-id", "warning"),
        ("model_name_or_path: /models/gpt-oss-20b", "mca-model-type", "error"),
        ("freeze_vision_tower: true", "mca-freezes-nothing", "note"),
        ("virtual_pipeline_model_parallel_size: 2", "mca-interleaving-alone", "error"),
        ("sequence_parallel: false", "mca-sequence-parallel-off", "warning"),
        ("sequence_parallel: -", "mca-sequence-parallel-off", "warning"),
        ("tensor_model_parallel_size: 1", "mca-sequence-parallel-alone", "warning"),
        ("use_distributed_optimizer: false", "mca-optimizer-not-split", "warning"),
        ("tensor_model_parallel_size: 3", "mca-heads", "error"),
        ("pipeline_model_parallel_size: 8", "mca-pipeline-split", "error"),
        ("pipeline_model_parallel_size: 2\npipeline_model_parallel_layout: Et*9|tL", "mca-pipeline-split", "error"),
        ("expert_model_parallel_size: 2", "mca-experts", "error"),
        ("overlap_param_gather: true", "mca-overlap", "error"),
        ("context_parallel_size: 3", "mca-sequence-length", "error"),
        (
            "pipeline_model_parallel_size: 4\nvirtual_pipeline_model_parallel_size: 3\ngradient_accumulation_steps: 6",
            "mca-interleaving",
            "error",
        ),
        ("recompute_granularity: full\nrecompute_method: uniform", "mca-recompute-incomplete", "error"),
        ("recompute_granularity: full\nrecompute_num_layers: 2", "mca-recompute-incomplete", "error"),
        ("recompute_granularity: selective\nrecompute_num_layers: 2", "mca-recompute-contradiction", "error"),
        ("recompute_granularity: full\nmoe_layer_recompute: true", "mca-recompute-contradiction", "error"),
        ("recompute_num_layers: 2", "mca-recompute-unused", "warning"),
        ("recompute_granularity: full\nrecompute_modules: mlp", "mca-recompute-unused", "warning"),
        ("recompute_granularity: selective\nrecompute_modules: attn", "mca-recompute", "error"),
        ("variable_seq_lengths: true", "mca-variable-lengths", "error"),
        ("neat_packing: true\ncontext_parallel_size: 2", "mca-packing-with-context-parallel", "error"),
        ("stage: dpo\npacking: true", "mca-packing-in-dpo", "warning"),
        ("stage: dpo\nsequence_packing: true", "mca-packing-in-dpo", "error"),
        ("sequence_packing: true\ntransformer_impl: local", "mca-packing-without-te", "error"),
        ("cutoff_len: 1000", "mca-length-padded", "note"),
        ("cross_entropy_loss_fusion: true", "mca-cross-entropy-fusion", "note"),
        ("save_hf_model: -", "mca-no-hf-model", "note"),
        ("additional_configs: {moe_z_los_coeff: 0.1}", "mca-additional-ignored", "warning"),
        ("additional_configs: {sequence_parallel: false}", "mca-additional-twice", "warning"),
    ],
)
def test_a_mistake_is_found_and_nothing_else(lines: str, rule: str, severity: str) -> None:
    setup = make_setup(with_lines(MEGATRON, lines))
    assert rules(findings, setup) == [rule]
    assert only(findings, setup, rule).severity == severity


@pytest.mark.parametrize(
    ("lines", "rule", "severity"),
    [
        ("moe_token_dispatcher_type: -", "mca-allgather-dispatcher", "warning"),
        ("moe_token_dispatcher_type: allgather", "mca-allgather-dispatcher", "warning"),
        ("expert_tensor_parallel_size: -", "mca-expert-tensor-unset", "warning"),
        ("moe_grouped_gemm: -", "mca-experts-one-by-one", "warning"),
        ("expert_model_parallel_size: 3", "mca-experts", "error"),
        ("sequence_parallel: false", "mca-sequence-parallel-forced", "note"),
        ("sequence_parallel: false\nexpert_model_parallel_size: 1", "mca-sequence-parallel", "error"),
    ],
)
def test_a_mistake_with_experts_is_found_and_nothing_else(lines: str, rule: str, severity: str) -> None:
    setup = make_setup(with_lines(MOE, lines))
    assert rules(findings, setup) == [rule]
    assert only(findings, setup, rule).severity == severity


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ("apply_rope_fusion: true\nper_device_train_batch_size: 2", "mca-rope-fusion"),
        ("context_parallel_size: 2", "mca-context-parallel"),
        ("stage: pt", "mca-freezes-nothing"),
        ("recompute_granularity: full\nrecompute_method: uniform\nrecompute_num_layers: 4", "mca-recompute"),
    ],
)
def test_a_mistake_with_images_is_found_and_nothing_else(lines: str, rule: str) -> None:
    assert rules(findings, make_setup(with_lines(VISION, lines))) == [rule]


@pytest.mark.parametrize(
    "lines",
    [
        "apply_rope_fusion: true",
        "gradient_checkpointing: false",
        "deepspeed: null",
        "pipeline_model_parallel_size: 2\ngradient_accumulation_steps: 3",
        "tensor_model_parallel_size: 16",  # more ranks than KV heads, which divide them
        "report_to: tensorboard",
        "recompute_granularity: full",
        "freeze_vision_tower: false",
        "packing: true",
        "neat_packing: true",
        "additional_configs: {moe_z_loss_coeff: 0.001}",
    ],
)
def test_what_is_right_gives_nothing(lines: str) -> None:
    assert rules(findings, make_setup(with_lines(MEGATRON, lines))) == []


@pytest.mark.parametrize(
    "text",
    [
        "per_device_train_batch_size: 2\ntensor_model_parallel_size: 8\nsequence_parallel: true\n",
        "recompute_granularity: selective\n",
        "overlap_param_gather: true\n",
        "tensor_model_parallel_size: 8\n",
    ],
)
def test_a_few_lines_of_a_file_are_not_taken_for_the_whole(text: str) -> None:
    assert rules(findings, make_setup(text)) == []


def test_without_megatron_nothing_is_said() -> None:
    setup = make_setup(with_lines(MEGATRON, "finetuning_type: lora"), variables={"USE_MCA": "0"})
    assert rules(findings, setup) == []


def test_a_model_that_is_downloaded_is_no_hub_id() -> None:
    text = with_lines(MEGATRON, "model_name_or_path: Qwen/Qwen3-8B")
    setup = make_setup(text, variables={"USE_MODELSCOPE_HUB": "1"})
    assert rules(findings, setup) == []


@pytest.mark.parametrize(
    ("lines", "rule", "line"),
    [
        ("sequence_parallel: false  # why", "mca-sequence-parallel-off", "sequence_parallel: true  # why"),
        ("finetuning_type: lora", "mca-trains-everything", "finetuning_type: full"),
        ("report_to: wandb", "mca-wandb-dropped", "report_to: tensorboard"),
        ("variable_seq_lengths: true", "mca-variable-lengths", "moe_token_dispatcher_type: alltoall"),
        (
            "recompute_granularity: full\nrecompute_method: uniform",
            "mca-recompute-incomplete",
            "recompute_num_layers: 1",
        ),
        ("model_name_or_path: Qwen/Qwen3-8B", "mca-hub-id", "model_name_or_path: models/Qwen/Qwen3-8B"),
        ("save_hf_model: false", "mca-no-hf-model", "save_hf_model: true"),
        ("overlap_param_gather: true\nuse_distributed_optimizer: -", "mca-overlap", "overlap_grad_reduce: true"),
    ],
)
def test_the_edit_leaves_a_file_without_the_finding(lines: str, rule: str, line: str) -> None:
    finding = only(findings, make_setup(with_lines(MEGATRON, lines)), rule)
    text = fixed(finding)
    assert line in text.splitlines()
    assert rule not in rules(findings, make_setup(text))


def test_a_module_with_a_space_is_tidied() -> None:
    text = with_lines(MEGATRON, 'recompute_granularity: selective\nrecompute_modules: "core_attn, mlp"')
    finding = only(findings, make_setup(text), "mca-recompute-spaces")
    assert yaml.safe_load(fixed(finding))["recompute_modules"] == "core_attn,mlp"


def test_the_settings_of_megatron_are_listed() -> None:
    assert {"moe_z_loss_coeff", "num_layers_in_first_pipeline_stage", "rotary_base"} <= megatron_settings().keys()


def test_a_setting_of_some_versions_of_megatron_is_a_note_with_them() -> None:
    text = with_lines(
        MEGATRON, "additional_configs: {mlp_chunks_for_training: 2, moe_extended_tp: true, rotary_base: 1}"
    )
    said = [one for one in findings(make_setup(text)) if one.rule.startswith("mca-additional")]
    assert [(one.rule, one.severity) for one in said] == [("mca-additional-version", "note")] * 2
    assert "megatron-core>=0.18.2 alone" in said[0].what
    assert "megatron-core<0.17.1 alone" in said[1].what
