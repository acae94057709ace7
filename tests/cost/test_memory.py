"""Memory of the stages: measured runs, and what every switch is worth."""

from dataclasses import replace
from typing import Any

import pytest

from tests.cost.samples import (
    DENSE,
    LATENT,
    MIXED,
    TIED,
    VISION,
    layout_of,
    layout_of_run,
    measured_runs,
    memory_of,
    spec_of,
    spec_of_run,
    stage_of,
)
from topoplan import catalog
from topoplan.backends.megatron import TRAITS
from topoplan.cost.activations import kept_activations, layer_activations
from topoplan.cost.memory import predict_memory
from topoplan.cost.params import mtp_layer
from topoplan.cost.profile import profile_of
from topoplan.cost.shard import shard_of
from topoplan.cost.states import stage_parameters
from topoplan.planner.measured import MeasuredRun
from topoplan.specs.config_json import model_from_config

GIB = 2**30
RUNS = [run for run in measured_runs("SimuMax B200") if run.measured.stage_allocated_gib]
STAGES = [(run, stage) for run in RUNS for stage in range(len(run.measured.stage_allocated_gib))]
ALLOWED_ERROR = 0.01


@pytest.mark.parametrize(("run", "stage"), STAGES, ids=[f"{run.id}-{stage}" for run, stage in STAGES])
def test_a_measured_stage_is_predicted_within_one_percent(run: MeasuredRun, stage: int) -> None:
    measured = run.measured.stage_allocated_gib[stage]
    predicted = stage_of(spec_of_run(run), layout_of_run(run), stage).allocated_bytes / GIB
    assert predicted == pytest.approx(measured, rel=ALLOWED_ERROR)


def test_every_measured_row_says_where_it_is_from() -> None:
    assert len(STAGES) == 8
    assert all(run.source and run.notes for run in RUNS)


CASES: list[tuple[str, dict[str, Any]]] = [
    (DENSE, {}),
    (DENSE, {"tp": 4, "pp": 4, "vpp": 3}),
    (DENSE, {"tp": 2, "cp": 2, "recompute": "full"}),
    (MIXED, {"tp": 2, "pp": 4, "ep": 8, "recompute": {"granularity": "selective", "modules": ["moe"]}}),
    (LATENT, {"pp": 4, "ep": 8, "pipeline_layout": "Et*15|t*15|t*15|t*16L"}),
    (VISION, {"tp": 2, "pp": 2}),
]


@pytest.mark.parametrize(("model", "form"), CASES)
def test_the_parts_of_a_stage_add_up_to_what_it_allocates(model: str, form: dict[str, Any]) -> None:
    spec = spec_of(model)
    memory = memory_of(spec, layout_of(spec, **form))
    for stage in memory.by_stage:
        assert sum(stage.parts_bytes.values()) == pytest.approx(stage.allocated_bytes)
        assert all(size >= 0 for size in stage.parts_bytes.values())
    assert memory.allocated_bytes == max(stage.allocated_bytes for stage in memory.by_stage)


@pytest.mark.parametrize("mtp_num_layers", [0, 1, 2])
@pytest.mark.parametrize(("model", "form"), CASES[:4])
def test_the_peak_is_the_largest_moment_and_a_moment_the_sum_of_its_terms(
    model: str, form: dict[str, Any], mtp_num_layers: int
) -> None:
    spec = spec_of(model, mtp_num_layers=mtp_num_layers)
    for stage in memory_of(spec, layout_of(spec, **form)).by_stage:
        worst = max(stage.moments, key=lambda moment: moment.total_bytes)
        assert stage.parts_bytes[f"peak ({worst.name})"] == worst.total_bytes
        for moment in stage.moments:
            assert sum(size for _, size in moment.terms_bytes) == moment.total_bytes
            assert all(size >= 0 for name, size in moment.terms_bytes if name != "activations freed by then")


def test_the_search_does_without_the_moments() -> None:
    spec = spec_of(DENSE)
    traits, profile = TRAITS["megatron"], profile_of(spec.cluster.gpu)
    memory = predict_memory(spec.model, spec.cluster, spec.job, layout_of(spec), traits, profile)
    assert memory.by_stage[0].moments == ()
    assert stage_of(spec, layout_of(spec)).moments != ()


