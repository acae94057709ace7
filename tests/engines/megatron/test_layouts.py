import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layout.specs import DENSE, LINEAR, MLA, MOE, VISION, make_spec
from tests.sizes import examples
from topoplan.engines.engine import MAX_MICRO_BATCH_SIZE
from topoplan.engines.megatron.layouts import (
    OFFLOAD_FRACTIONS,
    UNEVEN_SPLITS,
    lighter_modes,
    offloaded,
    recompute_modes,
    shapes,
    steps,
    uneven_pipeline_layouts,
    with_mode,
)
from topoplan.engines.megatron.rules import RULES
from topoplan.engines.rule import broken_rule
from topoplan.layout.layout import Layout, Recompute, changed
from topoplan.layout.stages import balanced_pipeline_layout, end_sizes, split_stages, spread_pipeline_layout
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of

NODES = {DENSE: 2, MOE: 1, MLA: 1, VISION: 1, LINEAR: 1}


def candidates(spec: Spec) -> Iterator[tuple[Layout, str | None]]:
    """Yield every layout that a search considers, with the name of the rule that it breaks."""
    backend = spec.job.pin.get("backend", "mca")
    case = case_of(spec, backend)
    for shape, broken in shapes(case, backend):
        if broken:
            yield shape[0], broken.rule
            continue
        for first, modes, broken_step in steps(case, shape):
            for layouts in (first, *(with_mode(first, mode) for mode in modes)):
                for layout in layouts:
                    yield layout, broken_step.rule if broken_step else None


def legal(spec: Spec) -> list[Layout]:
    return [layout for layout, rule in candidates(spec) if rule is None]


def rules_met(spec: Spec) -> set[str | None]:
    return {rule for _, rule in candidates(spec)}


@cache
def found(model: str) -> list[tuple[Layout, str | None]]:
    return list(candidates(make_spec(model, nodes=NODES[model])))


@pytest.mark.parametrize("model", NODES)
def test_a_search_is_the_same_every_time_and_looks_at_nothing_twice(model: str) -> None:
    assert found(model) == list(candidates(make_spec(model, nodes=NODES[model])))
    assert len({layout for layout, _ in found(model)}) == len(found(model)) > 100
    ids = Counter(layout.id for layout, rule in found(model) if rule is None)
    assert [name for name, count in ids.items() if count > 1] == []


@pytest.mark.parametrize("model", NODES)
def test_every_legal_candidate_passes_all_rules_and_every_other_breaks_the_one_it_names(model: str) -> None:
    spec = make_spec(model, nodes=NODES[model])
    for layout, rule in found(model):
        broken = broken_rule(case_of(spec, layout.backend), layout, RULES)
        if rule is None:
            assert broken is None
            assert layout.world_size == spec.cluster.world_size
            per_step = layout.micro_batch_size * layout.dp * layout.gradient_accumulation_steps
            assert per_step == spec.job.global_batch_size
            assert layout.micro_batch_size <= MAX_MICRO_BATCH_SIZE
        else:
            assert broken is not None


@pytest.mark.parametrize(
    ("model", "pin"),
    [
        (DENSE, {"tp": 4}),
        (DENSE, {"pp": 4, "vpp": 3}),
        (DENSE, {"dp": 8}),
        (DENSE, {"cp": 2, "tp": 2}),
        (DENSE, {"micro_batch_size": 2}),
        (DENSE, {"gradient_accumulation_steps": 4}),
        (DENSE, {"sequence_parallel": False}),
        (DENSE, {"tp": 2, "sequence_parallel": True}),
        (DENSE, {"optimizer_offload_fraction": 0.5}),
        (DENSE, {"backend": "megatron", "precision_aware_optimizer": True}),
        (DENSE, {"backend": "megatron", "grad_reduce_in_fp32": False, "cross_entropy_fusion": True}),
        (DENSE, {"pp": 4, "pipeline_layout": "Et*8|t*10|t*10|t*8L"}),
        *((MOE, pin) for pin in ({"ep": 8}, {"ep": 16, "etp": 1}, {"tp": 4, "etp": 2}, {"tp": 2, "etp": 2, "ep": 4})),
    ],
)
def test_every_pin_is_honoured(model: str, pin: dict[str, Any]) -> None:
    found = legal(make_spec(model, pin=pin))
    assert found
    for layout in found:
        assert {key: getattr(layout, key) for key in pin} == pin


def test_pinned_stage_sizes_are_honoured_or_refused() -> None:
    sizes = {"decoder_first_pipeline_num_layers": 8, "decoder_last_pipeline_num_layers": 8}
    assert {layout.pipeline_layout for layout in legal(make_spec(pin={"pp": 4, "vpp": 1, **sizes}))} == {
        "Et*8|t*10|t*10|t*8L"
    }
    spec = make_spec(pin={"pp": 4, "decoder_first_pipeline_num_layers": 8})
    assert {rule for _, rule in candidates(spec)} == {"pipeline-split"}


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ("none", Recompute()),
        ({"granularity": "full"}, Recompute(granularity="full", method="uniform", num_layers=1)),
        (
            {"granularity": "selective", "modules": ["layernorm"]},
            Recompute(granularity="selective", modules=("layernorm",)),
        ),
        (
            {"granularity": "full", "method": "block", "num_layers": 2},
            Recompute(granularity="full", method="block", num_layers=2),
        ),
    ],
)
def test_a_pinned_recompute_mode_is_the_only_one(value: Any, mode: Recompute) -> None:
    assert {layout.recompute for layout in legal(make_spec(pin={"recompute": value}))} == {mode}


