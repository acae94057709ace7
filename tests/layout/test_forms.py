import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.specs import DENSE, MLA, MOE, make_spec
from topoplan.engines.data_parallel.layouts import sharded_families
from topoplan.engines.megatron.layouts import shapes, steps, with_mode
from topoplan.errors import LayoutError
from topoplan.layout.forms import layout_from_dict, layout_to_dict, recompute_from_value
from topoplan.layout.layout import SHARDED_BACKENDS, Layout, Recompute, keys_of
from topoplan.specs.layout_parts import RECOMPUTE_MODULES
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

SPEC = make_spec()


def read(form: Any, spec: Spec = SPEC) -> Layout:
    return layout_from_dict(form, spec.cluster, spec.model, spec.job)


@pytest.mark.parametrize("model", [DENSE, MOE, MLA])
def test_every_candidate_of_a_search_comes_back_from_its_json_form(model: str) -> None:
    spec = make_spec(model, nodes=1, pin={"cp": 1, "micro_batch_size": 2})
    case, seen = case_of(spec, "mca"), 0
    for shape, broken in shapes(case, "mca"):
        if broken:
            continue
        for first, modes, broken_step in steps(case, shape):
            for layout in (
                itertools.chain(first, *(with_mode(first, mode) for mode in modes)) if not broken_step else ()
            ):
                seen += 1
                assert read(json.loads(json.dumps(layout_to_dict(layout))), spec) == layout
    assert seen > 100


def test_the_json_form_has_every_key_of_the_contract() -> None:
    layout = read({"tp": 4, "recompute": {"granularity": "selective", "modules": ["mlp"]}})
    assert layout_to_dict(layout) == {
        "backend": "mca",
        **{"tp": 4, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "etp": 1, "dp": 8},
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "sequence_parallel": True,
        "recompute": {"granularity": "selective", "modules": ["mlp"]},
        "distributed_optimizer": True,
        "pipeline_layout": None,
        "optimizer_offload_fraction": 0.0,
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "tp_comm_overlap": False,
        "cross_entropy_fusion": False,
        "cross_entropy_fusion_impl": "te",
        "gradient_accumulation_fusion": True,
        "attention_backend": "auto",
        "deterministic_mode": False,
        "precision_aware_optimizer": False,
        "main_params_dtype": "fp32",
        "exp_avg_dtype": "fp32",
        "exp_avg_sq_dtype": "fp32",
        "fp8_param": False,
        "cp_comm_type": "p2p",
        "moe_token_dispatcher_type": None,
        "moe_router_force_load_balancing": None,
        "overlap_moe_expert_parallel_comm": False,
        "moe_expert_capacity_factor": None,
    }


def test_a_dispatcher_is_kept_through_the_json_form() -> None:
    spec = make_spec(MOE)
    for dispatcher in (None, "alltoall", "flex"):
        layout = read({"backend": "megatron", "ep": 16, "moe_token_dispatcher_type": dispatcher}, spec)
        assert layout.moe_token_dispatcher_type == dispatcher
        assert read(json.loads(json.dumps(layout_to_dict(layout))), spec) == layout


def test_what_is_left_out_is_derived() -> None:
    layout = read({"tp": 4, "pp": 2, "micro_batch_size": 2})
    assert (layout.backend, layout.dp, layout.gradient_accumulation_steps) == ("mca", 4, 8)
    assert layout.sequence_parallel
    assert not read({}).sequence_parallel
    assert read({"tp": None, "vpp": None, "backend": None, "recompute": None}) == read({})


def test_expert_tensor_parallel_follows_tp_without_expert_parallel() -> None:
    moe = make_spec(MOE)
    assert read({"tp": 4}, moe).etp == 4
    assert read({"tp": 4, "ep": 4}, moe).etp == 1
    assert read({"tp": 4, "etp": 2}, moe).etp == 2
    assert read({"tp": 4}).etp == 1


def test_virtual_stages_follow_from_a_pipeline_layout() -> None:
    assert read({"pp": 2, "pipeline_layout": "Et*9|t*9|t*9|t*9L"}).vpp == 2
    assert read({"pp": 4, "pipeline_layout": "Et*9|t*9|t*9|t*9L"}).vpp == 1
    assert read({"pp": 2, "vpp": 1, "pipeline_layout": "Et*9|t*9|t*9|t*9L"}).vpp == 1  # the rule will tell
    with pytest.raises(LayoutError, match="pipeline_layout has 3 stages % pp 2 = 1"):
        read({"pp": 2, "pipeline_layout": "Et*9|t*9|t*18L"})


def test_the_loss_is_the_one_that_the_trainer_computes_unasked() -> None:
    def loss(**form: Any) -> tuple[bool, str]:
        layout = read(form)
        return layout.cross_entropy_fusion, layout.cross_entropy_fusion_impl

    assert loss(backend="megatron") == (True, "native")
    assert loss(backend="megatron", cross_entropy_fusion_impl="te") == (True, "te")
    assert loss(backend="megatron", cross_entropy_fusion=False)[0] is False
    assert loss(backend="mca")[0] is False


