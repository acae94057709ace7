from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.layout.specs import DENSE, LINEAR, MLA, MOE, VISION, make_layout, make_spec, with_attention
from topoplan import catalog
from topoplan.engines.megatron.rules import (
    GRID_RULES,
    MODE_RULES,
    RULES,
    SEARCH_RULES,
    SPLIT_RULES,
    STEP_RULES,
    fp8_alignment,
    tensor_parallel_domain,
)
from topoplan.engines.rule import broken_rule
from topoplan.layout.layout import Layout, Recompute
from topoplan.operators.divisors import divisors_of
from topoplan.specs import known
from topoplan.specs.cluster import Fabric
from topoplan.specs.facts import facts_of
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

RULE = {rule.name: rule for rule in RULES}
FULL_2 = Recompute(granularity="full", method="uniform", num_layers=2)
BLOCK_2 = Recompute(granularity="full", method="block", num_layers=2)
NARROW_KV = with_attention(DENSE, heads=14, kv_heads=2, head_dim=64)


def selective(*modules: str) -> Recompute:
    return Recompute(granularity="selective", modules=modules)


def failed(name: str, spec: Spec, layout: Layout) -> str | None:
    return RULE[name].failed(case_of(spec, layout.backend), layout)


FLEX = {"moe_token_dispatcher_type": "flex", "backend": "megatron"}