@pytest.mark.parametrize(("model", "form"), CASES)
def test_distinct_stages_hold_the_worst_one(model: str, form: dict[str, Any]) -> None:
    spec = spec_of(model)
    layout = layout_of(spec, **form)
    some = predict_memory(
        spec.model,
        spec.cluster,
        spec.job,
        layout,
        TRAITS["megatron"],
        profile_of(spec.cluster.gpu),
        all_stages=False,
    )
    everything = memory_of(spec, layout)
    assert len(everything.by_stage) == layout.pp
    assert (some.device_bytes, some.host_bytes) == (everything.device_bytes, everything.host_bytes)


def test_the_states_are_2_bytes_of_weight_4_of_gradient_and_12_sharded() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, tp=2, cp=2, pp=2)
    elements = stage_parameters(spec.model, spec.job, layout, TRAITS["megatron"], 0).total
    parts = stage_of(spec, layout).parts_bytes
    assert parts["weights"] == 2 * elements
    assert parts["gradients"] == 4 * elements
    assert parts["optimizer"] == 12 * elements / (layout.dp * layout.cp)


def test_fp16_training_keeps_the_same_states_as_bf16() -> None:
    half, bfloat = spec_of(DENSE, precision="fp16"), spec_of(DENSE)
    sizes = [stage_of(spec, layout_of(spec, tp=2, pp=2)).parts_bytes for spec in (half, bfloat)]
    for part in ("weights", "gradients", "optimizer", "activations"):
        assert sizes[0][part] == sizes[1][part]


def test_without_the_distributed_optimizer_every_rank_holds_all_of_it() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, tp=2)
    alone = stage_of(spec, replace(layout, distributed_optimizer=False)).parts_bytes
    assert alone["optimizer"] == layout.dp * stage_of(spec, layout).parts_bytes["optimizer"]


def test_experts_are_sharded_over_their_own_data_parallel_group() -> None:
    spec = spec_of(MIXED)
    layout = layout_of(spec, tp=2, ep=8, etp=1)
    parameters = stage_parameters(spec.model, spec.job, layout, TRAITS["megatron"], 0)
    assert layout.expert_dp == 32 // 8
    expected = 12 * (parameters.dense / 16 + parameters.expert / 4)
    assert stage_of(spec, layout).parts_bytes["optimizer"] == expected


def test_bf16_gradients_take_half_and_are_cast_for_the_optimizer_step() -> None:
    spec = spec_of(DENSE, seq_len=512, global_batch_size=32)
    layout = layout_of(spec, tp=8, pp=4, recompute="full")  # one replica: the whole optimizer on every rank
    full, half = stage_of(spec, layout), stage_of(spec, replace(layout, grad_reduce_in_fp32=False))
    elements = full.parts_bytes["gradients"] / 4
    assert half.parts_bytes["gradients"] == 2 * elements
    # fp32 gradients of the shard are made when the activations are gone.
    assert half.parts_bytes["peak (optimizer step)"] + half.parts_bytes["activations"] == pytest.approx(4 * elements)


def test_a_precision_aware_optimizer_keeps_two_bytes_of_the_master_weight() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, tp=2)
    plain = stage_of(spec, layout).parts_bytes["optimizer"]
    assert stage_of(spec, replace(layout, precision_aware_optimizer=True)).parts_bytes["optimizer"] == plain * 10 / 12
    low = spec_of(DENSE, precision="fp8")
    assert stage_of(low, replace(layout, precision_aware_optimizer=True)).parts_bytes["optimizer"] == plain


@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_an_offloaded_optimizer_moves_to_the_host_with_its_gradient(fraction: float) -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, backend="megatron", tp=2, pp=2, precision_aware_optimizer=True)
    moved = replace(layout, optimizer_offload_fraction=fraction)
    on_card = stage_of(spec, replace(layout, precision_aware_optimizer=False)).parts_bytes["optimizer"]
    memory = memory_of(spec, moved)
    assert memory.by_stage[0].parts_bytes["optimizer"] == on_card * (1 - fraction)
    # fp32 weight, two moments and gradient of the rank's shard, and fp32 weights from before there were shards: for
    # each of the eight ranks of a node.
    shard = max(stage.parts_bytes["optimizer"] for stage in memory_of(spec, layout).by_stage) / 10
    assert memory.host_bytes == pytest.approx(8 * fraction * (16 + 4 * layout.dp) * shard)
    assert memory_of(spec, layout).host_bytes == 0