def test_other_names_of_megatron_for_a_layout_key() -> None:
    sized = read(
        {"pp": 2, "vpp": 2, "account_for_embedding_in_pipeline_split": False, "decoder_first_pipeline_num_layers": 16}
    )
    assert sized.pipeline_layout == "Et*8|t*10|t*8|t*10L"
    aware = {"backend": "megatron", "precision_aware_optimizer": True}
    assert not read({**aware, "main_grads_dtype": "bf16"}).grad_reduce_in_fp32
    assert read({**aware, "main_grads_dtype": "fp32"}).grad_reduce_in_fp32


@pytest.mark.parametrize("off", ["distributed_optimizer", "overlap_grad_reduce"])
def test_gathering_parameters_is_not_overlapped_where_what_it_needs_is_off(off: str) -> None:
    assert not read({off: False}).overlap_param_gather
    assert read({off: False, "overlap_param_gather": True}).overlap_param_gather


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({7: 4}, "layout: Keys should be strings"),
        ({"tp": 10**5000}, "layout.tp: a number of hundreds of digits is not a whole number"),
        ({"optimizer_offload_fraction": float("nan")}, "layout.optimizer_offload_fraction: .* expected a number from"),
        ([], "layout: a list is not a block of keys"),
        ("tp4", "layout: 'tp4' is not a block of keys"),
    ],
)
def test_a_wrong_form_is_named_with_its_key(form: Any, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        read(form)


@pytest.mark.parametrize("backend", SHARDED_BACKENDS)
def test_a_layout_that_splits_data_alone_comes_back_with_its_own_keys(backend: str) -> None:
    stage = {"zero_stage": 3} if backend == "deepspeed" else {}
    layout = read({"backend": backend, "micro_batch_size": 2, "expandable_segments": True, **stage})
    form = layout_to_dict(layout)
    assert set(form) == set(keys_of(backend))
    assert read(form) == layout
    assert (layout.dp, layout.tp) == (SPEC.cluster.world_size, 1)


def test_ranks_that_share_a_sequence_are_no_data_parallel_ranks() -> None:
    assert read({"backend": "fsdp2", "ulysses": 4}).dp == SPEC.cluster.world_size // 4


SCALARS = st.none() | st.booleans() | st.integers(-3, 10) | st.floats() | st.text(max_size=6) | st.just(10**400)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3))
KEYS = st.sampled_from([*layout_to_dict(read({})), "junk"]) | SCALARS
RECOMPUTES = st.dictionaries(
    st.sampled_from(["granularity", "modules", "method", "num_layers"]),
    VALUES | st.sampled_from(["selective", "full", "block", ["mlp"]]),
)


@given(st.dictionaries(KEYS, VALUES | RECOMPUTES, max_size=5) | VALUES)
def test_junk_is_a_layout_error_or_a_layout(form: Any) -> None:
    try:
        layout = read(form)
    except LayoutError:
        return
    assert layout.world_size == SPEC.cluster.world_size
    assert read(layout_to_dict(layout)) == layout


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ("none", Recompute()),
        ({}, Recompute()),
        ("selective", Recompute(granularity="selective", modules=("core_attn",))),
        ({"modules": ["mlp", "mlp"]}, Recompute(granularity="selective", modules=("mlp",))),
        (
            {"granularity": "selective", "modules": "mlp,moe"},
            Recompute(granularity="selective", modules=("mlp", "moe")),
        ),
        ("full", Recompute(granularity="full", method="uniform", num_layers=1)),
        ({"method": "block", "num_layers": 4}, Recompute(granularity="full", method="block", num_layers=4)),
        ({"granularity": "full", "modules": None, "method": None}, recompute_from_value("full")),
    ],
)
def test_a_recompute_mode_is_completed(value: Any, mode: Recompute) -> None:
    assert recompute_from_value(value) == mode


def test_every_module_of_megatron_is_accepted() -> None:
    assert recompute_from_value({"modules": list(RECOMPUTE_MODULES)}).modules == RECOMPUTE_MODULES


@pytest.mark.parametrize("backend", SHARDED_BACKENDS)
def test_every_layout_that_splits_data_alone_comes_back_from_its_json_form_and_has_an_id_of_its_own(
    backend: str,
) -> None:
    spec = make_spec(nodes=2)
    spec = replace(spec, cluster=replace(spec.cluster, host_memory_bytes=2**41))
    found = [
        layout
        for family, broken in sharded_families(case_of(spec, backend), backend)
        if not broken
        for layout in family
    ]
    assert len({layout.id for layout in found}) == len(found) > 10
    for layout in found:
        form = json.loads(json.dumps(layout_to_dict(layout)))
        assert tuple(form) == keys_of(backend)
        assert read(form, spec) == layout


def test_ranks_of_a_sequence_see_the_same_samples() -> None:
    layout = read({"backend": "deepspeed", "zero_stage": 3, "ulysses": 4, "micro_batch_size": 2})
    assert (layout.dp, layout.gradient_accumulation_steps, layout.world_size) == (8, 4, 32)