# name, keys of the spec, keys of a layout that breaks the rule, its failed equation, keys of one that keeps it
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, dict[str, Any]]] = [
    ("world-size", {}, {"tp": 4, "pp": 3}, "world size 32 % (tp 4 * pp 3 * cp 1) = 8", {"tp": 4, "pp": 4}),
    ("world-size", {}, {"tp": 4, "dp": 4}, "tp 4 * pp 1 * cp 1 * dp 4 = 16 != world size 32", {"tp": 4, "dp": 8}),
    ("tp-in-nvlink-domain", {}, {"tp": 16}, "tp 16 > NVLink domain of 8 GPUs", {"tp": 8}),
    ("tp-in-nvlink-domain", {"nvlink": False}, {"tp": 16}, "tp 16 > node of 8 GPUs", {"tp": 8}),
    (
        "tp-in-nvlink-domain",
        {"nodes": 2, "gpus_per_node": 6},
        {"tp": 4},
        "6 GPUs of an NVLink domain % (tp 4) = 2",
        {"tp": 3},
    ),
    (
        "tp-in-nvlink-domain",
        {"nodes": 36, "gpus_per_node": 4, "domain": 72},
        {"tp": 16},
        "72 GPUs of an NVLink domain % (tp 16) = 8",
        {"tp": 8},
    ),
    ("heads", {"gpus_per_node": 6}, {"tp": 3}, "heads 32 % tp 3 = 2", {"tp": 2}),
    ("heads", {"model": LINEAR}, {"tp": 32}, "heads 16 % tp 32 = 16", {"tp": 16}),
    ("heads", {"model": MLA, "gpus_per_node": 6}, {"tp": 3}, "heads 128 % tp 3 = 2", {"tp": 2}),
    (
        "kv-heads",
        {"model": with_attention(DENSE, heads=48, kv_heads=8), "gpus_per_node": 12},
        {"tp": 12},
        "KV heads 8 % tp 12 = 8, tp 12 % KV heads 8 = 4",
        {"tp": 4},
    ),
    ("kv-heads", {"model": NARROW_KV, "gpus_per_node": 14}, {"tp": 14}, "QKV width 1152 % tp 14 = 4", {"tp": 2}),
    ("kv-heads", {"model": LINEAR}, {"tp": 4}, "tp 4 > KV heads 2 with an output gate", {"tp": 2}),
    ("widths", {"gpus_per_node": 10}, {"tp": 5}, "MLP width 12288 % tp 5 = 3", {"tp": 2}),
    ("vocabulary", {"gpus_per_node": 6}, {"tp": 3}, "vocabulary 151936 % tp 3 = 1", {"tp": 3, "backend": "megatron"}),
    ("context-parallel", {"model": LINEAR}, {"cp": 2}, "cp 2 with linear attention layers", {"cp": 1}),
    (
        "context-parallel",
        {"model": VISION},
        {"cp": 2},
        "cp 2 with images: the trainer cuts every tensor of a batch at its second dimension",
        {"cp": 2, "backend": "megatron"},
    ),
    (
        "context-parallel",
        {"gpu": "v100-sxm-32gb"},
        {"cp": 2},
        "cp 2 without Transformer Engine, which Volta lacks",
        {"cp": 1},
    ),
    (
        "context-parallel",
        {"model": MOE, "stage": "dpo"},
        {"cp": 2},
        "cp 2 in stage dpo with experts: the mask is a token longer than the sequence, and cannot be cut",
        {"cp": 2, "backend": "megatron"},
    ),
    (
        "context-parallel",
        {},
        {"tp": 4, "cp": 4, "cp_comm_type": "a2a", "backend": "megatron"},
        "KV heads 8 / tp 4 % cp 4 = 2 by all-to-all",
        {"tp": 4, "cp": 2, "cp_comm_type": "a2a", "backend": "megatron"},
    ),
    (
        "context-parallel",
        {"model": MLA},
        {"cp": 2, "cp_comm_type": "a2a", "backend": "megatron"},
        "cp 2 by all-to-all with latent attention",
        {"cp": 2, "backend": "megatron"},
    ),
    (
        "adapter",
        {},
        {"cp": 2, "cp_comm_type": "a2a"},
        "cp_comm_type a2a, which the adapter does not pass on",
        {"cp": 2, "cp_comm_type": "a2a", "backend": "megatron"},
    ),
    (
        "user-buffers",
        {"model": MLA},
        {"tp": 2, "tp_comm_overlap": True, "backend": "megatron"},
        "tp_comm_overlap with latent attention: Megatron drops it",
        {"tp": 2, "backend": "megatron"},
    ),
    (
        "user-buffers",
        {"nvlink": False},
        {"tp": 2, "tp_comm_overlap": True, "backend": "megatron"},
        "tp_comm_overlap without NVLink, over which user buffers are mapped",
        {"tp": 2, "backend": "megatron"},
    ),
    (
        "sequence-parallel",
        {},
        {"tp": 2, "tp_comm_overlap": True, "sequence_parallel": False, "backend": "megatron"},
        "tp_comm_overlap without sequence_parallel",
        {"tp": 2, "tp_comm_overlap": True, "backend": "megatron"},
    ),
    (
        "context-parallel",
        {},
        {"cp": 2, "attention_backend": "unfused", "backend": "megatron"},
        "cp 2 with attention_backend unfused",
        {"cp": 2, "attention_backend": "fused", "backend": "megatron"},
    ),
    (
        "overlap",
        {},
        {"overlap_grad_reduce": False},
        "overlap_param_gather without overlap_grad_reduce",
        {"overlap_grad_reduce": False, "overlap_param_gather": False},
    ),
    (
        "overlap",
        {},
        {"distributed_optimizer": False},
        "overlap_param_gather without distributed_optimizer",
        {"distributed_optimizer": False, "overlap_param_gather": False},
    ),
    (
        "adapter",
        {},
        {"precision_aware_optimizer": True},
        "precision_aware_optimizer, which the adapter does not pass on",
        {"precision_aware_optimizer": True, "backend": "megatron"},
    ),
    (
        "adapter",
        {},
        {"grad_reduce_in_fp32": False},
        "grad_reduce_in_fp32 false with precision bf16: the adapter switches it on",
        {"grad_reduce_in_fp32": False, "backend": "megatron"},
    ),
    (
        "adapter",
        {},
        {"cross_entropy_fusion": True, "tp": 2},
        "cross_entropy_fusion with tp 2: the adapter fuses it with tp 1 alone",
        {"cross_entropy_fusion": True, "tp": 1},
    ),
    (
        "adapter",
        {"model": MOE},
        {"ep": 16, "moe_token_dispatcher_type": "flex"},
        "moe_token_dispatcher_type flex: the adapter takes allgather and alltoall",
        {"ep": 16, "moe_token_dispatcher_type": "alltoall"},
    ),
    (
        "dispatcher",
        {},
        {"moe_token_dispatcher_type": "flex", "backend": "megatron"},
        "flex on a model without experts",
        {"backend": "megatron"},
    ),
    (
        "dispatcher",
        {"model": MOE},
        {"ep": 1, **FLEX},
        "flex with ep 1 and etp 1: nothing to exchange",
        {"ep": 2, **FLEX},
    ),
    (
        "dispatcher",
        {"model": MOE, "gpu": "v100-sxm-32gb"},
        {"ep": 8, **FLEX},
        "flex on v100-sxm-32gb (volta): DeepEP starts with Ampere",
        {"ep": 8, "backend": "megatron"},
    ),
    (
        "dispatcher",
        {"model": MOE, "nvlink": False},
        {"ep": 8, **FLEX},
        "flex without NVLink: DeepEP needs it between all GPUs of a node",
        {"ep": 8, "backend": "megatron"},
    ),
    (
        "dispatcher",
        {"model": MOE, "gpus_per_node": 6},
        {"ep": 4, **FLEX},
        "flex with etp 1 * ep 4 = 4 ranks: neither in an NVLink domain of 6 GPUs nor whole ones",
        {"ep": 2, "etp": 3, **FLEX},
    ),
    (
        "optimizer",
        {},
        {"backend": "megatron", "precision_aware_optimizer": True, "distributed_optimizer": False},
        "precision_aware_optimizer without distributed_optimizer",
        {"backend": "megatron", "precision_aware_optimizer": True},
    ),
    (
        "optimizer",
        {},
        {"backend": "megatron", "exp_avg_dtype": "bf16"},
        "exp_avg_dtype bf16 without precision_aware_optimizer",
        {"backend": "megatron", "exp_avg_dtype": "bf16", "precision_aware_optimizer": True},
    ),
    (
        "optimizer",
        {},
        {
            **{"backend": "megatron", "precision_aware_optimizer": True, "main_params_dtype": "fp16"},
            "optimizer_offload_fraction": 0.5,
        },
        "main_params_dtype fp16 with optimizer_offload_fraction, whose optimizer keeps fp32",
        {"backend": "megatron", "precision_aware_optimizer": True, "main_params_dtype": "fp16"},
    ),
    (
        "optimizer",
        {},
        {"optimizer_offload_fraction": 0.5, "distributed_optimizer": False, "overlap_param_gather": False},
        "optimizer_offload_fraction 0.5 without distributed_optimizer",
        {"optimizer_offload_fraction": 0.5},
    ),
    (
        "adapter",
        {"precision": "fp8"},
        {"optimizer_offload_fraction": 1.0, "fp8_param": True},
        "optimizer_offload_fraction with fp8_param: Megatron offloads for the delayed fp8 recipe alone",
        {"optimizer_offload_fraction": 1.0, "backend": "megatron", "fp8_param": True},
    ),
    ("experts", {}, {"ep": 2}, "ep 2, etp 1 on a model without experts", {"ep": 1}),
    ("experts", {"model": MOE, "gpus_per_node": 6}, {"ep": 3}, "experts 128 % ep 3 = 2", {"ep": 2}),
    (
        "expert-grid",
        {"model": MOE},
        {"tp": 4, "pp": 4, "ep": 4, "etp": 4},
        "world size 32 % (etp 4 * ep 4 * pp 4) = 32",
        {"tp": 4, "pp": 4, "ep": 4, "etp": 1},
    ),
    ("expert-widths", {"model": MOE, "gpus_per_node": 10}, {"etp": 5}, "expert width 768 % etp 5 = 3", {"etp": 2}),
    (
        "expert-adapters",
        {"model": MOE, "finetuning": "lora"},
        {"tp": 2, "etp": 2, "backend": "megatron"},
        "etp 2 with adapters on the experts, which mcore_bridge builds for etp 1 alone",
        {"tp": 2, "etp": 1, "ep": 2, "backend": "megatron"},
    ),
    (
        "fp8-widths",
        {"precision": "fp8", "gpus_per_node": 64},
        {"tp": 512},
        "attention width 4096 / tp 512 % 16 = 8 in fp8",
        {"tp": 64},
    ),
    (
        "fp8-widths",
        {"model": "Qwen/Qwen2.5-0.5B", "precision": "fp8", "gpus_per_node": 14},
        {"tp": 7},
        "QKV width 1152 / tp 7 % 16 = 4 in fp8",
        {"tp": 2},
    ),
    (
        "fp8-widths",
        {"model": MOE, "precision": "mxfp8", "gpu": "b200-sxm-180gb"},
        {"etp": 32},
        "expert width 768 / etp 32 % 32 = 24 in mxfp8",
        {"etp": 8},
    ),
    ("pipeline-split", {}, {"pp": 8}, "36 layers % (pp 8 * vpp 1) = 4", {"pp": 4}),
    ("pipeline-split", {}, {"pp": 4, "vpp": 2}, "36 layers % (pp 4 * vpp 2) = 4", {"pp": 4, "vpp": 3}),
    ("pipeline-split", {}, {"vpp": 2}, "vpp 2 with pp 1", {"pp": 2, "vpp": 2}),
    (
        "pipeline-split",
        {},
        {"pp": 8, "pipeline_layout": "Et*4|(t*4|)*6t*4L"},
        "pipeline_layout holds 32 layers, the model has 36",
        {"pp": 8, "pipeline_layout": "Et*4|(t*5|)*5t*4|t*3L"},
    ),
    (
        "vision-first-stage",
        {"model": VISION},
        {"pp": 4, "vpp": 3},
        "3 layers on the first stage <= 3 deepstack inputs of the vision tower",
        {"pp": 4},
    ),
    (
        "vision-first-stage",
        {"model": VISION},
        {"pp": 4, "vpp": 9, "backend": "megatron"},
        "1 layers on the first stage < 3 deepstack inputs of the vision tower",
        {"pp": 4, "vpp": 3, "backend": "megatron"},
    ),
    (
        "mtp-stage",
        {"model": MLA, "mtp_num_layers": 1},
        {"pp": 4, "pipeline_layout": "Et*20|t*20|t*21m|L"},
        "multi-token prediction before the last stage, where the adapter loads its weights",
        {"pp": 4, "pipeline_layout": "Et*20|t*20|t*21m|L", "backend": "megatron"},
    ),
    (
        "mtp-stage",
        {"model": MLA, "mtp_num_layers": 1},
        {"pp": 4, "pipeline_layout": "Et*20|t*20|t*21|mL"},
        "no layer beside multi-token prediction on the last stage, whose last one it is built as",
        {"pp": 4, "pipeline_layout": "Et*15|t*15|t*16|t*15mL"},
    ),
    ("ep-in-nvlink-domain", {"model": MOE}, {"ep": 16}, "ep 16 > NVLink domain of 8 GPUs", {"ep": 8}),
    (
        "ep-in-nvlink-domain",
        {"model": MOE},
        {"tp": 2, "ep": 8, "etp": 2},
        "etp 2 * ep 8 = 16 > NVLink domain of 8 GPUs",
        {"tp": 2, "ep": 4, "etp": 2},
    ),
    (
        "ep-in-nvlink-domain",
        {"model": MOE, "nodes": 2, "gpus_per_node": 6},
        {"ep": 4},
        "6 GPUs of an NVLink domain % (ep 4) = 2",
        {"ep": 2},
    ),
    (
        "expert-tensor",
        {"model": MOE},
        {"tp": 2, "etp": 1},
        "etp 1 != tp 2 with ep 1: gradients of the experts' copies are not summed",
        {"tp": 2, "etp": 2},
    ),
    ("ep-in-nvlink-domain", {"model": MOE, "nvlink": False}, {"ep": 16}, "ep 16 > node of 8 GPUs", {"ep": 8}),
    (
        "batch",
        {"global_batch_size": 48},
        {"tp": 2, "micro_batch_size": 2},
        "global_batch_size 48 % (micro_batch_size 2 * dp 16) = 16",
        {"tp": 2, "micro_batch_size": 3},
    ),
    (
        "batch",
        {},
        {"tp": 2, "gradient_accumulation_steps": 3},
        "micro_batch_size 1 * dp 16 * gradient_accumulation_steps 3 != global_batch_size 64",
        {"tp": 2, "gradient_accumulation_steps": 4},
    ),
    (
        "batch",
        {"samples": 24},
        {"micro_batch_size": 1},
        "samples 24 < micro_batch_size 1 * dp 32 = 32: no rank would get a full micro batch",
        {"tp": 2},
    ),
    (
        "interleaving",
        {"global_batch_size": 48},
        {"tp": 1, "pp": 4, "vpp": 3},
        "gradient_accumulation_steps 6 % pp 4 = 2 with vpp 3",
        {"tp": 2, "pp": 4, "vpp": 3},
    ),
    (
        "interleaving",
        {"global_batch_size": 16},
        {"pp": 4, "vpp": 3},
        "gradient_accumulation_steps 2 % pp 4 = 2 with vpp 3",
        {"pp": 4, "vpp": 1},
    ),
    ("sequence-parallel", {}, {"sequence_parallel": True}, "sequence_parallel with tp 1", {"tp": 2}),
    (
        "sequence-parallel",
        {"model": MOE},
        {"tp": 2, "sequence_parallel": False},
        "a mixture of experts with tp 2 and no sequence_parallel",
        {"tp": 2},
    ),
    (
        "sequence-length",
        {"seq_len": 4095},
        {"tp": 2, "backend": "megatron"},
        "seq_len 4095 % tp 2 = 1",
        {"tp": 2, "sequence_parallel": False, "backend": "megatron"},
    ),
    (
        "sequence-length",
        {"seq_len": 4100},
        {"cp": 4, "backend": "megatron"},
        "seq_len 4100 % (2 * cp 4) = 4",
        {"cp": 2, "backend": "megatron"},
    ),
    (
        "sequence-length",
        {"seq_len": 4112},
        {"cp": 4, "tp": 8, "backend": "megatron"},
        "seq_len 4112 % lcm(2 * cp 4, cp 4 * tp 8) = 16",
        {"cp": 2, "tp": 8, "backend": "megatron"},
    ),
    (
        "sequence-length",
        {"seq_len": 4000, "packing": True, "nodes": 16},
        {"cp": 16, "tp": 8},
        "seq_len 4000 padded to 4032 % lcm(2 * cp 16, cp 16 * tp 8) = 64",
        {"cp": 8, "tp": 8},
    ),
    (
        "sequence-length",
        {"nodes": 16},
        {"cp": 16, "tp": 8},
        "sequences padded to multiples of 64 % lcm(2 * cp 16, cp 16 * tp 8) = 64",
        {"cp": 8, "tp": 8},
    ),
    (
        "sequence-length",
        {"stage": "pt"},
        {"cp": 2, "tp": 8},
        "sequences padded to multiples of 8 % lcm(2 * cp 2, cp 2 * tp 8) = 8",
        {"cp": 2, "tp": 4},
    ),
    (
        "sequence-length",
        {"stage": "dpo", "packing": True, "nodes": 16},
        {"cp": 16, "tp": 8},
        "sequences padded to multiples of 64 % lcm(2 * cp 16, cp 16 * tp 8) = 64",
        {"cp": 2, "tp": 8},
    ),
    (
        "sequence-length",
        {"precision": "mxfp8", "gpu": "b200-sxm-180gb", "seq_len": 1024, "packing": True, "nodes": 16},
        {"cp": 64},
        "seq_len 1024 / cp 64 * micro_batch_size 1 % 32 = 16 in mxfp8",
        {"cp": 32},
    ),
    (
        "recompute",
        {"mtp_num_layers": 1},
        {"recompute": FULL_2, "backend": "megatron"},
        "recompute num_layers 2 != 1 with multi-token prediction",
        {"recompute": BLOCK_2, "backend": "megatron"},
    ),
    ("recompute", {}, {"recompute": selective("mla_up_proj")}, "recompute mla_up_proj without latent attention", {}),
    (
        "recompute",
        {},
        {"recompute": selective("moe_act")},
        "recompute moe_act on a model without experts",
        {"recompute": selective("mlp")},
    ),
    (
        "recompute",
        {"model": MOE, "gpu": "v100-sxm-32gb"},
        {"recompute": selective("moe_act")},
        "recompute moe_act without grouped GEMM, which Volta lacks",
        {"recompute": selective("moe")},
    ),
    (
        "recompute",
        {"model": MOE, "gpu": "b200-sxm-180gb", "precision": "fp8"},
        {"recompute": selective("moe")},
        "recompute moe in mxfp8",
        {"recompute": selective("moe"), "backend": "megatron"},
    ),
    (
        "recompute",
        {"model": VISION},
        {"recompute": FULL_2},
        "recompute num_layers 2 != 1 with deepstack inputs",
        {"recompute": BLOCK_2},
    ),
    ("recompute", {}, {"recompute": selective("attention")}, "no module 'attention' to recompute", {}),
]