def test_offload_without_the_precision_aware_optimizer_leaves_the_fp32_weights() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, tp=2)
    plain, moved = stage_of(spec, layout), stage_of(spec, replace(layout, optimizer_offload_fraction=1.0))
    assert plain.allocated_bytes - moved.allocated_bytes == pytest.approx(plain.parts_bytes["optimizer"] * 8 / 12)
    half = stage_of(spec, replace(layout, optimizer_offload_fraction=0.5))
    assert half.parts_bytes["optimizer"] == pytest.approx(plain.parts_bytes["optimizer"] * 8 / 12)


def test_what_is_not_offloaded_is_copied_whole_and_stays() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, tp=2)
    parts = {
        fraction: stage_of(spec, replace(layout, optimizer_offload_fraction=fraction)).parts_bytes
        for fraction in (0.0, 0.25, 1.0)
    }
    assert parts[0.25]["copies for offload"] == pytest.approx(0.75 * parts[0.0]["gradients"])  # fp32 both
    assert all("copies for offload" not in parts[fraction] for fraction in (0.0, 1.0))


def test_bf16_gradients_are_cast_for_the_optimizer_that_offload_starts_from() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(
        spec, backend="megatron", tp=2, grad_reduce_in_fp32=False, optimizer_offload_fraction=1.0, recompute="full"
    )

    def moments(precise: bool) -> set[str]:
        one = replace(layout, precision_aware_optimizer=precise)
        return {moment.name for moment in stage_of(spec, one).moments}

    assert "optimizer step" in moments(precise=False)
    assert "optimizer step" not in moments(precise=True)


def test_low_precision_caches_two_copies_of_the_blocks_and_none_of_the_ends() -> None:
    layout = layout_of(spec_of(DENSE), tp=2)
    plain = stage_of(spec_of(DENSE), layout).parts_bytes["weights"]
    cached = stage_of(spec_of(DENSE, precision="fp8"), layout).parts_bytes["weights"] - plain
    ends = 2 * 151_936 * 4096 / 2 + 4096
    assert cached == pytest.approx(2 * (plain / 2 - ends), rel=1e-3)


def test_frozen_parts_have_weights_alone() -> None:
    frozen = spec_of(VISION)
    whole = spec_of(VISION, freeze_vision_tower=False, freeze_multi_modal_projector=False)
    tower = frozen.model.vision
    assert tower is not None
    layout = layout_of(frozen, tp=2, pp=2)
    still, moving = stage_of(frozen, layout).parts_bytes, stage_of(whole, layout).parts_bytes
    elements = tower.encoder_parameters + tower.projector_parameters
    assert moving["weights"] == still["weights"]
    assert moving["gradients"] - still["gradients"] == 4 * elements
    assert moving["optimizer"] - still["optimizer"] == pytest.approx(12 * elements / layout.dp)
    assert "vision activations" not in still
    assert moving["vision activations"] > 0


def test_a_trained_projector_alone_needs_no_activations_of_the_tower() -> None:
    spec = spec_of(VISION, freeze_multi_modal_projector=False)
    assert "vision activations" not in stage_of(spec, layout_of(spec, tp=2)).parts_bytes


def test_the_vision_tower_is_held_for_every_micro_batch_in_flight_of_the_first_chunk() -> None:
    spec = spec_of(VISION, freeze_vision_tower=False, global_batch_size=128)
    one = stage_of(spec, layout_of(spec)).parts_bytes["vision activations"]
    plain = stage_of(spec, layout_of(spec, pp=2)).parts_bytes["vision activations"]
    interleaved = stage_of(spec, layout_of(spec, pp=2, vpp=2)).parts_bytes["vision activations"]
    assert plain == 2 * one
    assert interleaved == 4 * one


def test_the_tied_embedding_has_states_on_both_ends_of_the_pipeline() -> None:
    spec = spec_of(TIED)
    table = spec.model.vocab_size * spec.model.hidden_size
    first, last = (stage_of(spec, layout_of(spec, pp=2), rank).parts_bytes for rank in (0, 1))
    assert first["gradients"] + last["gradients"] == pytest.approx(
        stage_of(spec, layout_of(spec)).parts_bytes["gradients"] + 4 * table
    )


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_stage_keeps_the_activations_of_pp_micro_batches_at_first_and_one_at_last(pp: int) -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, pp=pp)
    a_layer = layer_activations(spec.model, spec.model.layers[0], shard_of(layout, spec.job)).saved_bytes
    for rank in range(pp):
        expected = (pp - rank) * 36 / pp * a_layer
        assert stage_of(spec, layout, rank).parts_bytes["activations"] == pytest.approx(expected)