def test_a_pinned_recompute_mode_that_the_model_has_not_breaks_its_rule() -> None:
    spec = make_spec(pin={"recompute": {"granularity": "selective", "modules": ["mla_up_proj"]}})
    assert legal(spec) == []
    assert "recompute" in rules_met(spec)


def test_switching_off_what_the_overlap_needs_switches_it_off_too() -> None:
    found = legal(make_spec(pin={"overlap_grad_reduce": False}))
    assert found
    assert not any(layout.overlap_param_gather for layout in found)
    assert rules_met(make_spec(pin={"overlap_grad_reduce": False, "overlap_param_gather": True})) <= {
        "overlap",
        "tp-in-nvlink-domain",
    }


def test_virtual_stages_follow_from_a_pinned_pipeline_layout() -> None:
    text = "Et*4|t*5|t*4|t*5|t*4|t*5|t*5|t*4L"
    found = legal(make_spec(pin={"pipeline_layout": text}))
    assert {(layout.pp, layout.vpp) for layout in found} == {(8, 1), (4, 2), (2, 4)}


def test_layers_that_do_not_divide_get_balanced_splits() -> None:
    for pp, vpp in ((8, 1), (4, 2)):
        # If the ends take as long as one layer each; the ends of the model may make other splits better.
        assert balanced_pipeline_layout(36, pp, vpp) in uneven_pipeline_layouts(36, pp, vpp, (1.0, 1.0))
    assert None not in {layout.pipeline_layout for layout in legal(make_spec(pin={"pp": 8}))}
    pinned = {layout.pipeline_layout for layout in legal(make_spec(pin={"pp": 4, "vpp": 2}))}
    assert 1 < len(pinned) <= UNEVEN_SPLITS


def test_layers_that_divide_get_the_even_split_and_lighter_ends() -> None:
    found = {layout.pipeline_layout for layout in legal(make_spec(pin={"pp": 4, "vpp": 1}))}
    assert None in found
    assert 1 < len(found) <= 1 + UNEVEN_SPLITS


@settings(max_examples=examples(60), deadline=None)
@given(
    layers=st.integers(2, 96),
    pp=st.integers(2, 16),
    vpp=st.integers(1, 4),
    before=st.floats(0, 2),
    behind=st.floats(0, 8),
)
def test_the_first_uneven_split_is_the_best_of_all_pairs_of_ends(
    layers: int, pp: int, vpp: int, before: float, behind: float
) -> None:
    def load(text: str) -> float:
        sizes = [chunk.num_layers for stage in split_stages(layers, pp, vpp, text) for chunk in stage]
        first, last = end_sizes(text, pp, vpp) or (0, 0)
        return max(*sizes, first + before, last + behind)

    pairs = itertools.product(range(1, layers + 1), range(layers + 1))
    texts = {spread_pipeline_layout(layers, pp, vpp, first, last) for first, last in pairs}
    possible = [text for text in texts if text is not None]
    found = uneven_pipeline_layouts(layers, pp, vpp, (before, behind))
    assert set(found) <= set(possible)
    mean = layers // (pp * vpp) if layers % (pp * vpp) == 0 else None
    rest = [load(text) for text in possible if end_sizes(text, pp, vpp) != (mean, mean)]
    if found:
        assert load(found[0]) == min(rest)
        assert [load(text) for text in found] == sorted(load(text) for text in found)
    elif rest:
        # Nothing that would relieve the even split.
        assert mean is not None
        assert min(rest) >= mean + max(before, behind)


def test_a_heavy_output_layer_makes_the_last_stage_shorter() -> None:
    text = uneven_pipeline_layouts(36, 4, 1, (0.0, 3.2))[0]
    assert [chunk.num_layers for (chunk,) in split_stages(36, 4, 1, text)] == [10, 10, 10, 6]


def test_fewer_recomputed_layers_are_tried_only_where_all_are() -> None:
    full = Recompute(granularity="full", method="uniform", num_layers=1)
    spec = make_spec()
    layout = next(layout for layout in legal(spec) if layout.recompute == full and layout.pp == 4 and layout.vpp == 1)
    longest = max(chunk.num_layers for (chunk,) in split_stages(36, 4, 1, layout.pipeline_layout))
    *fewer, own = lighter_modes(case_of(spec, "mca"), layout)
    assert own == full
    assert fewer == [Recompute(granularity="full", method="block", num_layers=layers) for layers in range(1, longest)]
    assert lighter_modes(case_of(spec, "mca"), changed(layout, recompute=Recompute())) == (Recompute(),)
    assert lighter_modes(case_of(make_spec(pin={"recompute": "full"}), "mca"), layout) == (full,)