@pytest.mark.parametrize(("name", "spec_keys", "breaks", "equation", "keeps"), CASES)
def test_a_broken_rule_prints_its_equation_and_a_kept_one_nothing(
    name: str, spec_keys: dict[str, Any], breaks: dict[str, Any], equation: str, keeps: dict[str, Any]
) -> None:
    spec = make_spec(**spec_keys)
    assert failed(name, spec, make_layout(spec, **breaks)) == equation
    assert failed(name, spec, make_layout(spec, **keeps)) is None


def test_every_rule_has_a_case_a_source_and_a_fix() -> None:
    assert {name for name, *_ in CASES} == set(RULE)
    assert len(RULE) == len(RULES)
    assert all(rule.source and rule.fix for rule in RULES)


def test_every_rule_belongs_to_one_stage_of_the_search() -> None:
    assert (*SPLIT_RULES, *GRID_RULES, *SEARCH_RULES, *STEP_RULES, *MODE_RULES) == RULES


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        (DENSE, {"tp": 8, "pp": 4, "vpp": 9}),
        (DENSE, {"tp": 8, "cp": 4}),
        (MOE, {"tp": 4, "pp": 2, "ep": 8}),
        (MOE, {"tp": 8, "etp": 8}),
        (MLA, {"tp": 8, "ep": 8}),
        (VISION, {"tp": 2, "pp": 4, "vpp": 1}),
        (LINEAR, {"tp": 2, "ep": 8, "pp": 4, "vpp": 4}),
    ],
)
def test_usual_layouts_break_no_rule(model: str, keys: dict[str, Any]) -> None:
    spec = make_spec(model)
    assert broken_rule(case_of(spec, "mca"), make_layout(spec, **keys), RULES) is None


