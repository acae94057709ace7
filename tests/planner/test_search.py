"""The search: nothing lost, nothing invented, and the same plan as a single prediction."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice, pairwise, permutations
from typing import Any

import pytest

from tests.engines.samples import DENSE, LATENT, MIXED, VISION, spec_of
from tests.sizes import some
from topoplan.engines.data_parallel.layouts import sharded_families
from topoplan.engines.megatron.fastest import recomputed
from topoplan.engines.megatron.layouts import (
    OFFLOAD_FRACTIONS,
    lighter_modes,
    offloaded,
    shapes,
    steps,
    uneven_pipeline_layouts,
)
from topoplan.engines.megatron.memory import ShapeStates, predict_memory, shape_states
from topoplan.engines.megatron.rules import RULES
from topoplan.engines.megatron.step import step_terms
from topoplan.engines.rule import broken_rule
from topoplan.errors import LayoutError, ModelError, SpecError
from topoplan.layout.layout import SHARDED_BACKENDS, Layout, Recompute, changed
from topoplan.operators.flops import ends_in_layers
from topoplan.operators.padding import tokens_per_step
from topoplan.planner.kept import from_json, to_json
from topoplan.planner.plan import Candidate, Plan, Ranking
from topoplan.planner.predict import memory_of, predict
from topoplan.planner.rank import CAVEAT_COST, TIE, has_room, is_safe
from topoplan.planner.search import rank
from topoplan.specs.spec import Spec
from topoplan.trainers.case import case_of
from topoplan.trainers.registry import caveats_of, choose_trainer, trainer_refusal

JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": (DENSE, {"nodes": 2}),
    "latent": (LATENT, {"nodes": 16, "gpu": "b200-sxm-180gb", "global_batch_size": 128, "pin": {"cp": 1, "tp": 2}}),
    "experts": (MIXED, {"nodes": 2, "global_batch_size": 16, "pin": {"cp": 1}}),
    "vision": (VISION, {"nodes": 1}),
    "pcie": ("Qwen/Qwen3-1.7B", {"nodes": 1, "gpu": "rtx4090-24gb"}),
}

ONE_SAMPLE = {"micro_batch_size": 1}
"""Makes the searches shorter."""


def spec_named(name: str) -> Spec:
    model, options = JOBS[name]
    return spec_of(model, **options)


@lru_cache
def searched(name: str) -> Ranking:
    return rank(spec_named(name))


@pytest.mark.parametrize("name", some([*JOBS], 3))
def test_every_layout_met_is_counted_once(name: str) -> None:
    counts = searched(name).counts
    assert counts.ranked == len(searched(name).plans) > 0
    assert counts.candidates == counts.illegal + counts.out_of_memory + counts.dominated + counts.ranked


@pytest.mark.parametrize("name", some([*JOBS], 3))
def test_plans_are_legal_and_fit_and_have_ids_of_their_own(name: str) -> None:
    ranking = searched(name)
    for plan in ranking.plans:
        assert plan.fits
        assert broken_rule(case_of(ranking.spec, plan.layout.backend), plan.layout, RULES) is None
        assert plan.layout.world_size == ranking.spec.cluster.world_size
        batch = plan.layout.micro_batch_size * plan.layout.gradient_accumulation_steps * plan.layout.dp
        assert batch == ranking.spec.job.global_batch_size
    ids = Counter(plan.id for plan in ranking.plans)
    assert ids.most_common(1)[0][1] == 1


@pytest.mark.parametrize("name", some([*JOBS], 3))
def test_a_lone_prediction_of_a_ranked_layout_is_the_same_plan(name: str) -> None:
    ranking = searched(name)
    for plan in ranking.plans[:: max(1, len(ranking.plans) // 60)]:
        alone = predict(ranking.spec, plan.layout)
        assert alone.layout == plan.layout
        assert alone.time == plan.time
        assert (alone.mfu, alone.tokens_per_s_per_gpu) == (plan.mfu, plan.tokens_per_s_per_gpu)
        assert alone.memory.device_bytes == plan.memory.device_bytes
        assert alone.memory.host_bytes == plan.memory.host_bytes
        assert all(stage in alone.memory.by_stage for stage in plan.memory.by_stage)
        assert alone.warnings == plan.warnings


@pytest.mark.parametrize("name", some([*JOBS], 3))
def test_the_first_plan_is_within_a_tie_of_the_fastest_or_spares_a_caveat(name: str) -> None:
    plans = searched(name).plans
    for other in plans:
        cost = 1 - CAVEAT_COST if other.caveats and not plans[0].caveats else 1
        assert plans[0].tokens_per_s_per_gpu >= (1 - TIE) * cost * other.tokens_per_s_per_gpu


@pytest.mark.parametrize("name", some([*JOBS], 3))
def test_a_search_for_the_best_plan_alone_finds_it_and_looks_at_less(name: str) -> None:
    whole, found = searched(name), rank(spec_named(name), best_only=True)
    assert found.plans[0] == whole.plans[0]
    assert len(found.plans) < len(whole.plans)
    assert found.counts.candidates == whole.counts.candidates


@pytest.mark.parametrize("name", some([*JOBS], 3))
def test_a_search_for_the_best_plan_with_room_finds_it(name: str) -> None:
    whole, found = searched(name), rank(spec_named(name), best_only=True, with_room=True)
    with_room = [next(filter(has_room, one.plans), None) for one in (whole, found)]
    assert with_room[0] == with_room[1]
    assert found.counts.candidates == whole.counts.candidates


@pytest.mark.parametrize("name", some([*JOBS], 3))
def test_the_safe_plan_is_the_first_without_a_caveat_that_leaves_memory(name: str) -> None:
    found = searched(name)
    safe = [plan for plan in found.plans if not plan.caveats and has_room(plan)]
    assert found.safe == (found.plans.index(safe[0]) if safe else None)


@pytest.mark.parametrize("name", some([*JOBS], 3))
def test_a_search_that_was_kept_is_the_same_ranking(name: str) -> None:
    found, spec = searched(name), spec_named(name)
    kept = from_json(to_json(found, "this"), spec, "this")
    assert kept.plans.layouts == tuple(found.plans.layouts)
    assert kept.plans[::20] == found.plans[::20]
    assert replace(kept, plans=found.plans, spec=found.spec) == found


def test_the_same_search_twice_is_the_same_ranking() -> None:
    first, second = searched("pcie"), rank(spec_named("pcie"))
    assert first.plans == second.plans
    assert first.rejected == second.rejected
    assert first.notes == second.notes


def test_all_that_is_out_is_kept_on_request() -> None:
    spec = spec_of(MIXED, nodes=1, global_batch_size=16, pin={"tp": 2, "cp": 1, "etp": 1} | ONE_SAMPLE)
    everything, some = rank(spec, keep_rejected=True), rank(spec)
    assert everything.plans == some.plans
    # Shapes that cannot fit with any recomputation are evaluated one by one only in the first search.
    assert everything.counts == some.counts
    assert everything.counts.out_of_memory > 0
    assert len(everything.rejected) == everything.counts.illegal + everything.counts.out_of_memory
    assert {out.layout for out in everything.rejected}.isdisjoint(plan.layout for plan in everything.plans)
    assert len(some.rejected) < 20
    assert {rejection.rule for rejection in some.rejected} == {rejection.rule for rejection in everything.rejected}
    assert all(out.reason and (out.fix or out.rule == "memory") for out in everything.rejected)


def test_pins_hold() -> None:
    pins = {"tp": 2, "pp": 2, "micro_batch_size": 1, "recompute": "full", "sequence_parallel": True}
    ranking = rank(spec_of(DENSE, nodes=2, pin=pins))
    assert ranking.plans
    for plan in ranking.plans:
        layout = plan.layout
        assert (layout.tp, layout.pp, layout.micro_batch_size) == (2, 2, 1)
        assert layout.recompute.granularity == "full"
        assert layout.sequence_parallel


@pytest.mark.parametrize(
    ("pin", "backends"),
    [
        ({"zero_stage": 2}, {"deepspeed"}),
        ({"ulysses": 2}, {"deepspeed", "fsdp2"}),
        ({"fused_linear_cross_entropy": True}, {"ddp", "deepspeed", "fsdp2"}),
        ({"ulysses": 1, "tp": 2}, {"mca"}),
    ],
)
def test_what_megatron_does_not_have_is_pinned_for_the_backends_that_have_it(
    pin: dict[str, Any], backends: set[str]
) -> None:
    plans = rank(spec_of("Qwen/Qwen3-0.6B", nodes=1, pin=ONE_SAMPLE | pin)).plans
    assert {plan.layout.backend for plan in plans} == backends
    assert all(getattr(plan.layout, key) == value for plan in plans for key, value in pin.items())


@pytest.mark.parametrize(
    ("backend", "pin", "message"),
    [
        ("mca", {"zero_stage": 2}, "pin zero_stage 2 with backend mca; take backend deepspeed"),
        (
            "fsdp2",
            {"optimizer_offload_fraction": 0.5},
            "pin optimizer_offload_fraction 0.5 with backend fsdp2; take backend mca or megatron",
        ),
    ],
)
def test_a_pin_of_other_backends_is_refused_where_one_is_asked_for(
    backend: str, pin: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        rank(replace(spec_of("Qwen/Qwen3-0.6B", nodes=1, pin=pin), backends=(backend,)))


def test_a_backend_whose_layouts_do_not_have_a_pinned_key_is_out() -> None:
    spec = spec_of("Qwen/Qwen3-0.6B", nodes=1, pin={"zero_stage": 2})
    assert (
        "mca is ruled out: pin zero_stage 2 with backend mca"
        in rank(replace(spec, backends=("mca", "deepspeed"))).crossings
    )


@pytest.mark.parametrize("job", [{"pure_bf16": True}, {"optimizer": "adamw_8bit"}])
def test_what_megatrons_optimizer_does_not_keep_is_searched_elsewhere_and_never_taken_for_it(
    job: dict[str, Any],
) -> None:
    spec = spec_of("Qwen/Qwen3-0.6B", nodes=1, pin=ONE_SAMPLE, **job)
    plans = rank(replace(spec, trainer="swift")).plans
    assert plans
    assert not any(plan.layout.is_megatron for plan in plans)
    for backend in ("mca", "megatron"):
        with pytest.raises(SpecError, match="Megatron's optimizer has no such mode"):
            rank(replace(spec, backends=(backend,)))
        with pytest.raises(SpecError, match="Megatron's optimizer has no such mode"):
            predict(spec, {"backend": backend})


def test_a_pinned_backend_is_searched() -> None:
    ranking = rank(spec_of(DENSE, nodes=1, pin={"backend": "megatron", **ONE_SAMPLE}))
    assert {plan.layout.backend for plan in ranking.plans} == {"megatron"}


def test_tensor_parallel_stays_in_the_node_and_experts_too() -> None:
    for name in ("dense", "experts"):
        for plan in searched(name).plans:
            assert plan.layout.tp <= 8
            assert plan.layout.ep * plan.layout.etp <= 8


def test_an_example_of_each_broken_rule_is_the_simplest_and_in_the_order_of_the_rules() -> None:
    illegal = [rejection for rejection in searched("dense").rejected if rejection.rule != "memory"]
    assert len({rejection.rule for rejection in illegal}) == len(illegal) > 0
    first = next(rejection for rejection in illegal if rejection.rule == "tp-in-nvlink-domain")
    assert first.layout.tp == 16
    assert "16 > NVLink domain of 8" in first.reason


def test_progress_is_told_from_none_to_all() -> None:
    seen: list[tuple[int, int]] = []
    rank(spec_of(DENSE, nodes=1, pin=ONE_SAMPLE), progress=lambda done, total: bool(seen.append((done, total))))  # type: ignore[func-returns-value]
    totals = {total for _, total in seen}
    assert len(totals) == 1
    assert seen[0][0] == 0
    assert seen[-1] == (totals.pop(),) * 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_nothing_that_fits_is_a_result_with_the_nearest_misses() -> None:
    ranking = rank(spec_of("Qwen/Qwen2.5-72B", nodes=1, gpu="rtx4090-24gb"))
    assert ranking.plans == ()
    assert ranking.notes == ()
    misses = [rejection for rejection in ranking.rejected if rejection.rule == "memory"]
    assert misses
    assert all("GiB too much" in miss.reason for miss in misses)


def test_no_legal_layout_is_an_error_that_names_a_rule() -> None:
    with pytest.raises(LayoutError, match=r"no layout is legal.*batch"):
        rank(spec_of(DENSE, nodes=2, global_batch_size=1, pin={"tp": 2, "pp": 1, "cp": 1}))


def test_a_trainer_that_refuses_what_no_other_rule_does_is_the_reason() -> None:
    spec = replace(
        spec_of(DENSE, nodes=2, global_batch_size=64, stage="dpo", pin={"backend": "megatron"}), trainer="swift"
    )
    with pytest.raises(LayoutError, match=r"breaks rule trainer: ms-swift: stage dpo"):
        rank(spec)


def test_a_model_that_the_adapter_lacks_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="gpt_oss"):
        rank(spec_of("openai/gpt-oss-20b"))


def test_a_job_that_the_adapter_does_not_train_is_refused() -> None:
    with pytest.raises(SpecError, match="lora"):
        rank(replace(spec_of(DENSE, finetuning="lora", lora_rank=8), backends=("mca",)))
    with pytest.raises(SpecError, match="lora"):
        rank(spec_of(DENSE, finetuning="lora", pin={"backend": "mca"}))


@pytest.mark.parametrize(("finetuning", "megatron"), [("lora", {"megatron"}), ("qlora", set())])
def test_adapters_are_searched_with_every_backend_that_some_trainer_has_for_them(
    finetuning: str, megatron: set[str]
) -> None:
    ranking = rank(spec_of(DENSE, nodes=1, finetuning=finetuning, lora_rank=8, pin=ONE_SAMPLE))
    assert {plan.layout.backend for plan in ranking.plans} == {"ddp", "deepspeed", "fsdp2"} | megatron


def test_adapters_of_preferences_are_searched_where_files_are_written() -> None:
    found = rank(spec_of("Qwen/Qwen3-1.7B", nodes=1, finetuning="lora", stage="dpo"))
    assert "megatron" not in {plan.layout.backend for plan in found.plans}


def test_what_a_search_of_adapters_finds_is_the_best_of_all_backends() -> None:
    spec = spec_of("Qwen/Qwen3-32B", nodes=1, finetuning="lora", pin=ONE_SAMPLE)
    plans = rank(spec).plans
    assert plans == rank(replace(spec, backends=("ddp", "deepspeed", "fsdp2", "megatron"))).plans
    assert plans[0].layout.backend == "megatron"


def test_adapters_are_searched_with_megatron_where_it_is_asked_for_and_only_as_ms_swift_has_them() -> None:
    lora = spec_of(MIXED, nodes=1, finetuning="lora", pin=ONE_SAMPLE)
    lora = replace(lora, backends=("megatron", "fsdp2"))
    ranking = rank(lora)
    theirs = [plan.layout for plan in ranking.plans if plan.layout.is_megatron]
    assert theirs
    assert all(layout.etp == 1 and choose_trainer(lora, layout).name == "swift" for layout in theirs)
    assert any(sentence.startswith("fsdp2") for sentence in ranking.crossings)


def test_a_model_that_mcore_bridge_lacks_has_no_adapters_with_megatron() -> None:
    with pytest.raises(ModelError, match="mcore_bridge does not build 'mixtral'"):
        rank(replace(spec_of("mistralai/Mixtral-8x7B-v0.1", finetuning="lora"), backends=("megatron",)))


def test_only_what_a_trainer_can_run_is_ranked() -> None:
    spec = spec_of(DENSE, nodes=1, pin={"backend": "fsdp2", **ONE_SAMPLE})
    assert any(plan.layout.ulysses > 1 for plan in rank(spec).plans)
    theirs = rank(replace(spec, trainer="llamafactory"))
    assert theirs.plans
    assert all(plan.layout.ulysses == 1 for plan in theirs.plans)
    assert "trainer" in {out.rule for out in theirs.rejected}
    # The adapter's trainer too: it waits forever if all samples together do not fill a batch.
    few = spec_of(DENSE, nodes=1, samples=40, global_batch_size=64, pin={"pp": 1, "tp": 1, "micro_batch_size": 1})
    with pytest.raises(LayoutError, match="breaks rule trainer: LLaMA-Factory: 40 samples"):
        rank(replace(few, trainer="llamafactory"))


def test_a_trainer_is_searched_in_its_own_form_of_megatron() -> None:
    swift = replace(spec_of(DENSE, nodes=1, pin=ONE_SAMPLE), trainer="swift")
    assert {plan.layout.backend for plan in rank(swift).plans} == {"megatron"}
    lora = replace(spec_of(DENSE, nodes=1, finetuning="lora", pin=ONE_SAMPLE), trainer="swift")
    assert {plan.layout.backend for plan in rank(lora).plans} == {"ddp", "deepspeed", "fsdp2", "megatron"}
    trinity = replace(spec_of(DENSE, nodes=1, pin=ONE_SAMPLE), trainer="trinity")
    assert {plan.layout.backend for plan in rank(trinity).plans} == {"fsdp2"}
    with pytest.raises(SpecError, match="trinity has no backend ddp; expected fsdp2"):
        rank(replace(trinity, backends=("ddp",)))


def test_of_splits_that_differ_in_nothing_else_the_fastest_is_ranked() -> None:
    spec = spec_of(
        DENSE, nodes=1, pin={"pp": 4, "tp": 1, "micro_batch_size": 1, "recompute": "none", "cp": 1, "vpp": 1}
    )
    (plan,) = rank(spec).plans
    splits = [None, *uneven_pipeline_layouts(spec.model.num_layers, 4, 1, ends_in_layers(spec.model, spec.job))]
    all_of_them = [predict(spec, changed(plan.layout, pipeline_layout=split)) for split in splits]
    assert plan.time.step_s == min(one.time.step_s for one in all_of_them if one.fits)
    assert plan.layout.pipeline_layout is not None
    assert len({one.time.step_s for one in all_of_them}) > 1


def on_smaller_cards(spec: Spec, gib: float, host_memory_bytes: int | None = None) -> Spec:
    gpu = replace(spec.cluster.gpu, memory_bytes=int(gib * 2**30))
    return replace(spec, cluster=replace(spec.cluster, gpu=gpu, host_memory_bytes=host_memory_bytes))


SMALL: dict[str, Spec] = {
    "dense": on_smaller_cards(spec_of(DENSE, nodes=1, global_batch_size=128, pin={"cp": 1, "micro_batch_size": 1}), 30),
    "dense, offload": on_smaller_cards(
        spec_of(DENSE, nodes=1, global_batch_size=128, pin={"tp": 2, "cp": 1} | ONE_SAMPLE), 30, 10**12
    ),
    "experts, offload": on_smaller_cards(
        spec_of(MIXED, nodes=2, global_batch_size=16, pin={"tp": 2, "cp": 1, "etp": 1} | ONE_SAMPLE), 45, 2 * 10**12
    ),
    "dense layers before experts": spec_of(
        LATENT,
        nodes=16,
        gpu="b200-sxm-180gb",
        global_batch_size=256,
        mtp_num_layers=1,
        pin={"cp": 1, "tp": 2, "ep": 32},
    ),
    "vision tower in front, offload": on_smaller_cards(
        spec_of(VISION, nodes=1, global_batch_size=16, freeze_vision_tower=False, pin={"cp": 1, "tp": 1}), 40, 10**12
    ),
}


def all_degrees(layout: Layout) -> tuple[object, ...]:
    """Return the values by which a search ranks layouts separately."""
    degrees = (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.etp)
    return (*degrees, layout.micro_batch_size, layout.sequence_parallel)


def shares(spec: Spec, layout: Layout) -> list[Layout]:
    """Return the layout with every offload fraction, starting with none."""
    return [layout, *offloaded(case_of(spec, "mca"), layout)]


def with_all_modes(spec: Spec) -> Iterator[tuple[Layout, ShapeStates, tuple[Recompute, ...]]]:
    """Yield every legal layout of a spec, without its mode: with its states and its possible recompute modes."""
    case = case_of(spec, "mca")
    for shape, broken_shape in shapes(case, "mca"):
        states = {} if broken_shape else {layout.pipeline_layout: shape_states(case, layout) for layout in shape}
        for layouts, modes, broken in steps(case, shape) if states else ():
            for layout in layouts if not broken else ():
                yield layout, states[layout.pipeline_layout], (layout.recompute, *modes)


@lru_cache
def all_that_fit(name: str) -> list[Candidate]:
    """Return every layout of a spec that fits, under every mode and offload."""
    spec = SMALL[name]
    case, tokens = case_of(spec, "mca"), tokens_per_step(spec.job) / spec.cluster.world_size
    found = []
    for layout, states, modes in with_all_modes(spec):
        for mode in modes:
            for lighter in lighter_modes(case, changed(layout, recompute=mode)):
                for one in shares(spec, changed(layout, recompute=lighter)):
                    memory = predict_memory(case, one, states=states, until_over=True)
                    if memory.fits:
                        caveats = caveats_of(spec, one, choose_trainer(spec, one).trainer)
                        found.append(Candidate(one, memory, tokens / step_terms(case, one).step_s, caveats))
    return found


@pytest.mark.parametrize("name", some([*SMALL], 3))
def test_of_all_ways_to_make_a_set_of_degrees_fit_the_fastest_is_ranked(name: str) -> None:
    fastest: dict[tuple[object, ...], float] = {}
    for one in all_that_fit(name):
        degrees = all_degrees(one.layout)
        fastest[degrees] = max(one.tokens_per_s_per_gpu, fastest.get(degrees, 0.0))
    ranking = rank(SMALL[name])
    found: dict[tuple[object, ...], float] = {}
    for plan in ranking.plans:
        degrees = all_degrees(plan.layout)
        found[degrees] = max(plan.tokens_per_s_per_gpu, found.get(degrees, 0.0))
    assert 0 <= ranking.counts.ranked - len(found) <= 1  # the safe plan may be a slower variant
    # Data-parallel and optimizer time are those of the busiest rank, which may change with one more recomputed layer,
    # so more work can come out faster by less than a thousandth.
    assert found == pytest.approx(fastest, rel=1e-3)


@pytest.mark.parametrize("name", some([*SMALL], 3))
@pytest.mark.parametrize("with_room", [False, True])
def test_the_safe_plan_is_the_fastest_of_all_layouts_that_leave_room_slower_variants_included(
    name: str, *, with_room: bool
) -> None:
    speeds = [one.tokens_per_s_per_gpu for one in all_that_fit(name) if is_safe(one)]
    ranking = rank(SMALL[name], best_only=with_room, with_room=with_room)
    if ranking.safe is None:
        assert not speeds
        return
    safe = ranking.plans[ranking.safe]
    assert is_safe(safe)
    assert safe == predict(ranking.spec, safe.layout, all_stages=False)
    # Within a tie, the plan that needs less memory is first.
    assert safe.tokens_per_s_per_gpu >= max(speeds) * (1 - TIE)


def test_a_layout_with_room_is_ranked_though_a_faster_variant_fits() -> None:
    spec = spec_of("Qwen/Qwen3-8B", nodes=1, gpu="rtx4090-24gb", pin={"tp": 8, "micro_batch_size": 1})
    ranking = rank(spec)
    assert ranking.safe is not None
    degrees = [all_degrees(layout) for layout in ranking.plans.layouts]
    assert degrees.count(degrees[ranking.safe]) == 2


@pytest.mark.parametrize("name", some([*SMALL], 3))
def test_fewer_recomputed_layers_never_need_less_memory(name: str) -> None:
    spec, compared = SMALL[name], 0
    case = case_of(spec, "mca")
    for layout, states, modes in with_all_modes(spec):
        for one in shares(spec, changed(layout, recompute=modes[-1])):
            lighter = lighter_modes(case, one)
            needed = [
                predict_memory(case, changed(one, recompute=mode), states=states).device_bytes for mode in lighter
            ]
            compared += len(needed) - 1
            assert all(less >= more * (1 - 1e-12) for less, more in pairwise(needed)), one.id
    assert compared > 100


@pytest.mark.parametrize("name", some([*SMALL], 3))
def test_a_mode_that_recomputes_more_needs_no_more_memory_and_is_slower(name: str) -> None:
    spec, compared = SMALL[name], 0
    case = case_of(spec, "mca")
    for layout, states, modes in islice(with_all_modes(spec), 0, None, 7):
        ways = [changed(layout, recompute=mode) for mode in modes]
        needed = [predict_memory(case, way, states=states).device_bytes for way in ways]
        seconds = [step_terms(case, way).step_s for way in ways]
        for less, more in permutations(range(len(ways)), 2):
            if recomputed(modes[less]) < recomputed(modes[more]):
                compared += 1
                assert needed[more] <= needed[less] * (1 + 1e-12), (ways[less].id, ways[more].id)
                assert seconds[more] > seconds[less], (ways[less].id, ways[more].id)
    assert compared > 20


@pytest.mark.parametrize("name", some(["dense", "latent", "experts", "pcie"], 2))
def test_no_plan_recomputes_more_layers_than_it_must(name: str) -> None:
    ranking = searched(name)
    fewer = [plan for plan in ranking.plans if plan.layout.recompute.method == "block"]
    assert fewer or name in ("experts", "latent")
    for plan in fewer[:: max(1, len(fewer) // 25)]:
        mode = plan.layout.recompute
        assert mode.num_layers is not None
        for count in range(mode.num_layers):
            less = Recompute() if count == 0 else replace(mode, num_layers=count)
            assert not memory_of(case_of(ranking.spec, plan.layout.backend), changed(plan.layout, recompute=less)).fits


def test_no_plan_offloads_more_than_it_must() -> None:
    spec = spec_of("Qwen/Qwen3-8B", nodes=1, gpu="a100-sxm-40gb", pin={"cp": 1, "micro_batch_size": 1})
    spec = replace(spec, cluster=replace(spec.cluster, host_memory_bytes=10**12))
    away = [plan for plan in rank(spec).plans if plan.layout.optimizer_offload_fraction]
    assert away
    for plan in away[:: max(1, len(away) // 25)]:
        for fraction in (0.0, *OFFLOAD_FRACTIONS):
            if fraction >= plan.layout.optimizer_offload_fraction:
                break
            less = memory_of(
                case_of(spec, plan.layout.backend), changed(plan.layout, optimizer_offload_fraction=fraction)
            )
            assert not less.fits or plan.layout.recompute.method == "block"


def test_where_host_memory_is_short_the_nearest_miss_is_the_one_that_lacks_least() -> None:
    spec = spec_of("Qwen/Qwen2.5-72B", nodes=1, cluster={"host_memory": "512GiB"}, global_batch_size=8)
    spec = replace(spec, job=replace(spec.job, pin={"backend": "deepspeed"}))
    nearest = rank(spec).rejected[0].layout
    # With parameters in host memory too, more of it would be missing.
    assert (nearest.zero_stage, nearest.offload_optimizer, nearest.offload_param) == (3, True, False)


def test_a_search_that_is_stopped_returns_what_it_has() -> None:
    spec, whole = spec_named("dense"), searched("dense")
    part = rank(spec, progress=lambda done, total: done > total // 2)
    assert 0.4 < part.searched < 0.6
    assert whole.searched == 1.0
    assert 0 < part.counts.candidates < whole.counts.candidates
    assert {plan.id for plan in part.plans} < {plan.id for plan in whole.plans}


def test_a_search_that_is_stopped_at_once_is_empty_and_no_error() -> None:
    nothing = rank(spec_named("dense"), progress=lambda done, total: True)
    assert (nothing.plans, nothing.counts.candidates, nothing.searched) == ((), 0, 0.0)


SHARDED_JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("Qwen/Qwen3-4B", {"nodes": 2, "gpu": "a100-sxm-40gb", "cluster": {"host_memory": "1TiB"}}),
    "lora": (DENSE, {"nodes": 1, "gpu": "rtx4090-24gb", "finetuning": "lora", "cluster": {"host_memory": "512GiB"}}),
    "qlora": (DENSE, {"nodes": 1, "gpu": "rtx4090-24gb", "finetuning": "qlora"}),
    "freeze": (DENSE, {"nodes": 2, "gpu": "a100-sxm-40gb", "finetuning": "freeze"}),
    "long": ("Qwen/Qwen3-1.7B", {"nodes": 1, "seq_len": 32_768, "global_batch_size": 16}),
}
STATES = ("backend", "zero_stage", "sharding", "ulysses", "micro_batch_size")
"""Keys by which plans are ranked separately."""


@lru_cache
def sharded_ranking(name: str) -> Ranking:
    model, options = SHARDED_JOBS[name]
    return rank(replace(spec_of(model, **{"global_batch_size": 32} | options), backends=SHARDED_BACKENDS))


@lru_cache
def sharded_predictions(name: str) -> tuple[Plan, ...]:
    """Return every legal layout of the three backends, each predicted on its own."""
    spec = sharded_ranking(name).spec
    families = [family for backend in SHARDED_BACKENDS for family in sharded_families(case_of(spec, backend), backend)]
    return tuple(
        predict(spec, layout)
        for layouts, broken in families
        for layout in layouts
        if broken is None and trainer_refusal(spec, layout) is None
    )


@pytest.mark.parametrize("name", SHARDED_JOBS)
def test_of_layouts_that_split_data_alone_the_fastest_that_fits_is_ranked_for_each_way_to_split(name: str) -> None:
    best: dict[tuple[Any, ...], Plan] = {}
    for plan in sharded_predictions(name):
        way = tuple(getattr(plan.layout, key) for key in STATES)
        if plan.fits and (way not in best or plan.time.step_s < best[way].time.step_s):
            best[way] = plan
    plans = sharded_ranking(name).plans
    # Reversed, because a slower variant that is the safe plan comes after the fastest.
    found = {tuple(getattr(plan.layout, key) for key in STATES): plan for plan in reversed(plans)}
    assert 0 <= len(plans) - len(found) <= 1 < len(found)
    assert found.keys() == best.keys()
    for way, plan in found.items():
        assert plan.fits
        assert plan.time.step_s == best[way].time.step_s
        assert plan.memory.device_bytes in {
            one.memory.device_bytes for one in sharded_predictions(name) if one.layout == plan.layout
        }


@pytest.mark.parametrize("name", SHARDED_JOBS)
def test_the_first_plan_that_splits_data_alone_is_within_a_tie_of_the_fastest_of_all(name: str) -> None:
    fastest = min(plan.time.step_s for plan in sharded_predictions(name) if plan.fits)
    assert sharded_ranking(name).plans[0].time.step_s * (1 - TIE) <= fastest


@pytest.mark.parametrize("name", SHARDED_JOBS)
def test_layouts_that_split_data_alone_are_counted_once(name: str) -> None:
    counts, predictions = sharded_ranking(name).counts, sharded_predictions(name)
    assert counts.candidates - counts.illegal == len(predictions)
    assert counts.candidates == counts.illegal + counts.out_of_memory + counts.dominated + counts.ranked
    assert 0 < counts.ranked <= sum(plan.fits for plan in predictions)


@pytest.mark.parametrize("name", SHARDED_JOBS)
def test_what_is_rejected_for_its_memory_does_not_fit(name: str) -> None:
    spec = sharded_ranking(name).spec
    for rejection in sharded_ranking(name).rejected:
        if rejection.rule == "memory":
            assert not predict(spec, rejection.layout).fits