def test_the_loss_is_a_peak_of_the_last_stage_with_a_large_vocabulary() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, pp=4)
    logits = 4096 * 151_936
    peaks = [next(name for name in s.parts_bytes if name.startswith("peak")) for s in memory_of(spec, layout).by_stage]
    assert peaks[-1] == "peak (loss)"
    assert "peak (loss)" not in peaks[:-1]
    fused = stage_of(spec, replace(layout, cross_entropy_fusion=True), 3)
    plain = stage_of(spec, layout, 3)
    assert plain.parts_bytes["peak (loss)"] - fused.parts_bytes["peak (loss)"] == 4 * logits


def full(method: str, num_layers: int) -> dict[str, Any]:
    return {"granularity": "full", "method": method, "num_layers": num_layers}


def test_uniform_recomputation_keeps_one_input_a_group_and_brings_back_the_group() -> None:
    spec = spec_of(DENSE)
    layouts = {n: layout_of(spec, pp=2, recompute=full("uniform", n)) for n in (1, 3)}
    one = layer_activations(spec.model, spec.model.layers[0], shard_of(layouts[1], spec.job))
    sizes = {n: stage_of(spec, layout).parts_bytes for n, layout in layouts.items()}
    assert sizes[1]["activations"] == 2 * 18 * one.input_bytes
    assert sizes[3]["activations"] == 2 * 6 * one.input_bytes
    assert sizes[3]["peak (backward)"] - sizes[1]["peak (backward)"] == pytest.approx(2 * one.saved_bytes)


def test_block_recomputation_recomputes_the_first_layers_of_every_chunk() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, pp=2, recompute=full("block", 10))
    one = layer_activations(spec.model, spec.model.layers[0], shard_of(layout, spec.job))
    parts = stage_of(spec, layout).parts_bytes
    assert parts["activations"] == pytest.approx(2 * (10 * one.input_bytes + 8 * one.saved_bytes))
    everything = stage_of(spec, layout_of(spec, pp=2, recompute=full("block", 18))).parts_bytes
    uniform = stage_of(spec, layout_of(spec, pp=2, recompute="full")).parts_bytes
    assert everything["activations"] == uniform["activations"]
    # The eight layers that keep everything are freed before the first one is recomputed.
    plain = stage_of(spec, layout_of(spec, pp=2)).parts_bytes
    assert parts["peak (backward)"] == plain["peak (backward)"]
    assert everything["peak (backward)"] == uniform["peak (backward)"]


def test_recomputation_saves_more_the_more_it_repeats() -> None:
    spec = spec_of(DENSE)
    modes: list[Any] = ["none", {"granularity": "selective", "modules": ["mlp"]}, full("block", 30), "full"]
    sizes = [stage_of(spec, layout_of(spec, recompute=mode)).allocated_bytes for mode in modes]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("model", [DENSE, MIXED])
def test_longer_sequences_and_larger_micro_batches_need_more(model: str) -> None:
    sizes = []
    for seq_len, micro_batch in ((2048, 1), (4096, 1), (4096, 2), (8192, 2)):
        spec = spec_of(model, seq_len=seq_len)
        sizes.append(memory_of(spec, layout_of(spec, tp=2, micro_batch_size=micro_batch)).device_bytes)
    assert sizes == sorted(sizes)


def test_reserved_is_above_allocated_and_device_above_reserved() -> None:
    spec = spec_of(DENSE)
    memory = memory_of(spec, layout_of(spec, tp=2, pp=2))
    assert memory.allocated_bytes < memory.reserved_bytes < memory.device_bytes
    assert memory.capacity_bytes == spec.cluster.gpu.memory_bytes


def test_a_plan_fits_up_to_the_margin_and_not_beyond() -> None:
    spec = spec_of(DENSE)
    layout = layout_of(spec, tp=2)
    device = memory_of(spec, layout).device_bytes
    room = 1.0 - device / spec.cluster.gpu.memory_bytes
    for margin, fits in ((room - 0.001, True), (room + 0.001, False)):
        narrow = spec_of(DENSE, cluster={"margin": margin})
        assert memory_of(narrow, layout).fits is fits
        assert memory_of(narrow, layout).margin_bytes == pytest.approx(margin * spec.cluster.gpu.memory_bytes)