def test_the_first_broken_rule_is_the_one_that_is_named() -> None:
    spec = make_spec()
    broken = broken_rule(case_of(spec, "mca"), make_layout(spec, tp=16, pp=3, ep=2), RULES)
    assert broken is not None
    assert (broken.rule, broken.equation) == ("world-size", "world size 32 % (tp 16 * pp 3 * cp 1) = 32")


def test_a_pinned_ep_may_leave_the_nvlink_domain() -> None:
    spec = make_spec(MOE, pin={"ep": 16})
    assert failed("ep-in-nvlink-domain", spec, make_layout(spec, ep=16)) is None


def test_tensor_parallel_may_span_a_rack_with_nvlink_and_a_node_without() -> None:
    assert tensor_parallel_domain(case_of(make_spec(gpus_per_node=4, nodes=18, domain=72), "mca")) == 72
    assert tensor_parallel_domain(case_of(make_spec(nvlink=False), "mca")) == 8


def test_fewer_kv_heads_than_ranks_are_fine_when_the_matrix_divides() -> None:
    spec = make_spec(MOE)
    assert failed("kv-heads", spec, make_layout(spec, tp=8)) is None


def test_flex_needs_rdma_only_where_experts_span_nodes() -> None:
    spec = make_spec(MOE)
    tcp = replace(spec, cluster=replace(spec.cluster, fabric=Fabric(kind="ethernet")))
    inside, across = make_layout(spec, ep=8, **FLEX), make_layout(spec, ep=16, **FLEX)
    assert failed("dispatcher", spec, across) is None
    assert failed("dispatcher", tcp, inside) is None
    assert failed("dispatcher", tcp, across) == (
        "flex with etp 1 * ep 16 = 16 ranks over Ethernet (TCP): DeepEP needs InfiniBand or RoCE"
    )