def test_offload_is_tried_where_host_memory_is_stated_and_not_pinned() -> None:
    layout = legal(make_spec())[0]
    with_host = replace(make_spec().cluster, host_memory_bytes=10**12)
    assert offloaded(case_of(make_spec(), "mca"), layout) == []
    spec = replace(make_spec(), cluster=with_host)
    assert [one.optimizer_offload_fraction for one in offloaded(case_of(spec, "mca"), layout)] == list(
        OFFLOAD_FRACTIONS
    )
    pinned = replace(make_spec(pin={"optimizer_offload_fraction": 0.0}), cluster=with_host)
    assert offloaded(case_of(pinned, "mca"), layout) == []


def test_seven_gpus_a_node_leave_no_tensor_parallelism_for_32_heads() -> None:
    spec = make_spec(nodes=2, gpus_per_node=7, global_batch_size=56)
    found = legal(spec)
    assert found
    assert {layout.tp for layout in found} == {1}
    assert {layout.pp for layout in found} == {1, 2, 7, 14}
    assert {"heads", "tp-in-nvlink-domain"} <= rules_met(spec)


def test_a_batch_that_no_layout_divides_leaves_the_batch_rule() -> None:
    spec = make_spec(global_batch_size=7, pin={"tp": 1, "pp": 1, "cp": 1})
    assert legal(spec) == []
    assert rules_met(spec) == {"batch"}


def test_fewer_samples_than_a_step_needs_rule_out_wide_data_parallelism() -> None:
    found = legal(make_spec(samples=8))
    assert found
    assert max(layout.dp * layout.micro_batch_size for layout in found) <= 8


@pytest.mark.parametrize(
    ("pin", "rules"),
    [
        ({"tp": 3}, {"world-size"}),
        ({"pp": 5}, {"world-size"}),
        ({"pp": 1, "vpp": 2}, {"tp-in-nvlink-domain", "pipeline-split"}),
        ({"ep": 2}, {"tp-in-nvlink-domain", "experts"}),
        ({"etp": 2}, {"tp-in-nvlink-domain", "experts"}),
        ({"sequence_parallel": True, "tp": 1}, {"pipeline-split", "sequence-parallel", "interleaving", "batch"}),
        ({"pipeline_layout": "Et*5|t*5L"}, {"tp-in-nvlink-domain", "pipeline-split"}),
        ({"dp": 5}, set()),
        ({"gradient_accumulation_steps": 7}, {"tp-in-nvlink-domain", "pipeline-split"}),
    ],
)
def test_a_pin_that_nothing_meets_leaves_rules_or_nothing(pin: dict[str, Any], rules: set[str]) -> None:
    spec = make_spec(pin=pin)
    assert legal(spec) == []
    assert rules_met(spec) <= rules


def test_experts_that_do_not_divide_are_told_and_not_passed_over() -> None:
    assert "experts" in rules_met(make_spec(MOE, pin={"ep": 3, "pp": 1}))


def test_images_are_never_split_by_context_parallelism() -> None:
    spec = make_spec(VISION)
    assert {layout.cp for layout in legal(spec)} == {1}
    assert "context-parallel" in rules_met(spec)


@pytest.mark.parametrize(
    ("model", "modules"),
    [
        (DENSE, {("mlp",)}),
        (MOE, {("moe_act",), ("moe",), ("layernorm",), ("layernorm", "moe_act"), ("layernorm", "moe")}),
        (
            MLA,
            {
                (*norm, *up, *ffn)
                for norm in ((), ("layernorm",))
                for up in ((), ("mla_up_proj",))
                for ffn in ((), ("moe_act",), ("moe",), ("shared_experts",), ("moe_act", "shared_experts"))
            }
            - {()},
        ),
    ],
)
def test_selective_recomputation_is_tried_for_what_the_model_has(model: str, modules: set[tuple[str, ...]]) -> None:
    modes = recompute_modes(case_of(make_spec(model), "mca"))
    assert {mode.modules for mode in modes if mode.granularity == "selective"} == modules
    assert modes[0] == Recompute()
    assert modes[-1].granularity == "full"
    assert len(set(modes)) == len(modes)


@settings(max_examples=examples(25), deadline=None)
@given(
    model=st.sampled_from([DENSE, MOE, VISION]),
    nodes=st.integers(1, 5),
    gpus=st.integers(1, 9),
    batch=st.integers(1, 96),
    length=st.integers(1, 9000),
    pin=st.dictionaries(
        st.sampled_from(["tp", "pp", "cp", "ep", "micro_batch_size", "vpp"]), st.integers(1, 9), max_size=2
    ),
)
def test_any_machine_and_any_pin_give_legal_candidates_or_none(
    model: str, nodes: int, gpus: int, batch: int, length: int, pin: dict[str, int]
) -> None:
    spec = make_spec(model, nodes=nodes, gpus_per_node=gpus, global_batch_size=batch, seq_len=length, pin=pin)
    found = legal(spec)
    assert len(found) == len(set(found))
    for layout in found:
        assert broken_rule(case_of(spec, layout.backend), layout, RULES) is None
        assert {key: getattr(layout, key) for key in pin} == pin