def test_the_margin_is_the_error_band_unless_the_spec_has_one() -> None:
    dense, mixed = spec_of(DENSE), spec_of(MIXED)
    profile = profile_of(dense.cluster.gpu)
    for spec, layout, band in (
        (dense, layout_of(dense, tp=2), profile.memory_band),
        (mixed, layout_of(mixed, ep=8), profile.moe_memory_band),
    ):
        memory = memory_of(spec, layout)
        assert memory.margin_bytes == pytest.approx(band * memory.device_bytes)
    assert profile.memory_band < profile.moe_memory_band


def test_dropout_keeps_a_byte_an_element_twice_a_layer() -> None:
    config = catalog.model_config(DENSE) | {"model_type": "gpt2"}
    with_masks, without = (
        replace(spec_of(DENSE), model=model_from_config(config | {"resid_pdrop": rate}, name="x", where="x"))
        for rate in (0.1, 0.0)
    )
    assert model_from_config(config, name="x", where="x").hidden_dropout == 0.1
    layout = layout_of(without)
    kept = [
        sum(stage.parts_bytes["activations"] for stage in memory_of(spec, layout).by_stage)
        for spec in (with_masks, without)
    ]
    model, tokens = without.model, layout.micro_batch_size * without.job.seq_len
    assert kept[0] - kept[1] == 2 * tokens * model.hidden_size * model.num_layers


def terms_of(spec: Any, layout: Any, rank: int) -> dict[str, dict[str, float]]:
    stage = memory_of(spec, layout).by_stage[rank]
    return {moment.name: dict(moment.terms_bytes) for moment in stage.moments}


def test_token_prediction_keeps_its_inputs_its_projections_and_its_layers_activations() -> None:
    plain, deep = spec_of(DENSE), spec_of(DENSE, mtp_num_layers=1)
    layout = layout_of(plain, tp=2, pp=2)
    shard = shard_of(layout, plain.job)
    local, hidden = 4096 / 2, 4096
    block = layer_activations(plain.model, plain.model.layers[-1], shard).saved_bytes
    extra = [
        there.parts_bytes["activations"] - here.parts_bytes["activations"]
        for there, here in zip(memory_of(deep, layout).by_stage, memory_of(plain, layout).by_stage, strict=True)
    ]
    # enorm, hnorm, eh_proj (twice as wide) and final norm; the slice that the block takes keeps the gathered whole.
    assert extra == [0, block + 2 * hidden * (5 * local + (4096 - local)) + 3 * 4 * local]


def test_token_prediction_is_recomputed_with_method_uniform_alone() -> None:
    spec = spec_of(DENSE, mtp_num_layers=1)
    layouts = {method: layout_of(spec, recompute=full(method, 1)) for method in ("uniform", "block")}
    layer = mtp_layer(spec.model)
    one = {
        method: kept_activations(spec.model, layer, shard_of(layout, spec.job), layout.recompute)
        for method, layout in layouts.items()
    }
    assert one["uniform"].kept_bytes == 2 * 2 * 4096 * 4096
    assert one["block"].kept_bytes == one["uniform"].plain_bytes
    assert one["block"].recomputed_bytes == 0


def test_the_losses_of_all_depths_are_alive_together() -> None:
    depths = [spec_of(DENSE, mtp_num_layers=n) for n in (0, 1, 2)]
    layout = layout_of(depths[0], pp=2)
    logits = 4096 * 151_936
    losses = [terms_of(spec, layout, 1)["loss"] for spec in depths]
    assert "logits of multi-token prediction" not in losses[0]
    assert [loss["logits of multi-token prediction"] / logits for loss in losses[1:]] == [4 + 2, 8 + 2]
    fused = replace(layout, cross_entropy_fusion=True)
    assert terms_of(depths[2], fused, 1)["loss"]["logits of multi-token prediction"] == 2 * 2 * logits
    native = replace(fused, cross_entropy_fusion_impl="native")
    assert terms_of(depths[2], native, 1)["loss"]["logits of multi-token prediction"] == 2 * 4 * logits


def test_one_table_looked_up_twice_has_its_first_gradient_wait_through_the_backward_of_the_layers() -> None:
    spec = spec_of(DENSE, mtp_num_layers=1)
    table = 2 * spec.model.vocab_size * spec.model.hidden_size
    shared = terms_of(spec, layout_of(spec), 0)
    assert shared["embedding gradient"]["gradient of the table"] == 2 * table
    apart = terms_of(spec, layout_of(spec, pp=2), 1)
    assert apart["embedding gradient"]["gradient of the table"] == table
    assert apart["backward"]["embedding gradient that waits"] == 0