def test_fp16_gradients_may_be_reduced_in_fp16_by_the_adapter() -> None:
    spec = make_spec(precision="fp16")
    assert failed("adapter", spec, make_layout(spec, grad_reduce_in_fp32=False)) is None


def test_padding_to_seq_len_under_expert_parallel_counts_the_whole_length() -> None:
    spec = make_spec(MOE, nodes=16)
    assert failed("sequence-length", spec, make_layout(spec, cp=16, tp=8, ep=8)) is None
    assert failed("sequence-length", spec, make_layout(spec, cp=16, tp=8)) is not None


@pytest.mark.parametrize(
    ("gpu", "precision", "backend", "align"),
    [
        ("h100-sxm-80gb", "bf16", "mca", 1),
        ("h100-sxm-80gb", "fp8", "mca", 16),
        ("b200-sxm-180gb", "fp8", "mca", 32),
        ("b200-sxm-180gb", "fp8", "megatron", 16),
        ("b200-sxm-180gb", "mxfp8", "megatron", 32),
        ("b200-sxm-180gb", "nvfp4", "megatron", 32),
    ],
)
def test_alignment_follows_the_recipe(gpu: str, precision: str, backend: str, align: int) -> None:
    spec = make_spec(gpu=gpu, precision=precision)
    assert fp8_alignment(case_of(spec, backend)) == align


