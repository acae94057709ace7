from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

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
from topoplan.operators.layers import divided, sizes_divided
from topoplan.specs import known
from topoplan.specs.cluster import Fabric
from topoplan.specs.facts import facts_of
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

RULE = {rule.name: rule for rule in RULES}
TABLE = Path(__file__).parents[2] / "data" / "megatron_rules.txt"
MODELS = {
    **{"dense": DENSE, "moe": MOE, "mla": MLA, "vision": VISION, "linear": LINEAR, "tiny": "Qwen/Qwen2.5-0.5B"},
    "48-heads": with_attention(DENSE, heads=48, kv_heads=8),
    "14-heads": with_attention(DENSE, heads=14, kv_heads=2, head_dim=64),
}
FLEX = {"moe_token_dispatcher_type": "flex", "backend": "megatron"}


def recompute(text: str) -> Recompute:
    """Return the mode for `selective:mlp`, or for a method with its number of layers: `uniform:2`."""
    method, _, what = text.partition(":")
    if method == "selective":
        return Recompute(granularity="selective", modules=(what,))
    return Recompute(granularity="full", method=method, num_layers=int(what))


def keys(words: str) -> dict[str, Any]:
    """Return the keys that `tp=4 model=moe` states."""
    special = {"model": MODELS.__getitem__, "recompute": recompute, "pipeline_layout": str}
    pairs = (word.partition("=") for word in words.split() if word != "-")
    return {key: special.get(key, yaml.safe_load)(value) for key, _, value in pairs}


CASES = [line.split(" | ") for line in TABLE.read_text().splitlines()[3:]]


def failed(name: str, spec: Spec, layout: Layout) -> str | None:
    return RULE[name].failed(case_of(spec, layout.backend), layout)


@pytest.mark.parametrize(("name", "spec_keys", "breaks", "equation", "keeps"), CASES)
def test_a_broken_rule_prints_its_equation_and_a_kept_one_nothing(
    name: str, spec_keys: str, breaks: str, equation: str, keeps: str
) -> None:
    spec = make_spec(**keys(spec_keys))
    assert failed(name, spec, make_layout(spec, **keys(breaks))) == equation
    assert failed(name, spec, make_layout(spec, **keys(keeps))) is None


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
    model, mixed = known.model(MLA), known.model(LINEAR)
    facts = facts_of(model)
    assert sizes_divided(model, "heads") == (128,)
    assert sizes_divided(model, "MLP width") == (2048, 18432)  # the shared expert and the dense layers
    assert sizes_divided(model, "expert width") == (2048,)
    assert facts.experts == (256,)
    assert facts.is_moe
    assert facts.latent_attention
    assert not facts.linear_attention
    assert facts_of(mixed).linear_attention
    assert sizes_divided(mixed, "heads") == (16, 32)
    assert sizes_divided(mixed, "KV heads") == (2,)
    assert ("linear attention projection", 12352) in divided(mixed)


def test_rules_do_not_depend_on_the_order_of_layers() -> None:
    model = known.model(MLA)
    turned = replace(model, layers=model.layers[::-1])
    assert set(divided(turned)) == set(divided(model))