@pytest.mark.parametrize("name", catalog.model_names())
def test_every_model_of_the_catalog_runs_in_fp8_unsplit(name: str) -> None:
    spec = make_spec(name, gpu="b200-sxm-180gb", precision="mxfp8")
    assert failed("fp8-widths", spec, make_layout(spec, backend="megatron")) is None


def test_facts_gather_the_divisors_of_all_layers() -> None:
    facts, divisors = facts_of(known.model(MLA)), divisors_of(known.model(MLA))
    assert divisors.heads == (128,)
    assert divisors.mlp_widths == (2048, 18432)  # the shared expert and the dense layers
    assert divisors.expert_widths == (2048,)
    assert facts.experts == (256,)
    assert facts.is_moe
    assert facts.latent_attention
    assert not facts.linear_attention
    assert facts_of(known.model(LINEAR)).linear_attention
    mixed = divisors_of(known.model(LINEAR))
    assert mixed.heads == (16, 32)
    assert mixed.kv_heads == (2,)
    assert ("linear attention projection", 12352) in mixed.split_widths


def test_rules_do_not_depend_on_the_order_of_layers() -> None:
    model = known.model(MLA)
    turned = replace(model, layers=model.layers[::-1])
    assert set(divisors_of(turned).split_widths) == set(divisors_of(model).split_widths)
    assert divisors_of(turned).mlp_widths == divisors_of(model).mlp_widths
